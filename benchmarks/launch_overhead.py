"""What a segment costs the CPU: microseconds of a forward, of a backward, and of each step.

On a GPU everything is launched, and the segment is held against torch.compile: CPU time of a forward with an empty
queue, median of ``--calls``. Without one (or with ``--stub``) kernels are replaced by nothing and tensors lie on the
CPU: what remains is our Python, PyTorch's dispatcher and its allocator. A launch itself, some microseconds a kernel, is
then not in the numbers.

    python benchmarks/launch_overhead.py [--stub] [--tokens 256] [--calls 1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from codetta.backends.hopper import memory, steps
from codetta.backends.hopper.rows import bind as rows_bind
from codetta.backends.hopper.stream import stream_of
from codetta.backends.reference.evaluate import TORCH
from codetta.core.types import bf16
from codetta.ir.graph import Graph
from codetta.partition.size import dim
from codetta.runtime import library, registry
from codetta.runtime.compile import Options, Segment
from graphs import Sizes, llama_segment, trained

OPS = library.LIBRARY
SIZES = {
    "1B": Sizes(d=2048, ffn=8192, heads=32, kv_heads=8, inside=64),
    "8B": Sizes(d=4096, ffn=14_336, heads=32, kv_heads=8, inside=128),
    "small": Sizes(d=256, ffn=512, heads=4, kv_heads=2, inside=64),
}
WARM_UP = 20


class Layer(nn.Module):
    """The same segment as a user writes it, weights fused: what torch.compile gets."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        width = (s.heads + 2 * s.kv_heads) * s.inside
        for name, (out, inner) in {
            "wo": (s.d, s.heads * s.inside),
            "wgu": (2 * s.ffn, s.d),
            "wd": (s.d, s.ffn),
            "wqkv": (width, s.d),
        }.items():
            setattr(self, name, nn.Parameter(torch.randn(out, inner) * inner**-0.5))
        self.g1, self.g2 = (nn.Parameter(torch.rand(s.d) + 0.5) for _ in range(2))

    def forward(self, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        s = self.s
        x = x + y @ self.wo.t()
        gate, up = (F.rms_norm(x, (s.d,), self.g1, 1e-5) @ self.wgu.t()).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ self.wd.t()
        qkv = F.rms_norm(x, (s.d,), self.g2, 1e-5) @ self.wqkv.t()
        q, k, v = qkv.split([s.heads * s.inside, s.kv_heads * s.inside, s.kv_heads * s.inside], -1)
        return x, *(_rotated(t.unflatten(-1, (-1, s.inside)), cos, sin) for t in (q, k)), v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return (x * cos.unsqueeze(1) + torch.cat([-b, a], -1) * sin.unsqueeze(1)).to(x.dtype).flatten(1)


def stub() -> None:
    """Kernels that do nothing: GEMMs of ours and of the library, Triton's."""

    def nothing(*_: object) -> None:
        return None

    def launched(self: rows_bind.Bound, tensors: list[Any], stream: int) -> bool:
        self.quick = nothing
        return quick(self, tensors, stream)

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch._C._dynamo.guards._empty_strided_cpu(shape, memory.strides_of(shape), dtype)  # as on a GPU

    memory.empty = empty
    quick = rows_bind.Bound._launch
    plan = type("Plan", (), {"scheduler_uses_semaphore": False})()
    steps.compiled = lambda job: plan
    steps.launch = nothing
    steps.matmul = lambda form, a, b, dtype: torch.empty(
        (a.shape[1] if form == "tn" else a.shape[0], b.shape[0] if form == "nt" else b.shape[1]), dtype=dtype
    )
    rows_bind.Bound._launch = launched
    rows_bind.Bound._launch_by_triton = lambda self, tensors: launched(self, tensors, 0)
    rows_bind.counter = lambda device: torch.empty(1)


def inputs_of(graph: Graph, tokens: int, device: str) -> list[Tensor]:
    """Random inputs; the weights that are read as one tensor lie side by side."""
    found: dict[str, Tensor] = {}
    shapes = {str(n.attrs[0]): n.type for n in graph.inputs}
    for group in (("wq", "wk", "wv"), ("wg", "wu")):
        rows = [dim(shapes[n].rows, tokens) for n in group]
        whole = torch.randn(sum(rows), dim(shapes[group[0]].cols, tokens), dtype=torch.bfloat16, device=device)
        found.update(zip(group, whole.split(rows), strict=True))
    for name, t in shapes.items():
        size = [dim(d, tokens) for d in (t.rows, t.cols) if d is not None]
        found.setdefault(name, torch.randn(size, device=device).to(TORCH[t.dtype]))
    return [found[name] for name in shapes]


def timed(call: Callable[[], object], calls: int, on_gpu: bool) -> float:
    """Microseconds of CPU time, the queue empty before each call: the median."""
    found = []
    for i in range(WARM_UP + calls):
        if on_gpu:
            torch.cuda.synchronize()
        begin = perf_counter()
        call()
        if i >= WARM_UP:
            found.append(perf_counter() - begin)
    return median(found) * 1e6


def segment_of(size: Sizes, training: bool) -> tuple[Graph, Segment, str]:
    """The segment of a Llama layer, registered."""
    graph = llama_segment(bf16, size)
    wanted = trained(graph) if training else []
    key = registry.register(graph, tuple(str(n.attrs[0]) in wanted for n in graph.inputs), Options("hopper"))
    return graph, registry.segment_of(key), key


def by_step(segment: Segment, inputs: dict[str, Tensor], tokens: int, calls: int) -> dict[str, float]:
    """Microseconds of each step of the forward plan, run one by one on what the steps before it left."""
    executable: Any = segment.run_forward
    executable.run(inputs, tokens)
    (schedule,) = executable._schedules.values()
    tensors = [inputs[name] for name in segment.forward.inputs]
    tensors += [None] * (schedule.size - len(tensors))
    stream = stream_of(tensors[0].device)
    found = {}
    for step, (run, _) in zip(segment.forward.steps, schedule.steps, strict=True):
        stores = [executable.places[name] for name in step.stores]

        def once(run: Any = run, stores: list[int] = stores) -> None:
            for place in stores:  # an output that is there would not be allocated
                tensors[place] = None
            run(tensors, stream)

        found[step.program.name] = timed(once, calls, tensors[0].is_cuda)
    return found


def measure(name: str, tokens: int, calls: int, on_gpu: bool) -> dict[str, Any]:
    """All numbers for one size."""
    device = "cuda" if on_gpu else "cpu"
    found: dict[str, Any] = {"size": name, "tokens": tokens, "device": device}
    for training in (False, True):
        mode = "training" if training else "inference"
        found[mode] = _mode(SIZES[name], tokens, calls, device, training)
    return found


def _mode(size: Sizes, tokens: int, calls: int, device: str, training: bool) -> dict[str, Any]:
    """A forward as a plan, as the op that compiled graphs call, as autograd records it, and step by step."""
    graph, segment, key = segment_of(size, training)
    xs = inputs_of(graph, tokens, device)
    named = dict(zip(segment.names, xs, strict=True))
    on_gpu = device == "cuda"
    with torch.no_grad():
        found = {
            "plan": timed(lambda: segment.run_forward.run(named, tokens), calls, on_gpu),
            "op without autograd": timed(lambda: torch.ops.codetta.segment_forward(xs, key, 0), calls, on_gpu),
            "steps": by_step(segment, named, tokens, calls),
        }
    return {**found, **(_training(segment, xs, key, calls, on_gpu) if training else {})}


def _training(segment: Segment, xs: list[Tensor], key: str, calls: int, on_gpu: bool) -> dict[str, float]:
    leaves = [x.detach().requires_grad_(n in segment.wrt) for n, x in zip(segment.names, xs, strict=True)]
    wanted = [x for x in leaves if x.requires_grad]
    forward = timed(lambda: torch.ops.codetta.segment(leaves, key, 0), calls, on_gpu)
    spent = []
    for i in range(WARM_UP + calls // 4):
        outputs = torch.ops.codetta.segment(leaves, key, 0)[:4]
        grads = [torch.ones_like(t) for t in outputs]
        if on_gpu:
            torch.cuda.synchronize()
        begin = perf_counter()
        torch.autograd.grad(outputs, wanted, grads)
        if i >= WARM_UP:
            spent.append(perf_counter() - begin)
    return {"op with autograd": forward, "backward with autograd": median(spent) * 1e6}


def compiled(name: str, tokens: int, calls: int) -> dict[str, float]:
    """torch.compile on the same segment, and codetta's backend on the same module: forward alone, and recording."""
    s = SIZES[name]
    layer = Layer(s).to("cuda", torch.bfloat16)
    args = [torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) for n in (s.heads * s.inside, s.d)]
    args += [torch.randn(tokens, s.inside, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    found = {}
    for backend in ("inductor", "codetta"):
        for mode in ("inference", "training"):
            try:
                torch._dynamo.reset()
                f = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
                with torch.set_grad_enabled(mode == "training"):
                    found[f"{backend} {mode}"] = timed(lambda f=f: f(*args), calls, True)
            except Exception as error:  # one way fails, the others are still measured
                found[f"{backend} {mode}"] = float("nan")
                print(f"{backend} {mode}: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def main() -> None:
    """Measure and print; the file is written after each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stub", action="store_true", help="no kernels, tensors on the CPU")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--sizes", nargs="*", choices=SIZES)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not given.stub
    if not on_gpu:
        stub()
        torch.set_num_threads(1)
    gc.disable()
    rows = []
    for name in given.sizes or (["1B", "8B"] if on_gpu else ["small"]):
        row = measure(name, given.tokens, given.calls, on_gpu)
        if on_gpu:
            row["torch.compile"] = compiled(name, given.tokens, given.calls)
        rows.append(row)
        print(json.dumps(row, indent=1, default=str))
        if given.json:
            given.json.write_text(json.dumps({"gpu": on_gpu and torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
