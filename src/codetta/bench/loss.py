"""The loss level: the LM head and its cross-entropy, forward with backward, each contender side by side.

Timed is the whole Python call: the mean loss of random targets and ``torch.autograd.grad`` of x and the weight. The
base is the time of the three bare cuBLAS GEMMs of the same shapes, into buffers that exist. Loss and gradients of
every contender are first held against float32 with statistics in float64, the weight's gradient on target rows and on
the rest apart; who adds up chunks in bfloat16 may be further off than we, which is told, but not wrong. Peak memory is
that of one step, above x and the weight, both gradients included.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from codetta.bench.baselines import inductor
from codetta.bench.check import compared
from codetta.bench.contenders import BARE, OURS
from codetta.bench.environment import watching
from codetta.bench.kernels import Settings, told
from codetta.bench.report import Report, Row, timed
from codetta.bench.shapes import BF16, HEAD_TOKENS, Shape
from codetta.errors import UnsupportedError
from codetta.nn.linear_cross_entropy import Memory, linear_cross_entropy
from codetta.timing import Variant, measure

CASE = "head, loss, forward + backward"
CASE_SECONDS = 15.0
# Logits rounded to bfloat16 put errors of 1.1e-2 into the gradients of rare rows at d = 8192; eager has the same.
OUR_LIMIT = 2e-2
OTHERS_LIMIT = 5e-2  # sums over chunks rounded to bfloat16 are 1e-2 off; a missing term is off by half
PART = 1024  # tokens of the reference at once
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """The inputs of all contenders, in bfloat16."""

    x: Tensor
    weight: Tensor
    targets: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """What gradients are asked of."""
        return [self.x, self.weight]


def loss(shapes: Iterable[Shape], settings: Settings, report: Report) -> None:
    """Measure the head at each shape."""
    for given in shapes:
        shape = replace(given, tokens=min(given.tokens, HEAD_TOKENS))
        if report.has_time(shape.name):
            try:
                report.add(*_at(shape, settings))
            except Exception as error:  # told, and the next shape is measured
                report.add(Row("loss", shape.name, shape.tokens, CASE, OURS, note=told(error)))
        torch._dynamo.reset()
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.empty_cache()


def contenders(shape: Shape, on_gpu: bool) -> Iterator[tuple[str, Callable[[], Loss]]]:
    """Everybody's loss, made when it is asked for."""
    yield f"{OURS}, fast", lambda: _ours("fast")
    yield f"{OURS}, lean", lambda: _ours("lean")
    yield "torch.compile", lambda: _compiled(on_gpu)
    yield "Liger", _liger
    yield "QuACK", lambda: _quack("scaled_exp_linear_cross_entropy", shape)
    yield "QuACK, chunked", lambda: _quack("chunked_linear_cross_entropy", shape)
    yield "F.linear_cross_entropy", _torch
    yield "eager", lambda: plain


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As models write it."""
    return functional.cross_entropy(functional.linear(x, weight).float(), targets)


def _ours(memory: Memory) -> Loss:
    return lambda x, weight, targets: linear_cross_entropy(x, weight, targets, memory=memory)


def _compiled(on_gpu: bool) -> Loss:
    found: Any = inductor(plain, on_gpu)
    made: Loss = found
    return made


def _liger() -> Loss:
    try:
        kernels: Any = import_module("liger_kernel.transformers.functional")
    except ImportError as error:
        raise UnsupportedError(f"no liger-kernel here: {error}", hint="pip install liger-kernel") from None
    found: Loss = kernels.liger_fused_linear_cross_entropy
    return found


def _quack(name: str, shape: Shape) -> Loss:
    """Its chunk may not be as long as a row: it then takes one for the other."""
    try:
        import_module("codetta.backends.hopper.toolchain")  # prepares what QuACK reads
        module: Any = import_module("quack.linear_cross_entropy")
    except ImportError as error:
        raise UnsupportedError(f"no QuACK here: {error}") from None
    chunk = 8192 if shape.d == 4096 else 4096
    more = {} if name.startswith("scaled") else {"tuned": False, "use_scaled_exp": False}
    return partial(getattr(module, name), chunk_size=chunk, **more)


def _torch() -> Loss:
    found: Loss | None = getattr(functional, "linear_cross_entropy", None)
    if found is None:
        raise UnsupportedError(f"PyTorch {torch.__version__} has no linear_cross_entropy")
    return found


def batch_of(shape: Shape, device: str) -> Batch:
    """Random normal activations, weights of standard deviation 0.02, random targets."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape.tokens, shape.d, generator=generator, device=device).to(BF16)
    weight = torch.randn(shape.vocabulary, shape.d, generator=generator, device=device).mul_(0.02).to(BF16)
    targets = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator, device=device)
    return Batch(x.requires_grad_(), weight.requires_grad_(), targets)


