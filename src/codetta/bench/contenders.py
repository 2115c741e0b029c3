"""The segment between two attentions as each contender runs it: ours, eager, Inductor's, Liger's, and its bare GEMMs.

All have the same weights and inputs, in bfloat16. Ours and Liger's are the module as a model has it, with q, k, v, gate
and up apart; eager and Inductor get fused weights, which is the better for them. RMSNorm and RoPE are spelled for eager
as models spell them, and for Inductor in float32, which it fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from codetta.bench.baselines import inductor
from codetta.bench.shapes import EPS, Segment, Shape, rotated
from codetta.bench.shared import copies
from codetta.bench.steps import Module, compile_module
from codetta.capture.backend import backend
from codetta.errors import UnsupportedError

Outputs = dict[str, Tensor]
BARE = "cuBLAS GEMMs"
OURS = "codetta"
WEIGHTS = {"o": ("o",), "gate_up": ("gate", "up"), "down": ("down",), "qkv": ("q", "k", "v")}
GAINS = ("norm1", "norm2")


@dataclass(frozen=True)
class Contender:
    """``forward`` gives x2, q, k and v; ``wrt`` are the tensors whose gradients are asked for, in groups: the weights
    that one contender has apart and another as one are one group. One that ``writes`` may write over the incoming
    gradients, and gets its own; its inputs and weights are its own already."""

    name: str
    forward: Callable[[], Outputs]
    wrt: Mapping[str, Sequence[Tensor]]
    writes: bool = False

    def step(self, given: Mapping[str, Tensor]) -> tuple[Outputs, list[Tensor]]:
        """Forward, then the gradients of everything in ``wrt``."""
        outputs = self.forward()
        leaves = [t for group in self.wrt.values() for t in group]
        return outputs, list(torch.autograd.grad(list(outputs.values()), leaves, [given[n] for n in outputs]))

    def named(self, gradients: Sequence[Tensor]) -> Outputs:
        """Gradients by group."""
        found = iter(gradients)
        return {f"d {n}": torch.cat([next(found) for _ in group]) for n, group in self.wrt.items()}


@dataclass(frozen=True)
class Setting:
    """A shape, the module with the weights, and the inputs of all contenders."""

    shape: Shape
    module: Segment
    batch: Mapping[str, Tensor]

    @property
    def on_gpu(self) -> bool:
        """Whether this is to be measured in earnest."""
        return self.batch["x"].is_cuda

    def wrt(self) -> dict[str, list[Tensor]]:
        """The inputs and parameters of the module, by group."""
        weights = {n: [getattr(self.module, w).weight for w in names] for n, names in WEIGHTS.items()}
        gains = {n: [getattr(self.module, n).weight] for n in GAINS}
        return {"x": [self.batch["x"]], "y": [self.batch["y"]], **weights, **gains}

    def apart(self) -> Setting:
        """The same numbers in memory of its own."""
        return Setting(self.shape, deepcopy(self.module), copies(self.batch))


# --- ours -------------------------------------------------------------------------------------------------------------


def direct(s: Setting, memory: str, name: str) -> Contender:
    """The segment's op called by itself, with autograd: no Dynamo and no Inductor around it."""
    module = compile_module(s.module, s.batch, memory)
    return Contender(name, partial(_call, module), s.wrt())


def _call(module: Module) -> Outputs:
    found = torch.ops.codetta.segment(list(module.feed.values()), module.key, 0)
    names = [name for name, _ in module.compiled.graph.outputs]
    return {n if n in ("q", "k", "v") else "x2": t for n, t in zip(names, found, strict=False)}


def through_dynamo(s: Setting, memory: str, name: str) -> Contender:
    """As a user runs it: ``torch.compile(module, backend="codetta")``."""
    compiled = torch.compile(s.module, backend=partial(backend, options={"memory": memory}))
    return Contender(name, lambda: compiled(**s.batch), s.wrt())


# --- eager and Inductor -----------------------------------------------------------------------------------------------


