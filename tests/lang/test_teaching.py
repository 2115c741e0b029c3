"""Errors that teach: each class of mistake shows the line, the reason, and code to write, which then traces."""

from __future__ import annotations

import linecache
import textwrap
from dataclasses import dataclass, field

import pytest

import codetta
from codetta.errors import CodettaError, ShapeError, SourceLine
from codetta.lang.functions import LANGUAGE

SCOPE = {name: getattr(codetta, name) for name in codetta.__all__ if name[0].isupper() or name in LANGUAGE}
SCOPE |= {name: getattr(codetta, name) for name in ("bf16", "f16", "f32", "i64", "epilogue", "finalize", "leftover")}


@dataclass(frozen=True)
class Mistake:
    """A program with one wrong line (after ``#!``), the reason that is told, and the code that is proposed for it.

    ``at`` is the text of the line that the code replaces, if it is not the wrong one: its ``def``, or nothing to be
    replaced at all, for code that goes elsewhere."""

    kind: str
    source: str
    reason: str
    write: str
    at: str | None = ""
    more: dict[str, object] = field(default_factory=dict)


MISTAKES = [
    Mistake(
        "crosses tiles",
        """
        @epilogue
        def norm(acc: Tile, gain: RowVec):
            ssq = sum_row(acc * acc)
            rstd = rsqrt(ssq / 64.0 + 1e-6)  #!
            return dict(y=acc * gain * rstd)
        """,
        "`ssq / 64.0` needs `ssq` (= sum_row(acc * acc)), which crosses tiles",
        """
        return dict(..., ssq=ssq)
        @finalize
        def after_norm(ssq: ColVec):
            return dict(rstd=rsqrt(ssq / 64.0 + 1e-06))
        """,
        None,
    ),
    Mistake(
        "crosses tiles, only to be scaled",
        """
        @epilogue
        def head(acc: Tile, rstd: ColVec, target: ColVec[i64]):
            return dict(logits=acc, picked=select_column(acc, target) * rstd)  #!
        """,
        "`picked` (= select_column(acc, target) * rstd) needs `select_column(acc, target)`, which crosses tiles",
        "return dict(..., picked=select_column(acc * rstd, target))  # a factor per row or column goes inside",
        None,
    ),
    Mistake(
        "crosses tiles, a sum only to be scaled",
        """
        @epilogue
        def sums(acc: Tile, gain: RowVec):
            x = acc + gain
            total = sum_col(x * x) * gain  #!
            return dict(x=x, total=total)
        """,
        "which crosses tiles",
        "return dict(..., total=sum_col((x * x) * gain))  # a factor per row or column goes inside",
        None,
    ),
    Mistake(
        "crosses tiles, beside another vector",
        """
        @epilogue
        def head(acc: Tile, scale: ColVec):
            return dict(logits=acc, lse=logsumexp_row(acc) * scale)  #!
        """,
        "`lse` (= logsumexp_row(acc) * scale) needs `logsumexp_row(acc)`, which crosses tiles",
        """
        return dict(..., row=logsumexp_row(acc))
        @finalize
        def after_head(row: ColVec, scale: ColVec):
            return dict(lse=row * scale)
        """,
        None,
    ),
    Mistake(
        "crosses tiles, a tile made of it",
        """
        @epilogue
        def norm(acc: Tile):
            return acc * sum_row(acc)  #!
        """,
        "`acc * sum_row(acc)` needs `sum_row(acc)`, which crosses tiles",
        """
        return dict(..., row=sum_row(acc))
        # and in the next program, def after_norm(acc: Tile, row: ColVec):
        return acc * row
        """,
        None,
    ),
    Mistake(
        "crosses tiles, ranges of columns",
        """
        @epilogue
        def attention(acc: Tile[384]):
            q, k, v = columns(acc, 128, 128, 128)
            return k * v  #!
        """,
        "`k * v` combines columns that lie in different tiles",
        """
        k, v = halves(acc)  # lanes lie in one tile
        return k * v
        """,
    ),
    Mistake(
        "wrong kind",
        """
        @epilogue
        def parts(acc: Tile, rstd: ColVec):
            left, right = halves(rstd)  #!
            return acc * left * right
        """,
        "part: only a Tile, RowVec or Table has parts of columns, not ColVec[M, f32]",
        "left, right = (rstd, rstd)",
    ),
    Mistake(
        "wrong kind of index",
        """
        @epilogue
        def pick(acc: Tile, target: ColVec):
            return select_column(acc, target)  #!
        """,
        "the indices are ColVec[M, f32], not an integer ColVec",
        "def pick(acc: Tile, target: ColVec[i64]):",
        "def pick",
    ),
    Mistake(
        "wrong kind of condition",
        """
        @epilogue
        def relu(acc: Tile):
            return where(acc, acc, 0.0)  #!
        """,
        "where: the condition is Tile[M, N, f32], not a boolean",
        "return where(acc > 0, acc, 0.0)",
    ),
    Mistake(
        "reduction of what has no such axis",
        """
        @epilogue
        def twice(acc: Tile, rstd: ColVec):
            total = sum_row(rstd)  #!
            return acc * total
        """,
        "ColVec[M, f32] cannot be reduced to a ColVec",
        "total = rstd",
    ),
    Mistake(
        "missing store",
        """
        @epilogue
        def forgets(acc: Tile, gain: RowVec):  #!
            y = acc * gain
        """,
        "the function returns nothing, so nothing is stored",
        "return dict(y=y)",
        "+",
    ),
    Mistake(
        "stores without names",
        """
        @epilogue
        def unnamed(acc: Tile, gain: RowVec):  #!
            y = acc * gain
            return y, acc
        """,
        "the function returns a tuple; every output has a name",
        "return dict(y=y, acc=acc)",
        "return y, acc",
    ),
    Mistake(
        "a dtype that cannot be stored",
        """
        @epilogue
        def narrow(acc: Tile):
            return dict(y=to(acc, torch.float8_e4m3fn))  #!
        """,
        "torch.float8_e4m3fn is no dtype that can be stored",
        "return dict(y=to(acc, bf16))",
        more={"torch": __import__("torch")},
    ),
    Mistake(
        "a dtype under another name",
        """
        @epilogue
        def narrow(acc: Tile):
            y = to(acc * 2.0, torch.float16)  #!
            return y
        """,
        "torch.float16 is no dtype that can be stored",
        "y = to(acc * 2.0, f16)",
        more={"torch": __import__("torch")},
    ),
    Mistake(
        "unknown primitive",
        """
        @epilogue
        def act(acc: Tile, bias: RowVec):
            return relu(acc + bias)  #!
        """,
        "name 'relu' is not defined",
        "return maximum(acc + bias, 0.0)",
    ),
    Mistake(
        "misspelt primitive",
        """
        @epilogue
        def act(acc: Tile):
            y = gelu_tahn(acc) * 2.0  #!
            return y
        """,
        "name 'gelu_tahn' is not defined",
        "y = gelu_tanh(acc) * 2.0",
    ),
    Mistake(
        "PyTorch's function",
        """
        @epilogue
        def act(acc: Tile):
            return torch.sigmoid(acc) * acc  #!
        """,
        "torch's sigmoid on a traced Tile",
        "return sigmoid(acc) * acc",
        more={"torch": __import__("torch")},
    ),
    Mistake(
        "PyTorch's method",
        """
        @epilogue
        def sums(acc: Tile):
            return dict(y=acc, s=acc.sum(1))  #!
        """,
        "'Tile' object has no attribute 'sum'",
        "return dict(y=acc, s=sum_row(acc))",
    ),
    Mistake(
        "Python's math",
        """
        @epilogue
        def grow(acc: Tile):
            return math.exp(acc)  #!
        """,
        "need a number now; this Tile[M, N, f32] has no value yet",
        "return exp(acc)",
        more={"math": __import__("math")},
    ),
    Mistake(
        "a power",
        """
        @epilogue
        def cube(acc: Tile):
            return acc**3 + 1.0  #!
        """,
        "** takes the exponents 2, -1, 0.5 and -0.5, not 3",
        "return acc * acc * acc + 1.0",
    ),
    Mistake(
        "control flow, an if with two returns",
        """
        @epilogue
        def leaky(acc: Tile):
            if acc > 0:  #!
                return acc
            return acc * 0.1
        """,
        "this Tile[M, N, boolean] has no value yet",
        "return where(acc > 0, acc, acc * 0.1)",
        "if acc > 0:\n        return acc\n    return acc * 0.1",
    ),
    Mistake(
        "control flow, an if that assigns",
        """
        @epilogue
        def leaky(acc: Tile):
            y = acc
            if acc < 0:  #!
                y = acc * 0.1
            return y
        """,
        "this Tile[M, N, boolean] has no value yet",
        "y = where(acc < 0, acc * 0.1, y)",
        "if acc < 0:\n        y = acc * 0.1",
    ),
    Mistake(
        "control flow, a conditional expression",
        """
        @epilogue
        def leaky(acc: Tile):
            return dict(y=acc if acc > 0 else acc * 0.1)  #!
        """,
        "`if`, `while`, `and`, `or`, `not` and chained comparisons need a bool now",
        "return dict(y=where(acc > 0, acc, acc * 0.1))",
    ),
    Mistake(
        "control flow, and, or, chains",
        """
        @epilogue
        def band(acc: Tile):
            inside = 0 < acc < 1 or acc > 5  #!
            return where(inside, acc, 0.0)
        """,
        "need a bool now",
        "inside = (0 < acc) & (acc < 1) | (acc > 5)",
    ),
    Mistake(
        "unpacking",
        """
        @epilogue
        def gate(acc: Tile):
            a, b = acc  #!
            return a * b
        """,
        "cannot be indexed or unpacked",
        "a, b = halves(acc)",
    ),
    Mistake(
        "shapes that do not broadcast",
        """
        @epilogue
        def scaled(acc: Tile, gain: RowVec[1024]):
            return acc * gain  #!
        """,
        "mul: column counts differ: Tile[M, N, f32] and RowVec[1024, f32]",
        "def scaled(acc: Tile, gain: RowVec):",
        "def scaled",
    ),
    Mistake(
        "shapes that do not broadcast, a lane and a whole",
        """
        @epilogue
        def gated(acc: Tile["2*N"], bias: RowVec["2*N"]):
            gate, up = halves(acc)
            return gate * up + bias  #!
        """,
        "add: column counts differ: Tile[M, N, f32] and RowVec[2*N, f32]",
        """
        left, right = halves(bias)
        return gate * up + left
        """,
    ),
    Mistake(
        "shapes that do not broadcast, turned",
        """
        @epilogue
        def added(acc: Tile, x: Tile["N", "M"]):
            return acc + x  #!
        """,
        "add: rows differ",
        "def added(acc: Tile, x: Tile):",
        "def added",
    ),
    Mistake(
        "groups that do not divide",
        """
        @epilogue
        def heads(acc: Tile[100]):
            a, b = halves(acc, groups=3)  #!
            return a * b
        """,
        "does not divide",
        "a, b = halves(acc, groups=2)",
    ),
    Mistake(
        "arithmetic on a condition",
        """
        @epilogue
        def count(acc: Tile):
            hits = (acc > 0) + 1.0  #!
            return hits
        """,
        "add: arithmetic on a boolean",
        "hits = where(acc > 0, 1.0, 0.0) + 1.0",
    ),
    Mistake(
        "parts used as a whole",
        """
        @epilogue
        def gate(acc: Tile):
            return acc * halves(acc)  #!
        """,
        "mul takes traced values and numbers, not a tuple",
        """
        left, right = halves(acc)
        return acc * left
        """,
        None,
    ),
]


