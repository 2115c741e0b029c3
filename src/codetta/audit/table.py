"""docs/models.md: what becomes of each model family, whole graph and per block."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from codetta.audit.explain import Explanation, explain, explain_blocks, split_programs
from codetta.audit.families import FAMILIES, IMAGES, LAYERS, TOKENS, subject
from codetta.audit.report import gigabytes

REGIMES = ("Whole graph", "Per block")
HEAD = """# Model families

What codetta makes of unmodified models: {layers} layers of each published configuration, all its other sizes as
published, in bf16 with {tokens} tokens a step ({images} images for encoders). `codetta explain families` writes this
page, and a test counts again and compares. Everything here is counted, nothing measured; [explain.md](explain.md) says
how.

*Whole graph* is the model in one `torch.compile`, with its loss if it has one. *Per block* is each layer compiled
alone, the {layers} together; the embedding, the last norm, the head and the loss are then not ours.

- Pairs are forward / backward. *Epilogues* are GEMMs that do more than store their accumulator; *leftovers* are passes
  that no epilogue could take, by reason in the second table.
- *Bytes* are activations moved, forward and backward together, and what that is of eager PyTorch's, operator by
  operator, and of ideal fusion, which makes one pass of all that lies between two GEMMs. All three count the segments
  alone, without attention, embedding and experts.
- *Split* programs are no single kernel on a Hopper GPU: a GEMM, and a generated kernel behind it, by reason in the
  third table.
"""

COLUMNS = ("family", "GEMMs", "epilogues", "finalizes", "leftovers", "split", "bytes", "of eager", "of ideal fusion")


@dataclass(frozen=True, slots=True)
class Row:
    """A family in one regime."""

    family: str
    found: Explanation

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        forward, backward = self.found.forward, self.found.backward
        halves = ((getattr(forward, n), getattr(backward, n)) for n in ("gemms", "epilogues", "finalizes", "leftovers"))
        moved, eager, fusion = (
            getattr(forward, n) + getattr(backward, n) for n in ("bytes", "bytes_eager", "bytes_boundary_fusion")
        )
        pairs = (f"{a} / {b}" for a, b in halves)
        split = str(sum(len(names) for names in self._split.values()))
        return (self.family, *pairs, split, gigabytes(moved), f"{moved / eager:.0%}", f"{moved / fusion:.0%}")

    @property
    def leftovers(self) -> list[tuple[str, ...]]:
        """A row for each reason of leftovers."""
        halves = (self.found.forward, self.found.backward)
        forward, backward = (Counter(map(_plain, half.leftover_reasons)) for half in halves)
        return [(self.family, f"{forward[r]} / {backward[r]}", r) for r in dict.fromkeys((*forward, *backward))]

    @property
    def split(self) -> list[tuple[str, ...]]:
        """A row for each reason why programs are no single kernel."""
        return [(self.family, ", ".join(f"`{n}`" for n in names), reason) for reason, names in self._split.items()]

    @property
    def _split(self) -> dict[str, tuple[str, ...]]:
        return split_programs(self.found.plans.values())


def models_page(names: Iterable[str] = tuple(FAMILIES)) -> str:
    """The page, of all families or some."""
    found = [rows_of(name) for name in names]
    lines = [HEAD.format(layers=LAYERS, tokens=f"{TOKENS[0] * TOKENS[1]:,}", images=IMAGES)]
    for regime in REGIMES:
        rows = [family[regime] for family in found]
        lines += [f"## {regime}", ""]
        lines += _markdown(COLUMNS, [r.cells for r in rows])
        lines += _markdown(("family", "leftovers", "reason"), [cells for r in rows for cells in r.leftovers])
        lines += _markdown(("family", "split programs", "reason"), [cells for r in rows for cells in r.split])
    return "\n".join(lines).rstrip() + "\n"


def rows_of(name: str) -> dict[str, Row]:
    """A family in each regime."""
    torch._dynamo.reset()
    found = subject(name, torch.bfloat16, tiny=False)
    made = (explain(found.model, **found.batch), explain_blocks(found.model, found.batch))
    return {regime: Row(found.title, e) for regime, e in zip(REGIMES, made, strict=True)}


def _plain(reason: str) -> str:
    """A leftover's reason without the names of its values, so that alike ones are counted together."""
    reason = re.sub(r"no GEMM here produces [^:]*:", "no GEMM here produces its input:", reason)
    reason = re.sub(r"needs <[^>]*>, a statistic", "needs a statistic", reason)
    return re.sub(r" <[^>]*>", "", reason)


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table, if it has rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    if lines:
        yield f"| {' | '.join(columns)} |"
        yield "|---" * len(columns) + "|"
        yield from lines
        yield ""