def reference(b: Batch) -> dict[str, Tensor]:
    """Loss and gradients from the same numbers: GEMMs in float32, softmax in float64, some tokens at a time."""
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    tokens, wide = b.targets.numel(), b.weight.detach().float()
    total, dx, dw = torch.zeros((), dtype=torch.float64, device=wide.device), [], torch.zeros_like(wide)
    for x, targets in zip(b.x.detach().float().split(PART), b.targets.split(PART), strict=True):
        log_p = (x @ wide.t()).double().log_softmax(1)
        total -= log_p.gather(1, targets[:, None]).sum()
        g = log_p.exp_()
        g[torch.arange(len(targets), device=g.device), targets] -= 1
        narrow = (g / tokens).float()
        dx.append(narrow @ wide)
        dw += narrow.t() @ x
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return named(b, total / tokens, torch.cat(dx), dw)


def named(b: Batch, value: Tensor, dx: Tensor, dw: Tensor) -> dict[str, Tensor]:
    """Results by name, the weight's gradient in two parts."""
    hit = torch.zeros(dw.shape[0], dtype=torch.bool, device=dw.device)
    hit[b.targets] = True
    return {"loss": value.detach(), "d x": dx, "d weight, targets": dw[hit], "d weight, others": dw[~hit]}


def step(f: Loss, b: Batch) -> tuple[Tensor, ...]:
    """The loss and the gradients of x and the weight."""
    value = f(b.x, b.weight, b.targets)
    return value.detach(), *torch.autograd.grad(value, b.leaves)


def peak(f: Loss, b: Batch) -> int | None:
    """The most memory of one step in bytes above what there was; None on a CPU."""
    if not b.x.is_cuda:
        return None
    gc.collect()  # what a failed contender left in a cycle would be freed in between
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = step(f, b)
    torch.cuda.synchronize()
    del held
    return torch.cuda.max_memory_allocated() - before


def _bare(b: Batch) -> Variant:
    """The three GEMMs."""
    x, weight = b.x.detach(), b.weight.detach()
    logits, dx, dw = x.new_empty(x.shape[0], weight.shape[0]), torch.empty_like(x), torch.empty_like(weight)

    def run() -> None:
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits.t(), x, out=dw)
        torch.mm(logits, weight, out=dx)

    return run


def _at(shape: Shape, settings: Settings) -> list[Row]:
    b = batch_of(shape, settings.device)
    expected = reference(b)
    blank = Row("loss", shape.name, shape.tokens, CASE, BARE)
    ready: dict[str, Variant] = {BARE: _bare(b)}
    rows = [blank]
    for name, make in contenders(shape, settings.device == "cuda"):
        if not (name.startswith(OURS) or settings.wants_variant(name)):
            continue
        settings.tell(f"{shape.name}: {name}")
        row = replace(blank, variant=name)
        try:
            f, limit = make(), OUR_LIMIT if name.startswith(OURS) else OTHERS_LIMIT
            row = replace(row, error=compared(name, named(b, *step(f, b)), expected, limit))
            rows.append(replace(row, peak=peak(f, b)))
            ready[name] = partial(step, f, b)
        except Exception as error:  # somebody else's kernels may fail in any way; that is a result, too
            rows.append(replace(row, note=told(error)))
    del expected
    with watching() as watched:
        timings = measure(ready, rounds=settings.rounds, filler=settings.filler, budget=CASE_SECONDS)
    return [timed(r, timings, BARE, watched.values) if r.variant in timings else r for r in rows]