def traced(source: str, name: str, more: dict[str, object]) -> None:
    """Run a text as a file of its own, so that its lines can be shown."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), {**SCOPE, "__name__": "given", **more})


def repaired(m: Mistake, source: str, line: str, write: str) -> str:
    """The source with the code that is proposed in its place."""
    indent = line[: len(line) - len(line.lstrip())]
    if m.at == "+":
        return f"{source}    {write}\n"
    if m.at is None or not m.at:
        return source.replace(line, textwrap.indent(write, indent))
    if "\n" in m.at:
        return source.replace(m.at, write)
    old = next(text for text in source.splitlines() if m.at in text)
    return source.replace(old, textwrap.indent(write, old[: len(old) - len(old.lstrip())]))


@pytest.mark.parametrize("m", MISTAKES, ids=lambda m: m.kind.replace(" ", "-"))
def test_line_reason_and_correction(m: Mistake):
    lines = textwrap.dedent(m.source).strip().splitlines()
    number = next(i for i, text in enumerate(lines, 1) if "#!" in text)
    lines[number - 1] = lines[number - 1].replace("#!", "").rstrip()
    source, write = "\n".join(lines) + "\n", textwrap.dedent(m.write).strip("\n")
    name = f"<{m.kind}>"
    with pytest.raises(CodettaError) as caught:
        traced(source, name, m.more)
    e = caught.value
    assert e.where == SourceLine(name, number, lines[number - 1].strip())
    assert m.reason in e.message
    assert e.write == write.strip()
    shown = str(e)
    assert f"at {name}:{number}: {lines[number - 1].strip()}" in shown
    assert f"write: {write.strip().splitlines()[0]}" in shown
    if m.at is not None:
        traced(repaired(m, source, lines[number - 1], write), name, m.more)


def test_what_is_proposed_for_a_finalize_is_a_finalize():
    crossing = next(m for m in MISTAKES if m.kind == "crosses tiles")
    _, step = textwrap.dedent(crossing.write).strip().split("\n", 1)
    traced(step, "<finalize>", {})


def test_code_of_several_lines_is_indented():
    shown = str(ShapeError("no", write="a = 1\nb = 2"))
    assert shown == "no\n  write: a = 1\n         b = 2"


def test_without_a_source_there_is_still_a_reason():
    scope = {**SCOPE, "__name__": "given"}
    exec("def f(acc: Tile):\n    return acc if acc > 0 else acc\n", scope)
    with pytest.raises(CodettaError) as caught:
        scope["epilogue"](scope["f"])
    assert caught.value.write == "y = where(condition, a, b)"
