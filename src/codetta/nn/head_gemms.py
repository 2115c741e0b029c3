"""The two GEMMs behind the logits' gradient: the weight's gradient into its rows, the input's as a sum over slabs."""

from __future__ import annotations

import logging
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.backends import get_backend
from codetta.backends.base import Runnable
from codetta.backends.hopper.choose import is_tuned, own_kernel
from codetta.backends.reference.evaluate import DTYPE_OF, contract
from codetta.nn.head_graphs import weight_plan

# cuBLAS of CUDA 13.0 leaves the last token out of some weight gradients where their number is odd; zero rows are
# appended to 8, a part of the columns at a time, so that no second copy of everything is made.
WHOLE_ROWS = 8
PADDED_COLUMNS = 8192
log = logging.getLogger("codetta")


@lru_cache(maxsize=256)
def _own_weight_gradient(dtype: torch.dtype, columns: int, features: int, rows: int) -> Runnable | None:
    """Our kernel for the weight's gradient, where it was measured to be faster than the library's: at these very sizes,
    since a slab's, chosen by its neighbours' in the table, made all of the loss 10 % slower at d 2048."""
    plan = weight_plan(DTYPE_OF[dtype], columns, features)
    program = plan.steps[0].program
    return get_backend("hopper")(plan) if is_tuned(program, rows) and own_kernel(program, rows) else None


def weight_gradient(backend: str, gradient: Tensor, x: Tensor, out: Tensor) -> None:
    """gradient.T @ x, summed in float32 and rounded once into ``out``."""
    if backend == "hopper":
        own = _own_weight_gradient(x.dtype, gradient.shape[1], x.shape[1], x.shape[0])
        if own is not None:
            own.run({"gradient": gradient, "x": x}, x.shape[0], into={"d_weight": out})
            return
    if x.device.type != "cuda":
        out.copy_(contract("tn", gradient, [x]))
        return
    missing = -x.shape[0] % WHOLE_ROWS
    if not missing:
        torch.mm(gradient.t(), x, out=out)
        return
    x = F.pad(x, (0, 0, 0, missing))
    for part, rows in zip(gradient.split(PADDED_COLUMNS, 1), out.split(PADDED_COLUMNS), strict=True):
        torch.mm(F.pad(part, (0, 0, 0, missing)).t(), x, out=rows)


@cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch adds a product of narrow matrices to a float32 one in place, which saves a pass over it."""
    one = torch.zeros(WHOLE_ROWS, WHOLE_ROWS, device=device, dtype=dtype)
    total = one.float()
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError) as error:
        log.info("the input's gradient takes a pass more for each slab: %s", error)
        return False
    return True


class InputGradient:
    """The sum of gradient @ weight over slabs, in float32 (float64 of float64), then rounded once."""

    def __init__(self, single: bool) -> None:
        """``single``: there is but one slab, and no sum."""
        self.single = single
        self.sum: Tensor | None = None

    def add(self, gradient: Tensor, weight: Tensor) -> None:
        """One slab more."""
        narrow = weight.dtype.itemsize == 2
        if weight.device.type != "cuda":
            product = contract("nn", gradient, [weight])
            self.sum = product if self.sum is None else self.sum.add_(product)
        elif self.sum is None:
            wide = narrow and not self.single
            self.sum = torch.mm(gradient, weight, out_dtype=torch.float32) if wide else torch.mm(gradient, weight)
        elif narrow and _adds_wide(weight.device, weight.dtype):
            torch.addmm(self.sum, gradient, weight, out_dtype=torch.float32, out=self.sum)
        elif narrow:
            self.sum += torch.mm(gradient, weight, out_dtype=torch.float32)
        else:
            self.sum.addmm_(gradient, weight)

    def rounded(self, like: Tensor) -> Tensor:
        """The gradient in the input's dtype."""
        return torch.zeros_like(like) if self.sum is None else self.sum.to(like.dtype)
