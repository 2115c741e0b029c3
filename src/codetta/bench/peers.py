"""Others' fused kernels as baselines: Liger's, FlashInfer's, QuACK's. A package that is not there is said so.

Liger and FlashInfer have no kernel with a GEMM in it: theirs follow cuBLAS GEMMs. Their norm's scale is in the GEMM's
input already, so that it is given scaled rows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from codetta.bench.baselines import Baseline, Call, Product, alternating_roles, inductor, product_of
from codetta.bench.plain import interleaved
from codetta.bench.shapes import EPS
from codetta.bench.steps import Case
from codetta.errors import UnsupportedError

QUACK = "codetta.backends.hopper.quack_ops"


def peers_of(case: Case, *, tuned: bool = False) -> Iterator[Baseline]:
    """The peers that have something like this case; ``tuned`` lets QuACK try its tiles."""
    if case.role in LIGER and (case.role != "RoPE" or len(case.step.b) == 3):  # it turns q and k together
        make = LIGER[case.role]
        yield Baseline("Liger", lambda: make(case, _liger(), False))
        yield Baseline("Liger, compiled", lambda: make(case, _liger(), True))
    if case.role in FLASHINFER:
        behind = FLASHINFER[case.role]
        yield Baseline("FlashInfer", lambda: behind(case, _flashinfer()))
    if case.role in QUACKS:
        fused = QUACKS[case.role]
        alternating = ("z", "dz", "unscaled dz") if "SwiGLU" in case.role else ()
        yield Baseline("QuACK", lambda: fused(case, _quack(), tuned), alternating)


def also_expected(case: Case, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What peers give beside what the programs do: the scaled norm, its scale, a gradient without the row scale."""
    found = dict(expected)
    if "ssq" in expected:
        found["rstd"] = torch.rsqrt(expected["ssq"] / expected["h"].shape[1] + EPS)
        found["normed"] = expected["h"] * found["rstd"][:, None]
    if "dz" in expected and "rstd" in case.roles:
        found["unscaled dz"] = expected["dz"] / case.roles["rstd"].double()[:, None]
    return found


def _import(name: str, package: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"no {package} here: {error}", hint=f"pip install {package}") from None


def _liger() -> Any:
    return _import("liger_kernel.transformers.functional", "liger-kernel")


def _flashinfer() -> Any:
    return _import("flashinfer", "flashinfer-python")


def _quack() -> Any:
    if not torch.cuda.is_available():
        raise UnsupportedError("QuACK needs a GPU")
    return _import(QUACK, "'codetta[hopper]'")


def _scaled_input(case: Case) -> Tensor:
    a = case.memory[case.step.a]
    return (a.float() * case.roles["rstd"][:, None]).to(a.dtype) if "rstd" in case.roles else a


def _separate(case: Case, parts: int) -> list[Product]:
    """One GEMM a weight, as separate modules run them; a stacked weight is taken apart."""
    a, found = _scaled_input(case), [case.memory[w] for w in case.step.b]
    weights = found if len(found) == parts else found[0].chunk(parts)
    return [Product("nt", a, w.contiguous(), a.new_empty(a.shape[0], w.shape[0])) for w in weights]


# --- Liger ------------------------------------------------------------------------------------------------------------


def _as_liger(fn: Callable[..., Any], compiled: bool, on_gpu: bool) -> Callable[..., Any]:
    return inductor(fn, on_gpu) if compiled else fn


def _liger_residual(case: Case, liger: Any, compiled: bool) -> Call:
    product, roles = product_of(case), case.roles

    def norm(acc: Tensor, residual: Tensor, gain: Tensor) -> Any:
        return liger.liger_fused_add_rms_norm(acc, residual, gain, EPS, 0.0, "llama", False)

    behind = _as_liger(norm, compiled, product.a.is_cuda)

    def call() -> Mapping[str, Tensor]:
        normed, x = behind(product(), roles["residual"], roles["gain"])
        return {"normed": normed, "x": x}

    return call