class Fused(nn.Module):
    """The segment with one weight for q, k and v and one for gate and up."""

    o: Tensor
    gate_up: Tensor
    down: Tensor
    qkv: Tensor
    norm1: Tensor
    norm2: Tensor

    def __init__(self, module: Segment, shape: Shape, wide: bool) -> None:
        super().__init__()
        self.widths, self.head, self.wide = list(shape.qkv), shape.head, wide
        for name, parts in WEIGHTS.items():
            weight = torch.cat([getattr(module, p).weight.detach() for p in parts])
            setattr(self, name, nn.Parameter(weight))
        for name in GAINS:
            setattr(self, name, nn.Parameter(getattr(module, name).weight.detach().clone()))

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """One operator for eager, float32 arithmetic for Inductor."""
        if not self.wide:
            return functional.rms_norm(x, (x.shape[-1],), gain, EPS)
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * gain).to(x.dtype)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE, in float32 for Inductor."""
        return rotated(x.float() if self.wide else x, cos, sin, self.head).to(x.dtype)

    def forward(self, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
        """The four results by name."""
        x1 = x + functional.linear(y, self.o)
        gate, up = functional.linear(self.norm(x1, self.norm1), self.gate_up).chunk(2, -1)
        x2 = x1 + functional.linear(functional.silu(gate) * up, self.down)
        q, k, v = functional.linear(self.norm(x2, self.norm2), self.qkv).split(self.widths, -1)
        return {"x2": x2, "q": self.turned(q, cos, sin), "k": self.turned(k, cos, sin), "v": v}

    def wrt(self, batch: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """The groups of ``Contender``."""
        inputs = {n: [batch[n]] for n in ("x", "y")}
        return {**inputs, **{n: [getattr(self, n)] for n in (*WEIGHTS, *GAINS)}}


def eager(s: Setting) -> Contender:
    """PyTorch's operators one by one."""
    module = Fused(s.module, s.shape, wide=False)
    return Contender("eager", lambda: module(**s.batch), module.wrt(s.batch))


def compiled(s: Setting) -> Contender:
    """torch.compile for these shapes."""
    module = Fused(s.module, s.shape, wide=True)
    call: Any = inductor(module, s.on_gpu)
    return Contender("torch.compile", lambda: call(**s.batch), module.wrt(s.batch))


# --- Liger ------------------------------------------------------------------------------------------------------------


def liger(s: Setting, *, compile_it: bool) -> Contender:
    """Liger's kernels between the module's own linears. Its RoPE works in place, backward on the incoming gradients: it
    has everything to itself."""
    try:
        kernels = import_module("liger_kernel.transformers.functional")
    except ImportError as error:
        raise UnsupportedError(f"no liger-kernel here: {error}", hint="pip install liger-kernel") from None
    own = s.apart()
    forward = partial(_liger_forward, own.module, kernels, s.shape.head)
    call: Any = inductor(forward, s.on_gpu) if compile_it else forward
    name = "Liger, compiled" if compile_it else "Liger"
    return Contender(name, lambda: call(**own.batch), own.wrt(), writes=True)


def _liger_forward(m: Segment, kernels: Any, head: int, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    def norm(t: Tensor, residual: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        h, stream = kernels.liger_fused_add_rms_norm(t, residual, gain, EPS, 0.0, "llama", False)
        return h, stream

    h, x1 = norm(m.o(y), x, m.norm1.weight)
    h, x2 = norm(m.down(kernels.liger_swiglu(m.gate(h), m.up(h))), x1, m.norm2.weight)
    heads = (t.view(1, t.shape[0], -1, head).transpose(1, 2) for t in (m.q(h), m.k(h)))
    q, k = (t.transpose(1, 2).flatten(2).squeeze(0) for t in kernels.liger_rope(*heads, cos[None], sin[None]))
    return {"x2": x2, "q": q, "k": k, "v": m.v(h)}


# --- the bare GEMMs ---------------------------------------------------------------------------------------------------


def bare(s: Setting, *, backward: bool) -> Callable[[], object]:
    """The 4 GEMMs of forward, or all 12, one after the other into buffers that exist; nothing else."""
    calls = _bare_calls(s, backward)

    def run() -> None:
        for a, b, out in calls:
            torch.mm(a, b, out=out)

    return run


def _bare_calls(s: Setting, backward: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    tokens = s.shape.tokens

    def random(columns: int) -> Tensor:
        return torch.randn(tokens, columns, device=s.batch["x"].device, dtype=torch.bfloat16)

    fused = [torch.cat([getattr(s.module, p).weight.detach() for p in parts]) for parts in WEIGHTS.values()]
    inputs = {w.shape[1]: random(w.shape[1]) for w in fused}
    outputs = {w.shape[0]: random(w.shape[0]) for w in fused}
    calls = [(inputs[w.shape[1]], w.t(), torch.empty_like(outputs[w.shape[0]])) for w in fused]
    if backward:
        for w in reversed(fused):
            dout, x = outputs[w.shape[0]], inputs[w.shape[1]]
            calls.append((dout, w, torch.empty_like(x)))
            calls.append((dout.t(), x, torch.empty_like(w)))
    return calls
