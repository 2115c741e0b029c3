"""What ``codetta show`` found as one HTML page that needs nothing else: styles inside, a fold for each pass."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from html import escape

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from codetta.audit.passes import Pass, Shown

# The sixteen colours of a terminal as ink on white paper, the bright ones too.
INK = [(34, 34, 34), (160, 30, 30), (20, 110, 40), (130, 85, 0), (20, 70, 170), (120, 40, 140), (0, 105, 115)]
THEME = TerminalTheme((255, 255, 255), (34, 34, 34), [*INK, (90, 90, 90)], [(110, 110, 110), *INK[1:], (34, 34, 34)])
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
details { border-top: 1px solid #ddd; } details > p { margin: 0 0 .5rem; color: #555; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; padding: .25rem 0; }
summary small { font-weight: 400; color: #666; margin-left: .5rem; }
pre { font: 13px/1.45 ui-monospace, monospace; overflow-x: auto; margin: 0 0 1rem; padding: .5rem;
  background: #fafafa; }
pre > div { min-height: 1.45em; width: max-content; min-width: 100%; } .new { background: #dff3df; }
pre span { background-color: transparent !important; }
"""
CUT = "\N{SYMBOL FOR UNIT SEPARATOR}"  # a line of its own between two texts


def page(shown: Sequence[Shown]) -> str:
    """The whole document."""
    colours, codes = _coloured([p for s in shown for p in s.passes])
    title = escape(", ".join(s.title for s in shown))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(_section(s, codes) for s in shown)
    legend = "<p>A green line, marked +, was not there after the pass before.</p>"
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}{colours}</style></head>\n'
        f"<body><h1>codetta show</h1>{legend}\n{body}\n</body></html>\n"
    )


def _section(shown: Shown, codes: Iterator[str]) -> str:
    passes = "\n".join(_fold(i, p, next(codes)) for i, p in enumerate(shown.passes, 1))
    return f"<section><h2>{escape(shown.title)}</h2>\n{passes}</section>"


def _fold(number: int, p: Pass, code: str) -> str:
    lines = code.split("\n")
    count = f"{len(lines)} lines" + (f", {len(p.new)} new" if p.new else "")
    summary = f"<summary>{number}. {escape(p.name)}<small>{count}</small></summary>"
    marked = "".join(f"<div{' class=new' if i in p.new else ''}>{line}</div>" for i, line in enumerate(lines))
    return f"<details open>{summary}<p>{escape(p.note)}</p><pre>{marked}</pre></details>"


def _coloured(passes: Sequence[Pass]) -> tuple[str, Iterator[str]]:
    """The style sheet of all texts together, and each text as HTML."""
    console = Console(record=True, file=io.StringIO(), width=100_000, color_system="standard", force_terminal=True)
    for p in passes:
        console.print(p.highlighted(), end=f"{CUT}\n", crop=False, soft_wrap=True, highlight=False)
    exported = console.export_html(theme=THEME, code_format=f"{{stylesheet}}{CUT}{{code}}", inline_styles=False)
    colours, *codes = exported.split(CUT)
    return colours, (code.strip("\n") for code in codes)
