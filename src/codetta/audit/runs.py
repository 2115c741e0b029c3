"""One training step of a model, three ways: eager, compiled, and the captured graph in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from codetta.audit.blocks import compiled_alone
from codetta.backends.hopper.support import why_not
from codetta.capture.backend import backend
from codetta.capture.normalise import normalise
from codetta.capture.oracle import widen
from codetta.capture.wide import double_precision
from codetta.errors import UnsupportedError

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What one call gave: the float outputs, and the gradients asked for (None where nothing flows), by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def eager_step(model: nn.Module, batch: Mapping[str, Any], seed: int) -> Step:
    """PyTorch's own. UnsupportedError where it draws random numbers: the other ways would draw others."""
    before = _random_states()
    found = _step(model, model, batch, seed, lambda x: x)
    if any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True)):
        hint = "set dropout to 0, or call model.eval()"
        raise UnsupportedError("the model draws random numbers, which no two runs share", hint=hint)
    return found


def compiled_step(
    model: nn.Module, options: Mapping[str, Any] | None = None, *, per_block: bool = False
) -> Callable[[Mapping[str, Any], int], Step]:
    """A step through codetta, fresh memory filled with NaN; call it with a batch and a seed."""
    # on a GPU without kernels too, it is the programs that are to be verified, not Inductor
    on_gpu = any(p.is_cuda for p in model.parameters()) and why_not() is None
    chosen = {"kernels": "hopper" if on_gpu else "reference", **(options or {})}
    ours = partial(backend, options=chosen)
    compiled = compiled_alone(model, ours) if per_block else torch.compile(model, backend=ours)

    def run(batch: Mapping[str, Any], seed: int) -> Step:
        with poisoned_memory():
            return _step(compiled, model, batch, seed, lambda x: x)

    return run


def float64_step(model: nn.Module) -> Callable[[Mapping[str, Any], int], Step]:
    """A step of the captured ATen graph in float64, which shares nothing with rules, plans or backends."""
    oracle = _Oracle()
    compiled = torch.compile(model, backend=oracle.backend)

    def run(batch: Mapping[str, Any], seed: int) -> Step:
        oracle.wide.clear()
        return _step(compiled, model, batch, seed, oracle.leaf)

    return run


@contextmanager
def many_compilations() -> Iterator[None]:
    """Lets Dynamo compile the same code as often as it is asked to."""
    with torch._dynamo.config.patch(recompile_limit=1_000_000, accumulated_recompile_limit=1_000_000):
        yield


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN, so that a value which is never written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@dataclass(slots=True)
class _Oracle:
    """Runs captured graphs in float64. ``wide`` holds the float64 leaf of each tensor that wants a gradient."""

    wide: dict[int, Tensor] = field(default_factory=dict)

    def backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Call:
        wide = widen(normalise(gm, example_inputs))

        def run(*inputs: Any) -> Any:
            with ExitStack() as modes:
                modes.enter_context(double_precision())
                for kind in ("cpu", "cuda"):
                    if torch.is_autocast_enabled(kind):
                        modes.enter_context(torch.autocast(kind, enabled=False))
                return wide(*(self.leaf(x) if isinstance(x, Tensor) else x for x in inputs))

        return run

    def leaf(self, x: Tensor) -> Tensor:
        """The float64 twin of a tensor: one leaf for each that wants a gradient."""
        if not (x.is_floating_point() or x.is_complex()):
            return x
        dtype = torch.complex128 if x.is_complex() else torch.float64
        if not (x.is_leaf and x.requires_grad):
            return x.to(dtype)
        if id(x) not in self.wide:
            self.wide[id(x)] = x.detach().to(dtype, copy=True).requires_grad_()
        return self.wide[id(x)]


def _step(call: Call, model: nn.Module, batch: Mapping[str, Any], seed: int, leaf: Callable[[Tensor], Tensor]) -> Step:
    """Call, then differentiate the loss; where there is none, all outputs against random cotangents."""
    found, _ = pytree.tree_flatten_with_path(call(**batch))
    outputs = {_name(path): x for path, x in found if isinstance(x, Tensor) and x.is_floating_point()}
    named = {**dict(model.named_parameters()), **{k: v for k, v in batch.items() if isinstance(v, Tensor)}}
    wanted = {name: leaf(x) for name, x in named.items() if x.requires_grad}
    seeds = _cotangents(outputs, seed)
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if seeds and wanted:
        ends, cotangents = zip(*seeds, strict=True)
        gradients = torch.autograd.grad(ends, list(wanted.values()), cotangents, allow_unused=True)
    return Step({name: x.detach() for name, x in outputs.items()}, dict(zip(wanted, gradients, strict=True)))


def _random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _cotangents(outputs: Mapping[str, Tensor], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Where gradients start: at the loss, or at every output with random numbers that all dtypes can hold."""
    generator = torch.Generator().manual_seed(seed)
    live = [x for x in outputs.values() if x.requires_grad]
    losses = [x for x in live if x.dim() == 0]
    if losses:
        return [(losses[0], torch.ones_like(losses[0]))]
    noise = [torch.randn(x.shape, generator=generator).bfloat16() for x in live]
    return [(x, n.to(x.device, x.dtype)) for x, n in zip(live, noise, strict=True)]


def _name(path: tuple[Any, ...]) -> str:
    return pytree.keystr(path).strip("[].'\"").replace("']['", ".") or "output"
