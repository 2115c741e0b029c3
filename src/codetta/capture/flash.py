"""Which calls of attention FlashAttention serves: without a mask, or causal within a window, of 16-bit floats."""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from codetta.backends.hopper import support
from codetta.capture.block_attention import Heads, known, why_not_alike, why_not_given

DTYPES = (torch.bfloat16, torch.float16)
# Of heads of 8 and of 80 its gradients were wrong on an H200 (4.0.0b36); these are tested there.
HEAD_SIZES = (64, 128, 256)
SHORT = 512  # keys, up to which attention is little of a layer, and 0.1 ms of the host's time a call is much


def why_not(heads: Heads, dropout: float, scale: object, causal: bool) -> str | None:
    """The reason why FlashAttention cannot serve these (batch, heads, length, size), or ``None``."""
    if (reason := support.why_not_flash()) is not None:
        return reason
    if not torch.backends.cuda.flash_sdp_enabled():
        return "torch.backends.cuda.enable_flash_sdp(False) was called"
    return why_not_given("it", heads, dropout, scale, DTYPES) or why_not_alike(heads) or _why_not_sizes(heads, causal)


def _why_not_sizes(heads: Heads, causal: bool) -> str | None:
    query, key, _ = heads
    size, keys = query.shape[3], key.shape[2]
    if not known(size) or size not in HEAD_SIZES:
        return f"it takes no heads of {size}"
    if causal and not guard_or_false(query.shape[2] == keys):
        return f"{query.shape[2]} queries and {keys} keys"
    return f"{keys} keys are few" if statically_known_true(keys <= SHORT) else None
