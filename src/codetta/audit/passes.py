"""What each pass of the compiler makes of a graph: rule group by rule group, joint graph, plans, kernels."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.syntax import Syntax
from rich.text import Text

from codetta.audit.graph_text import Names, graph_lines
from codetta.backends.hopper.choose import choose, is_bare
from codetta.backends.hopper.columns import NotLowered
from codetta.core.rewrite import Fired, Rule, rewrite
from codetta.ir.graph import Graph
from codetta.ir.program import Program
from codetta.lang.source import program_text
from codetta.partition.plan import Plan, plan_text
from codetta.partition.training import TrainingPlan, derive
from codetta.rules.canon import CANON
from codetta.rules.norm import NORM
from codetta.rules.pairs import PAIRS
from codetta.rules.scale import SCALE, THROUGH
from codetta.rules.siblings import merge_siblings

# The groups of rules/pipeline.py, which applies them together; here each is added to those before it.
GROUPS: tuple[tuple[str, Sequence[Rule]], ...] = (
    ("identities and casts", CANON),
    ("pairs", PAIRS),
    ("row scales", SCALE),
    ("row scales through GEMMs", THROUGH),
    ("norms", NORM),
)
NEW = "+ "  # before a line that is new


@dataclass(frozen=True)
class Pass:
    """One stage: its name, a line about it, its text, and the numbers of the lines that the stage before had not."""

    name: str
    note: str
    text: str
    new: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"name": self.name, "note": self.note, "text": self.text, "new_lines": list(self.new)}

    def highlighted(self) -> Text:
        """The text with its syntax coloured, in a terminal's own colours, and its new lines marked."""
        python = Syntax("", "python", theme="ansi_light", background_color="default")
        lines = python.highlight(self.text).split("\n", allow_blank=True)[: self.text.count("\n") + 1]
        marked = Text(overflow="ignore", no_wrap=True)
        for i, line in enumerate(lines):
            marked.append(NEW if i in self.new else " " * len(NEW), style="bold green" if i in self.new else "")
            marked.append_text(line)
            marked.append("\n")
        return marked


@dataclass(frozen=True)
class Shown:
    """Everything that ``codetta show`` says of one program or segment."""

    title: str
    passes: tuple[Pass, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"title": self.title, "passes": [p.to_json() for p in self.passes]}

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self.title, style="bold"), ""]
        for i, p in enumerate(self.passes, 1):
            parts += [Text(f"--- {i}. {p.name}", style="bold"), Text(p.note, style="dim"), p.highlighted()]
        return Group(*parts)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=120)
        with console.capture() as text:
            console.print(self, crop=False)
        return text.get()


def new_lines(before: str, after: str) -> tuple[int, ...]:
    """The numbers of the lines of ``after`` that ``before`` has not, in this order."""
    matcher = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    changed = (range(j1, j2) for tag, _, _, j1, j2 in matcher.get_opcodes() if tag in ("replace", "insert"))
    return tuple(j for lines in changed for j in lines)


# --- a graph, forward -------------------------------------------------------------------------------------------------


def stages(graph: Graph) -> Iterator[tuple[str, str, Graph]]:
    """The graph as it is captured and after each group of rules: a name, what happened, the graph."""
    yield "captured", "what the model computes, as one graph", graph
    merged = merge_siblings(graph)
    yield "siblings", _merged(graph, merged), merged
    graph, rules = merged, list[Rule]()
    for name, group in GROUPS:
        rules += group
        fired: list[Fired] = []
        roots = rewrite(graph.roots, rules, record=fired)
        graph = Graph(graph.inputs, tuple((n, r) for (n, _), r in zip(graph.outputs, roots, strict=True)))
        yield name, _laws(fired), graph
    merged = merge_siblings(graph)
    yield "siblings, now that scales have left", _merged(graph, merged), merged


def _merged(before: Graph, after: Graph) -> str:
    fewer = len(before.contractions) - len(after.contractions)
    return f"{fewer} GEMMs fewer: those that share an operand became one" if fewer else "nothing to merge"


def _laws(fired: Sequence[Fired]) -> str:
    counts = Counter(f.rule.law for f in fired)
    return "; ".join(f"{law} (x{count})" for law, count in counts.items()) or "no rule fired"


def forward_passes(graph: Graph, names: Names) -> list[Pass]:
    """The stages as text."""
    found: list[Pass] = []
    before: Graph | None = None
    for name, note, at in stages(graph):
        found.append(graph_pass(name, note, at, names, before))
        before = at
    return found


def graph_pass(name: str, note: str, graph: Graph, names: Names, before: Graph | None = None) -> Pass:
    """A graph as a pass; marked are the values that ``before`` had not. Values are interned: equal ones are one."""
    lines = graph_lines(graph, names)
    had = {*before.inputs, *before.nodes, *before.outputs} if before is not None else {line.about for line in lines}
    new = tuple(i for i, line in enumerate(lines) if line.about not in had)
    return Pass(name, note, "\n".join(line.text for line in lines), new)


# --- a training step --------------------------------------------------------------------------------------------------


def training_passes(training: TrainingPlan, names: Names, rows: int) -> list[Pass]:
    """The joint graph beside the forward one, both plans as source, and the kernels."""
    forward = training.graph
    grads, cotangents = derive(forward, training.wrt)
    joint = Graph((*forward.inputs, *cotangents), (*forward.outputs, *grads.items()))
    kept = ", ".join(dict.fromkeys(k.output for k in training.kept)) or "nothing besides its inputs"
    note = f"with the gradients of {', '.join(training.wrt)}; forward keeps {kept}"
    both = graph_pass("forward and backward", note, joint, names, forward)
    return [both, *plan_passes({"forward": training.forward, "backward": training.backward}, rows)]


def plan_passes(plans: dict[str, Plan], rows: int) -> list[Pass]:
    """Plans as source, and the kernels of their GEMMs."""
    texts = [Pass(f"plan, {name}", _counts(plan), plan_text(plan).rstrip()) for name, plan in plans.items()]
    return [*texts, *kernel_passes(plans, rows)]


def _counts(plan: Plan) -> str:
    kinds = ("gemm", "finalize", "leftover", "prepare")
    counts = [f"{plan.count(k)} {k}{'s' if plan.count(k) != 1 else ''}" for k in kinds if plan.count(k)]
    return f"{', '.join(counts)}; {plan.epilogues} of the gemms with an epilogue"


def kernel_passes(plans: dict[str, Plan], rows: int) -> list[Pass]:
    """The lowered function of each GEMM that has an epilogue, with the configuration that is chosen for it."""
    programs = {
        s.program: f"{name}, {s.program.name}" for name, p in plans.items() for s in p.steps if s.kind == "gemm"
    }
    return [lowered_pass(name, program, rows) for program, name in programs.items() if not is_bare(program)]


def lowered_pass(name: str, program: Program, rows: int) -> Pass:
    """One program as a kernel on SM90, or why it is none."""
    try:
        lowered, config = choose(program, rows)
    except NotLowered as reason:
        note = f"a GEMM of the library and a generated kernel behind it: {reason}"
        return Pass(f"kernel: {name}", note, program_text(program).rstrip())
    note = f"configuration {config}; called on {CALLED[lowered.mode]}"
    text = "\n".join(filter(None, (lowered.prepass, lowered.source))).rstrip()
    return Pass(f"kernel: {name}", note, text)


CALLED = {
    "element": "one column of the accumulator",
    "pair": "the two lanes of a stacked GEMM, side by side in registers",
    "halves": "one column, with the one half a head away",
    "adjacent": "one column, with the other of its pair",
}
