"""What is asked of a finished program: it is right, it is one kernel, it does not spill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from codetta.author.kernels import FORWARD, Kernel

WAYS = {
    "kernel": "one kernel",
    "library": "library GEMM",
    "rows": "generated",
    "split": "GEMM + generated",
    "failed": "fails",
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """The three, of the forward alone, which is what was written; None where no kernel was compiled for an answer.

    A step without a GEMM is one generated kernel, and a bare GEMM the library's; whether these spill is not known."""

    right: bool
    one_kernel: bool | None
    no_spills: bool | None

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def __str__(self) -> str:
        words = ["right" if self.right else "wrong"]
        if self.one_kernel is None:
            words.append("kernels not looked at")
        else:
            words.append("one kernel" if self.one_kernel else "no single kernel")
        if self.no_spills is not None:
            words.append("no spills" if self.no_spills else "spills")
        return ", ".join(words)


def conditions(right: bool, kernels: Sequence[Kernel]) -> Conditions:
    """The three conditions of a program that agrees with its reference, or does not, and was compiled to these."""
    own = [k for k in kernels if k.phase == FORWARD]
    if not own:
        return Conditions(right, None, None)
    one = len(own) == 1 and own[0].kind not in ("split", "failed")
    known = all(k.spill_stores is not None for k in own)
    return Conditions(right, one, not any(k.spills for k in own) if known else None)


def derived(kernels: Sequence[Kernel]) -> str:
    """What was derived of a program, its forward in training and its backward, in words; empty where nothing was."""
    found = [k for k in kernels if k.phase != FORWARD]
    if not found:
        return ""
    count = Counter(WAYS[k.kind].removeprefix("one ") for k in found)
    return ", ".join(f"{way} {n}" for way, n in [*count.items(), ("spilling", sum(k.spills for k in found))])
