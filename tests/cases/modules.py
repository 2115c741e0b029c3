"""Modules and the recorder of calls that tests of conditions share, on the CPU and on kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from codetta.capture.backend import backend
from codetta.runtime import registry
from ways import wide

INPUTS = ("input", "residual", "weight", "bias", "gain")  # what of a Block may want a gradient


class Block(nn.Module):
    """A residual, a norm and a linear with a bias: the five kinds of input that may want a gradient."""

    def __init__(self, width: int = 24, out: int = 16) -> None:
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, out)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.linear(self.norm(x + residual))


class Deep(nn.Module):
    """Two blocks of a Transformer without attention, their loss behind them: every kind of program but a rotation."""

    def __init__(self, width: int = 24, inner: int = 40, vocabulary: int = 65, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-5) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(width, 2 * inner) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        for norm, up, down in zip(self.norms[:2], self.ups, self.downs, strict=True):
            gate, value = up(norm(x)).chunk(2, -1)
            x = x + down(functional.silu(gate) * value)
        logits = wide(self.head(self.norms[2](x)))
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=self.reduction), x


def half(module: nn.Module) -> nn.Module:
    """The module in bfloat16, some of it frozen."""
    for name, p in module.bfloat16().named_parameters():
        if "norm" in name or "bias" in name:
            p.requires_grad_(False)
    return module


class Calls(TorchDispatchMode):
    """Collects the calls of our ops, of a forward pass and, as a context, of a backward pass."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options
        self.found: list[tuple[torch._ops.OpOverload, tuple[object, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "codetta":
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))

    def backend(self, gm, example_inputs):
        """codetta's backend; Dynamo itself takes no mode, so it is entered when the graph is run."""
        inner = backend(gm, example_inputs, options=self.options or None)

        def call(*args):
            with self:
                return inner(*args)

        return call

    def check(self) -> None:
        """PyTorch's own check of the ops, on what they were called with, a loss head's too; of a segment's forward op
        also as autograd sees it."""
        ops = torch.ops.codetta
        segment, head = (ops.segment_forward, ops.segment_backward), (ops.head_forward, ops.head_backward)
        assert {op for op, _ in self.found} == {op.default for op in (*segment, *head)}
        for op, args in self.found:
            torch.library.opcheck(op, tree_map_only(Tensor, lambda t: t.detach().clone(), args))
            tensors = [t.detach().clone() for t in args[0]]
            if op is ops.segment_forward.default:
                segment = registry.segment_of(args[1])
                for n, t in zip(segment.graph.inputs, tensors, strict=True):
                    t.requires_grad_(str(n.attrs[0]) in segment.wrt)
                torch.library.opcheck(ops.segment.default, (tensors, *args[1:]))
