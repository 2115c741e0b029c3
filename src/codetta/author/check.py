"""One command's worth of an author's questions: does it compute what it should, and what is it as a kernel.

The JSON of ``codetta check --json`` has these names, and keeps them while ``codetta_check`` is 1: ``ok``, ``file``,
``error`` (null, or ``kind``, ``message``, ``where``, ``hint``, ``write``; then there are no programs) and ``programs``.
A program has ``name``, ``role``, ``line``, ``ok``, ``conditions`` (``Conditions``), ``sizes``, ``text``,
``comparisons`` (``Compared``), ``backward`` (``name``, ``role``, ``text``), ``kernels`` (``Kernel``), ``advice`` (null,
or ``where``, ``reason``, ``write``), ``times`` (``Measured``) and ``skipped`` (``what``, ``why``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from codetta.author.advice import Advice, advice
from codetta.author.bind import compiled_form, real_sizes
from codetta.author.compare import Compared
from codetta.author.conditions import Conditions, conditions
from codetta.author.file import Authored, load
from codetta.author.kernels import FORWARD, Kernel, Part, kernels, parts_of
from codetta.author.measured import Measured, on_gpu, times
from codetta.author.numbers import compare_all, emulated, has_backward
from codetta.author.tables import shown
from codetta.backends.hopper.support import why_not
from codetta.core.types import ROWS
from codetta.errors import CodettaError, UnsupportedError
from codetta.ir.program import Program
from codetta.lang.source import program_text

VERSION = 1
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Skipped:
    """A part of the check that was not done, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Checked:
    """What was found out about one program."""

    name: str
    role: str
    line: str
    sizes: Mapping[str, int]
    text: str
    comparisons: Sequence[Compared]
    backward: Sequence[Program]
    kernels: Sequence[Kernel]
    times: Sequence[Measured]
    skipped: Sequence[Skipped]
    advice: Advice | None = None

    @property
    def right(self) -> bool:
        """Whether every comparison agrees, also those of what is timed."""
        return all(c.ok for c in self.comparisons) and not any(t.is_wrong for t in self.times)

    @property
    def ok(self) -> bool:
        """Whether it is right, and every kernel compiles."""
        return self.right and all(k.kind != "failed" for k in self.kernels)

    @property
    def conditions(self) -> Conditions:
        """Whether it is what a finished program is."""
        return conditions(self.right, self.kernels)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "role": self.role,
            "line": self.line,
            "ok": self.ok,
            "conditions": self.conditions.to_json(),
            "sizes": dict(self.sizes),
            "text": self.text,
            "comparisons": [c.to_json() for c in self.comparisons],
            "backward": [{"name": p.name, "role": p.role, "text": program_text(p)} for p in self.backward],
            "kernels": [k.to_json() for k in self.kernels],
            "advice": _as_json(self.advice),
            "times": [m.to_json() for m in self.times],
            "skipped": [{"what": s.what, "why": s.why} for s in self.skipped],
        }


@dataclass(frozen=True)
class Report:
    """A file's programs."""

    file: str
    programs: Sequence[Checked]

    @property
    def ok(self) -> bool:
        """Whether all are right."""
        return all(p.ok for p in self.programs)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        programs = [p.to_json() for p in self.programs]
        return {"codetta_check": VERSION, "ok": self.ok, "file": self.file, "error": None, "programs": programs}

    def __rich__(self) -> RenderableType:
        return shown(self.programs)


def check(place: str, *, quick: bool = False, tell: Tell = lambda _: None) -> Report:
    """Check ``FILE`` or ``FILE::NAME``. ``quick`` compares numbers, at fewer sizes, and compiles nothing."""
    found = [_checked(authored, quick, tell) for authored in load(place)]
    return Report(place.partition("::")[0], found)


def failure(place: str, error: CodettaError) -> dict[str, Any]:
    """The JSON where a file is no epilogue file, or breaks a rule of the language."""
    where = str(error.where) if error.where is not None else ""
    told = {"kind": type(error).__name__, "message": error.message, "where": where, "hint": error.hint or ""}
    told["write"] = error.write or ""
    return {"codetta_check": VERSION, "ok": False, "file": place.partition("::")[0], "error": told, "programs": []}


def _checked(authored: Authored, quick: bool, tell: Tell) -> Checked:
    program, sizes = authored.program, real_sizes(authored.program, authored.sizes)
    tell(f"{authored.name}: values and gradients")
    comparisons = compare_all(authored, sizes, quick=quick)
    exact = compiled_form(program, sizes)
    parts, backward = parts_of(exact)
    skipped = list(_not_done(program, quick))
    found: list[Kernel] = []
    timed: list[Measured] = []
    if not quick:
        comparisons += emulated(backward.programs if backward else ())
        tell(f"{authored.name}: compiling kernels")
        try:
            found = kernels(parts, sizes[ROWS.name])
        except UnsupportedError as error:
            skipped.append(Skipped("kernels", error.message))
        reason = why_not()
        if reason is not None or not found:
            skipped.append(Skipped("running and timing on a GPU", reason or "no kernel was compiled"))
        else:
            tell(f"{authored.name}: running on the GPU")
            comparisons, timed = _on_gpu(authored, exact, parts, found, sizes, comparisons)
    programs = backward.programs if backward else ()
    where, text = str(authored.where), program_text(exact)
    told = advice(program) if any(k.kind == "split" and k.phase == FORWARD for k in found) else None
    return Checked(authored.name, program.role, where, sizes, text, comparisons, programs, found, timed, skipped, told)


def _as_json(found: Advice | None) -> dict[str, str] | None:
    return None if found is None else {"where": str(found.where), "reason": found.reason, "write": found.write}


def _on_gpu(
    authored: Authored,
    program: Program,
    parts: Sequence[Part],
    found: Sequence[Kernel],
    sizes: Mapping[str, int],
    comparisons: list[Compared],
) -> tuple[list[Compared], list[Measured]]:
    """What the GPU says; a program that is wrong is not timed."""
    plan = next(p.plan for p in parts if p.phase == FORWARD)
    comparisons = [*comparisons, *on_gpu(authored, program, plan, sizes)]
    right = all(c.ok for c in comparisons)
    return comparisons, times(authored, program, parts, found, sizes[ROWS.name]) if right else []


def _not_done(program: Program, quick: bool) -> Iterator[Skipped]:
    if quick:
        yield Skipped("kernels", "--quick compares numbers only")
        yield Skipped("running and timing on a GPU", "--quick compares numbers only")
    if not has_backward(program):
        yield Skipped("the derived backward", "an epilogue behind a weight gradient has none")
