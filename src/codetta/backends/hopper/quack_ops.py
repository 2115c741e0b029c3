"""QuACK's own fused operators, as baselines: those of its operators that do what one of our programs does.

Each function prepares its outputs and returns the call. With ``tuned`` QuACK tries its whole list of tiles first, which
takes tens of seconds a shape; without, it takes its default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from codetta.backends.hopper import toolchain  # noqa: F401 - first: it prepares what the next imports read

# isort: split
from quack.epilogue import library
from quack.gemm_interface import gemm_dgated, gemm_norm_act, gemm_rms

Call = Callable[[], dict[str, Tensor]]


def residual_rms(a: Tensor, w: Tensor, residual: Tensor, gain: Tensor, eps: float, tuned: bool) -> Call:
    """GEMM, residual, gain and the row's scale: a second kernel folds the partial sums, inside the call."""
    x, h = torch.empty_like(residual), torch.empty_like(residual)

    def call() -> dict[str, Tensor]:
        _, rstd = gemm_rms(a, w.t(), C=residual, norm_weight=gain, out=h, premult_out=x, eps=eps, tuned=tuned)
        return {"x": x, "h": h, "rstd": rstd}

    return call


def swiglu(a: Tensor, w: Tensor, rstd: Tensor, tuned: bool) -> Call:
    """GEMM, row scale, SwiGLU, and the pre-activation; ``w`` has gate and up in alternating rows."""
    rows, columns = a.shape[0], w.shape[0]
    z, y = a.new_empty(rows, columns), a.new_empty(rows, columns // 2)
    out: dict[str, Any] = {"preact_out": z, "postact_out": y, "store_preact": True}

    def call() -> dict[str, Tensor]:
        gemm_norm_act(a, w.t(), rstd=rstd, activation="swiglu", tuned=tuned, **out)
        return {"z": z, "y": y}

    return call


def swiglu_backward(dout: Tensor, w: Tensor, z: Tensor, tuned: bool) -> Call:
    """The down-projection's data gradient, SwiGLU's gradient, the activation again, and a row sum of its own."""
    dz, y = torch.empty_like(z), z.new_empty(z.shape[0], z.shape[1] // 2)
    out: dict[str, Any] = {"dx_out": dz, "postact_out": y, "colvec_reduce": True}

    def call() -> dict[str, Tensor]:
        gemm_dgated(dout, w, z, activation="swiglu", tuned=tuned, **out)
        return {"dz": dz, "y": y}

    return call


def log_sum_exp(a: Tensor, w: Tensor, rstd: Tensor | None, tuned: bool) -> Call:
    """The logits and their log-sum-exp, whose parts a second kernel folds, inside the call."""
    logits = a.new_empty(a.shape[0], w.shape[0])
    epilogue = library.lse_epi if rstd is None else library.rstd_lse_epi
    operands = {} if rstd is None else {"rstd": rstd}

    def call() -> dict[str, Tensor]:
        found = epilogue(a, w.t(), out={"D": logits}, tuned=tuned, **operands)
        lse = found["lse"]
        return {"logits": logits, "lse": lse if lse.dim() == 1 else lse.logsumexp(-1)}

    return call
