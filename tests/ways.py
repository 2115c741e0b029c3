"""A module run three ways, eager, through codetta and in float64, its outputs and gradients held against the bar."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from codetta.audit.models import Subject
from codetta.audit.verify import SEEDS, check
from codetta.capture.backend import CapturedGraph, recording
from codetta.core.types import Type
from codetta.partition.plan import Plan, Step
from codetta.testing import Bar, Errors, pooled, relative_error

Draw = Callable[[torch.Generator], Sequence[Tensor]]
DEVICE = "cpu"  # the tests of kernels set it: modules and what is drawn for them are then moved there

# In float32 what differs is the order in which a GEMM sums, which changes with the number of threads and the shapes of
# its operands: of equally good orders, one had 1.9 times another's error. A term left out is off by 1e-3 at the least.
# In float64, which the reference is too, only such orders differ.
BARS = {torch.float32: Bar(units=8, mean=1.1), torch.float64: Bar(units=4096, mean=math.inf)}


@dataclass(frozen=True)
class Run:
    """What one call gave: outputs in order, and the gradient of each parameter and input that asked for one; which of
    the outputs can be differentiated."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    differentiable: list[bool]


def fresh(module: nn.Module, seed: int) -> None:
    """Give a module other weights: matrices of about unit gain, vectors never all ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            drawn = torch.randn(p.shape, generator=generator)
            if p.dim() > 1:
                p.copy_(drawn * p.shape[-1] ** -0.5)
            elif "bias" in name:
                p.copy_(drawn)
            else:
                p.copy_(0.5 + torch.rand(p.shape, generator=generator))


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Draw:
    """One input drawn from the normal distribution, which wants a gradient."""
    return lambda generator: [torch.randn(shape, generator=generator).to(dtype).requires_grad_()]


def compiled(f: Callable[..., object], **options: object) -> Callable[..., object]:
    """``f`` through codetta, in one graph, with nothing left over from an earlier compilation. What is no segment runs
    in eager PyTorch on every device, unless ``inner`` says otherwise: Inductor takes seconds a graph."""
    torch._dynamo.reset()
    if DEVICE != "cpu":
        options = {"inner": "eager", "kernels": kernels(), **options}
    return torch.compile(f, backend="codetta", fullgraph=True, options=options or None)


def kernels() -> str:
    """Where segments run: on a GPU on kernels, or it is an error; on a CPU as usual."""
    return "auto" if DEVICE == "cpu" else "hopper"


def agree(
    module: nn.Module,
    draw: Draw,
    *,
    wide: nn.Module | None = None,
    prepare: Callable[[nn.Module, int], None] = fresh,
    seeds: int = SEEDS,
    gemms: int | None = None,
    upstream: Sequence[Tensor] = (),
    **options: object,
) -> list[CapturedGraph]:
    """Compare all outputs and gradients with float64 and eager, and return what was captured.

    ``wide`` is the module for float64, by default a copy; ``prepare`` gives the module the weights of a seed;
    ``upstream`` are the incoming gradients, by default random. The forward plans and loss heads must have ``gemms``
    GEMMs, by default any: an empty capture would agree with everything."""
    ours = compiled(module.to(DEVICE), **options)
    errors: dict[str, list[Errors]] = {}
    with recording() as found, unwritten_memory_is_nan():
        for seed in range(seeds):
            prepare(module, seed)
            inputs = [placed(x) for x in draw(torch.Generator().manual_seed(seed))]
            oracle = copy.deepcopy(module).double() if wide is None else _as_wide(wide, module)
            reference = run(oracle, [_double(x) for x in inputs], oracle, seed, upstream)
            mine, eager = (run(f, inputs, module, seed, upstream) for f in (ours, module))
            for name, e in compare(mine, eager, reference).items():
                errors.setdefault(name, []).append(e)
    pools = {name: pooled(es) for name, es in errors.items()}
    misses = [f"{name}: {why}" for name, e in pools.items() if (why := BARS.get(e.dtype, Bar()).why_not(e)) is not None]
    assert not misses, "\n".join(misses)
    count = sum(plan.count("gemm") for plan in forward_plans(found)) + sum(len(g.heads) for g in found)
    assert count > 0 if gemms is None else count == gemms, f"{count} GEMMs captured"
    return found


def llama(layers: int = 2, dtype: torch.dtype = torch.float32, **changes: object) -> LlamaForCausalLM:
    """An unmodified Llama of transformers in training mode, tiny, its gains and biases random."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"vocab_size": 128, "use_cache": False, "bos_token_id": None, "eos_token_id": None, **sizes, **changes}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **config)).train()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.uniform_(0.5, 1.5)
    return model.to(dtype)


def whole_model_agrees(model: nn.Module, batch: Mapping[str, object], seeds: int = SEEDS, **options: object) -> None:
    """Compare a model of somebody else's with its captured graph in float64 and with eager.

    A loss is one number a seed, and the bar for it is made for as many seeds as are taken by default."""
    torch._dynamo.reset()
    bar = BARS.get(next(model.parameters()).dtype, Bar())
    there = {name: placed(x) if isinstance(x, Tensor) else x for name, x in batch.items()}
    subject = Subject(type(model).__name__, model.to(DEVICE), there)
    found = check(subject, seeds=seeds, options={"kernels": kernels(), **options}, bar=bar)
    assert found.tensors
    assert not found.problems, "\n".join(found.problems)