def _liger_swiglu(case: Case, liger: Any, compiled: bool) -> Call:
    gate, up = _separate(case, 2)

    def act(a: Tensor, b: Tensor) -> Any:
        return liger.liger_swiglu(a, b)

    behind = _as_liger(act, compiled, gate.a.is_cuda)
    return lambda: {"y": behind(gate(), up())}


def _liger_rope(case: Case, liger: Any, compiled: bool) -> Call:
    q, k, v = _separate(case, 3)
    cos, sin = case.roles["cos"], case.roles["sin"]

    def turn(a: Tensor, b: Tensor) -> Any:
        heads = (t.view(1, t.shape[0], -1, cos.shape[1]).transpose(1, 2) for t in (a, b))
        turned = liger.liger_rope(*heads, cos[None], sin[None])
        return [t.transpose(1, 2).flatten(2).squeeze(0) for t in turned]

    behind = _as_liger(turn, compiled, q.a.is_cuda)

    def call() -> Mapping[str, Tensor]:
        turned = behind(q(), k())
        return {"q": turned[0], "k": turned[1], "v": v()}

    return call


LIGER = {"residual, partial RMS": _liger_residual, "SwiGLU": _liger_swiglu, "RoPE": _liger_rope}


# --- FlashInfer -------------------------------------------------------------------------------------------------------


def _flashinfer_residual(case: Case, flashinfer: Any) -> Call:
    """In place on both; so the stream grows from call to call, which is right at the first, the one that is checked."""
    product, stream, gain = product_of(case), case.roles["residual"].clone(), case.roles["gain"]

    def call() -> Mapping[str, Tensor]:
        acc = product()
        flashinfer.fused_add_rmsnorm(acc, stream, gain, EPS)
        return {"normed": acc, "x": stream}

    return call


def _flashinfer_swiglu(case: Case, flashinfer: Any) -> Call:
    whole = product_of(case)
    product = Product("nt", _scaled_input(case), whole.w, whole.out)
    y = whole.out.new_empty(whole.out.shape[0], whole.out.shape[1] // 2)
    return lambda: {"y": flashinfer.silu_and_mul(product(), out=y)}


FLASHINFER = {"residual, partial RMS": _flashinfer_residual, "SwiGLU": _flashinfer_swiglu}


# --- QuACK ------------------------------------------------------------------------------------------------------------


def _quack_residual(case: Case, quack: Any, tuned: bool) -> Call:
    p, roles = product_of(case), case.roles
    call: Call = quack.residual_rms(p.a, p.w, roles["residual"], roles["gain"], EPS, tuned)
    return call


def _quack_swiglu(case: Case, quack: Any, tuned: bool) -> Call:
    p = product_of(case)
    rstd = case.roles.get("rstd")
    scale = rstd if rstd is not None else torch.ones(p.a.shape[0], device=p.a.device)
    call: Call = quack.swiglu(p.a, interleaved(p.w, 0), scale, tuned)
    return call


def _quack_swiglu_backward(case: Case, quack: Any, tuned: bool) -> Call:
    """Without the row scale, which it has no place for."""
    p = product_of(case)
    inner: Call = quack.swiglu_backward(p.a, p.w, alternating_roles(case)["z"], tuned)
    name = "unscaled dz" if "rstd" in case.roles else "dz"

    def call() -> Mapping[str, Tensor]:
        found = inner()
        return {name: found["dz"], "y": found["y"]}

    return call


def _quack_log_sum_exp(case: Case, quack: Any, tuned: bool) -> Call:
    p = product_of(case)
    call: Call = quack.log_sum_exp(p.a, p.w, case.roles.get("rstd"), tuned)
    return call


QUACKS = {
    "residual, partial RMS": _quack_residual,
    "SwiGLU": _quack_swiglu,
    "SwiGLU backward": _quack_swiglu_backward,
    "log-sum-exp": _quack_log_sum_exp,
}
