"""Where a step's time goes: the profiler's kernels by name, sorted into GEMMs, attention, optimizer and others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

OUR_GEMM, LIBRARY_GEMM = "GEMM, ours", "GEMM, library"
ATTENTION, OPTIMIZER, OTHER, GAPS = "attention", "optimizer", "other kernels", "gaps"
GEMMS = (OUR_GEMM, LIBRARY_GEMM)
SHARES = (*GEMMS, ATTENTION, OPTIMIZER, OTHER, GAPS)
HEAD_START, CYCLES = "spin_kernel", 100_000_000  # the GPU waits some 60 ms while the first launches are queued
LONGEST = 15  # names of other kernels that are kept
RANGES = ("Optimizer.", "Torch-Compiled Region", "ProfilerStep", "## Call")

# The first line that a name matches says what it is. Attention comes first: its kernels are GEMMs to CUTLASS, too.
PATTERNS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (ATTENTION, r"flash_(fwd|bwd|attn)|flash::|flashattn|fmha|cudnn_generated.*(sdpa|flash|attn)|MemEffAttention"),
        (ATTENTION, r"flex_attention|^aten::_(scaled_dot_product|flash_attention|efficient_attention)"),
        (OPTIMIZER, r"multi_tensor_apply|fused_?adam"),
        (OUR_GEMM, r"^kernel_cutlass.*gemm"),
        (LIBRARY_GEMM, r"^nvjet_|xmma_gemm|(^|_)s?16\d*gemm_|cutlass.*gemm|cutlass_.*_tensorop_|^ampere_.*gemm"),
        (LIBRARY_GEMM, r"cublasLt::|splitKreduce|^gemv|gemv2|gemmk1_|^triton_tem_fused.*mm|^void cutlass::Kernel"),
        (LIBRARY_GEMM, r"^aten::(mm|addmm|bmm|baddbmm)$|^mkldnn::_linear|^mkl::_mkl_linear"),
    )
)


def kind_of(name: str) -> str:
    """What a kernel, or an operator of a CPU, is to a training step."""
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), OTHER)


@dataclass(frozen=True)
class Interval:
    """One kernel on the GPU, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Profile:
    """Microseconds of one step by kind, gaps included; kernels of each kind; the other kernels that took longest."""

    times: dict[str, float]
    kernels: dict[str, float] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)

    @property
    def whole(self) -> float:
        """Microseconds of the step while it was profiled."""
        return sum(self.times.values())

    @property
    def shares(self) -> dict[str, float]:
        """Parts of one."""
        return {kind: t / self.whole for kind, t in self.times.items()} if self.whole else {}


def profiled(step: Callable[[], object], steps: int, on_gpu: bool) -> Profile:
    """The mean of some steps, each like those before. On a CPU it is operators by their own time, and no gaps."""
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as found:
        if on_gpu:
            torch.cuda._sleep(CYCLES)
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    if on_gpu:
        kernels = [
            Interval(e.name, e.time_range.start, e.time_range.end)
            for e in found.events() or ()
            if e.device_type == DeviceType.CUDA and not is_no_kernel(e.name, getattr(e, "is_user_annotation", False))
        ]
        return of_kernels(kernels, steps)
    return of_times(((e.key, e.self_cpu_time_total, e.count) for e in found.key_averages()), 0.0, steps)


def is_no_kernel(name: str, annotated: bool) -> bool:
    """Whether an event on the GPU's time line is none of a step's: a range around kernels, such as the optimizer's, or
    the head start."""
    return annotated or name.startswith(RANGES) or HEAD_START in name


def of_kernels(kernels: Iterable[Interval], steps: int) -> Profile:
    """The profile of some steps' kernels. A gap is where none runs, between the first and the last; where two run side
    by side, the time of both counts once: the later one's overlap is nobody's."""
    busy_until, gaps = None, 0.0
    times: list[tuple[str, float, int]] = []
    for k in sorted(kernels, key=lambda k: k.start):
        begin = k.start if busy_until is None else max(k.start, busy_until)
        gaps += begin - busy_until if busy_until is not None else 0.0
        times.append((k.name, max(k.end - begin, 0.0), 1))
        busy_until = max(k.end, begin)
    return of_times(times, gaps, steps)


def of_times(times: Iterable[tuple[str, float, int]], gaps: float, steps: int) -> Profile:
    """The profile of names with their times in microseconds and their counts, over some steps."""
    total: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for name, time, count in times:
        kind = kind_of(name)
        total[kind] += time  # type: ignore[assignment]  # a Counter of floats
        counts[kind] += count
        if kind == OTHER:
            others[name] += time  # type: ignore[assignment]
    by_kind = {kind: total[kind] / steps for kind in SHARES if kind != GAPS}
    return Profile(
        {**by_kind, GAPS: gaps / steps},
        {kind: counts[kind] / steps for kind in by_kind},
        {name[:160]: time / steps for name, time in others.most_common(LONGEST)},
    )