def run(
    f: Callable[..., object], inputs: Sequence[Tensor], owner: nn.Module, seed: int, upstream: Sequence[Tensor] = ()
) -> Run:
    """Call, then differentiate all outputs against ``upstream`` or random gradients, the same for every dtype."""
    found = f(*inputs)
    outputs = [x for x in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(x, Tensor)]
    wanted = {name: p for name, p in owner.named_parameters() if p.requires_grad}
    wanted |= {f"input {i}": x for i, x in enumerate(inputs) if x.requires_grad}
    ends = [x for x in outputs if x.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    given = upstream or [torch.randn(x.shape, generator=generator).bfloat16() for x in ends]
    cotangents = [g.to(x.device, x.dtype) for g, x in zip(given, ends, strict=True)]
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if ends and wanted:
        gradients = torch.autograd.grad(ends, list(wanted.values()), cotangents, allow_unused=True)
    live = [x.requires_grad for x in outputs]
    return Run([x.detach() for x in outputs], dict(zip(wanted, gradients, strict=True)), live)


def compare(ours: Run, eager: Run, reference: Run) -> dict[str, Errors]:
    """The errors of every output and gradient; shapes, dtypes and what has no gradient must be eager's."""
    assert [(x.shape, x.dtype) for x in ours.outputs] == [(x.shape, x.dtype) for x in eager.outputs]
    assert ours.differentiable == eager.differentiable
    outputs = zip(ours.outputs, eager.outputs, reference.outputs, strict=True)
    found = {f"output {i}": errors(*xs) for i, xs in enumerate(outputs)}
    for name, e in eager.gradients.items():
        mine, exact = ours.gradients[name], reference.gradients[name]
        if e is None or mine is None or exact is None:
            assert mine is e, f"{name}: ours has {'no' if mine is None else 'a'} gradient, eager's not so"
            continue
        assert (mine.shape, mine.dtype) == (e.shape, e.dtype), name
        found[name] = errors(mine, e, exact)
    return found


def errors(ours: Tensor, eager: Tensor, reference: Tensor) -> Errors:
    """Ours and eager's error against float64; a handful of numbers is judged as a scalar is, being as few draws."""
    scalar = eager.numel() <= 5
    return Errors(relative_error(ours, reference), relative_error(eager, reference), eager.dtype, is_scalar=scalar)


def wide(x: Tensor) -> Tensor:
    """``x.float()``, as norms and losses compute; in the float64 oracle ``x`` itself."""
    return x if x.dtype is torch.float64 else x.float()


def _double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def _as_wide(wide: nn.Module, module: nn.Module) -> nn.Module:
    wide.load_state_dict(module.state_dict())
    return wide.to(DEVICE).double()


def placed(x: Tensor) -> Tensor:
    """A tensor on the device under test: its strides and its place in a larger memory are kept."""
    if x.device.type == torch.device(DEVICE).type:
        return x
    memory = x.detach().untyped_storage().to(device=torch.device(DEVICE))
    there = torch.empty(0, dtype=x.dtype, device=DEVICE)
    return there.set_(memory, x.storage_offset(), x.shape, x.stride()).requires_grad_(x.requires_grad)


def settled(module: nn.Module) -> nn.Module:
    """A module on the device under test."""
    return module.to(DEVICE)


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fresh memory holds NaN, so that a value which is never written shows. On a GPU the kernels' own memory is filled
    by tests/gpu; PyTorch's switch would refuse operators there that are none of ours."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(DEVICE == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# --- plans ------------------------------------------------------------------------------------------------------------


def forward_plans(found: Sequence[CapturedGraph]) -> list[Plan]:
    """The forward plan of each captured segment."""
    return [segment.forward for graph in found for _, segment in graph.compiled()]


def backward_plans(found: Sequence[CapturedGraph]) -> list[Plan]:
    """The backward plan of each captured segment, for the gradients that a usual step gives."""
    return [s.backward(s.usable(g.given(i)))[0] for g in found for i, (_, s) in enumerate(g.compiled()) if s.wrt]


def saved_types(found: Sequence[CapturedGraph]) -> list[Type]:
    """What backward is given of forward's results."""
    compiled = [s for graph in found for _, s in graph.compiled()]
    return [s.training.backward.buffers[name] for s in compiled for name, _ in s.training.saved]


def counts(plans: Sequence[Plan]) -> dict[str, int]:
    """GEMMs, those with an epilogue, and among them data gradients; finalizes; leftovers."""
    steps = [s for plan in plans for s in plan.steps]
    return {
        "gemms": sum(s.kind == "gemm" for s in steps),
        "epilogues": sum(s.has_epilogue for s in steps),
        "finalizes": sum(s.kind == "finalize" for s in steps),
        "leftovers": sum(s.kind == "leftover" for s in steps),
    }


def data_gradients_with_epilogue(plans: Sequence[Plan]) -> list[Step]:
    """The GEMMs of backward plans that do more than write a gradient down, weight gradients left out."""
    return [s for plan in plans for s in plan.steps if s.has_epilogue and not s.is_weight_gradient]
