"""What a program is compared with: the bare GEMM, a GEMM with Inductor's epilogue, a device copy, and others' kernels.

A baseline is prepared first (operands in its layout, output buffers, the compiled function); only its call is timed:
the cuBLAS GEMM into a buffer that exists, and what comes behind it. Inductor's and QuACK's store all that ours store
for backward; Liger's and FlashInfer's what their libraries keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.bench.plain import KINDS, Expression, interleaved
from codetta.bench.steps import Case, Memory

Call = Callable[[], Mapping[str, Tensor]]
BARE = "cuBLAS"
COPY = "device copy"


@dataclass(frozen=True)
class Baseline:
    """A call, which gives outputs by the names of ``plain``; ``alternating`` names those whose columns of gate and up
    alternate. ``prepare`` is asked for the call only where the baseline is wanted."""

    name: str
    prepare: Callable[[], Call]
    alternating: tuple[str, ...] = ()

    def in_halves(self, found: Mapping[str, Tensor]) -> Memory:
        """The outputs with gate and up one after the other, to compare them."""
        return {n: t.unflatten(-1, (-1, 2)).mT.flatten(-2) if n in self.alternating else t for n, t in found.items()}


@dataclass(frozen=True)
class Product:
    """The operands of a case's GEMM, ``b`` as the library takes it, and a buffer for its result in bfloat16."""

    form: str
    a: Tensor
    w: Tensor
    out: Tensor

    def __call__(self) -> Tensor:
        """The bare GEMM."""
        x = self.a.t() if self.form == "tn" else self.a
        return torch.mm(x, self.w.t() if self.form == "nt" else self.w, out=self.out)


def product_of(case: Case) -> Product:
    """The bare GEMM of a case. Stacked weights are one tensor here."""
    gemm = case.step.program.gemm
    if gemm is None:
        raise TypeError(f"{case.name} has no GEMM")
    a, weights = case.memory[case.step.a], [case.memory[w] for w in case.step.b]
    w = weights[0] if len(weights) == 1 else torch.cat(weights)
    rows = a.shape[1] if gemm.form == "tn" else a.shape[0]
    out = a.new_empty(rows, w.shape[0] if gemm.form == "nt" else w.shape[1])
    return Product(gemm.form, a, w, out)


def baselines_of(case: Case) -> Iterator[Baseline]:
    """The GEMM, and Inductor behind it; for a step without a GEMM, a copy that moves as many bytes."""
    if case.step.program.gemm is None:
        yield Baseline(COPY, lambda: _copy(case))
        return
    product = product_of(case)
    yield Baseline(BARE, lambda: _bare(product))
    if not case.role:
        return
    kind = KINDS[case.role]
    if kind.interleaved is None:
        yield Baseline("compile", lambda: _compiled(kind.stacked, product, case.roles))
        return
    alternate = kind.interleaved
    yield Baseline("compile, stacked", lambda: _compiled(kind.stacked, product, case.roles))
    other = Product(product.form, product.a, interleaved(product.w, 0), product.out) if kind.pairs_weight else product
    yield Baseline(
        "compile, interleaved",
        lambda: _compiled(alternate, other, alternating_roles(case)),
        ("z", "dz"),
    )


def alternating_roles(case: Case) -> dict[str, Tensor]:
    """A case's operands, its pre-activation with gate and up in alternating columns."""
    return {n: interleaved(t, 1) if n == "z" else t for n, t in case.roles.items()}


def inductor(fn: Callable[..., object], on_gpu: bool) -> Callable[..., object]:
    """``fn`` as ``torch.compile`` makes it for these very shapes; where there is no GPU, traced and not compiled."""
    found: Callable[..., object] = torch.compile(fn, dynamic=False, backend="inductor" if on_gpu else "eager")
    return found


def _bare(product: Product) -> Call:
    def call() -> Mapping[str, Tensor]:
        product()
        return {}

    return call


def _compiled(expression: Expression, product: Product, roles: Mapping[str, Tensor]) -> Call:
    behind = inductor(expression, product.a.is_cuda)

    def call() -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = behind(product(), **roles)  # type: ignore[assignment]
        return found

    return call


def _copy(case: Case) -> Call:
    """Half of the bytes are read, half are written."""
    device = next(iter(case.memory.values())).device
    source = torch.empty(max(case.bytes // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def call() -> Mapping[str, Tensor]:
        target.copy_(source)
        return {}

    return call
