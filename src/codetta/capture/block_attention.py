"""Causal attention within a window or within documents, by PyTorch's FlexAttention, which skips what is hidden.

Lengths are cut into blocks of 128 positions. Which pairs of blocks are looked at, and which of these need no mask, is
computed on the device from the smallest and the largest document number of each block: every size is a function of the
text's length, so nothing waits for the device. A pair too many costs time and no more, as the mask is applied in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.nn.attention.flex_attention import BlockMask

# queries, keys and values, each (batch, heads, length, size)
Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]

BLOCK = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# tl.dot takes no smaller operand; Inductor has no blocks that fit for larger ones
HEAD_SIZES = range(16, 257)
OLDEST = (8, 0)
# How a result may lie in memory: by heads, or by positions, as where heads are cut from the columns of a GEMM
ORDERS = (0, 1, 2, 3), (0, 2, 1, 3)

# One kernel for all lengths (AUTO takes another one, without a backward, for short texts), which keeps what backward
# reads. PyTorch's own entry point sets these; inside of a graph it cannot be called.
_OPTIONS = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
WIDE = "float64"  # who compiles a graph that is run in float64
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
          "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")  # fmt: skip


def block_lists(query: Tensor, documents: Sequence[Tensor], window: int | None) -> tuple[Tensor, ...]:
    """For each block of queries the blocks of keys it looks at, as FlexAttention takes them: how many and which ones,
    under the mask and without it; then for each block of keys the blocks of queries.

    ``query`` is (..., length, size), read for its length and its device; ``documents`` are (batch, length)."""
    length: int = query.shape[-2]
    needed, full = blocks(length, documents, window, query.device)
    masked = needed & ~full
    chosen = torch.stack([masked, full, masked.mT, full.mT]).to(torch.int32)
    ones, places = torch.sort(chosen, dim=-1, descending=True, stable=True)
    counts, places = ones.sum(-1, dtype=torch.int32), places.to(torch.int32)
    return tuple(t for pair in zip(counts.unbind(), places.unbind(), strict=True) for t in pair)


def block_attention(
    heads: Heads,
    lists: Sequence[Tensor],
    documents: Sequence[Tensor],
    window: int | None,
    scale: float | None,
    order: Sequence[int],
) -> Tensor:
    """Attention to what comes no later, is less than ``window`` away and has the same number in each of ``documents``.
    ``lists`` are those of ``block_lists``; keys and values may have fewer heads than queries.

    In memory, the result's dimensions are in this ``order``, the last one innermost."""
    length: int = heads[0].shape[2]
    named: dict[str, Any] = dict(zip(_LISTS, lists, strict=True))
    mask = BlockMask(
        seq_lengths=(length, length), **named, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=_allowed(window)
    ).as_tuple()
    scale = 1 / math.sqrt(heads[0].shape[3]) if scale is None else scale
    tables = tuple(_flat_if_shared(t) for t in documents)
    out: Tensor = flex_attention(*heads, _same_score, mask, scale, dict(_OPTIONS), (), tables)[0]
    return out.permute(*order).contiguous().permute(*(order.index(i) for i in range(4)))


def blocks(length: int, documents: Sequence[Tensor], window: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which pairs (batch, 1, block of queries, block of keys) have something to look at, perhaps; and in which of them
    every query certainly looks at every key. The batch is 1 without documents."""
    count = (length + BLOCK - 1) // BLOCK
    number = torch.arange(count, device=device)
    q, k = number[:, None], number
    needed = k <= q
    full = (k < q) & ((q + 1) * BLOCK <= length)
    if window is not None:
        needed = needed & ((q - k) * BLOCK < window + BLOCK - 1)
        full = full & ((q - k) * BLOCK < window - BLOCK + 1)
    needed, full = needed[None, None], full[None, None]
    inside = (number[:, None] * BLOCK + torch.arange(BLOCK, device=device)).clamp(max=length - 1)
    for table in documents:
        number_of = table.reshape(-1, length)[:, inside]
        low, high = number_of.amin(-1)[:, None], number_of.amax(-1)[:, None]
        needed = needed & (low[..., :, None] <= high[..., None, :]) & (low[..., None, :] <= high[..., :, None])
        one = low == high
        full = full & (one[..., :, None] & one[..., None, :]) & (low[..., :, None] == low[..., None, :])
    return needed, full


def why_not(heads: Heads, documents: Sequence[Tensor], dropout: float, scale: object) -> str | None:
    """The reason why attention of these cannot be computed in blocks, or ``None``."""
    return why_not_given("block attention", heads, dropout, scale, DTYPES) or _why_not_sizes(heads, documents)


def why_not_given(who: str, heads: Heads, dropout: float, scale: object, dtypes: Sequence[torch.dtype]) -> str | None:
    """The reason why ``who`` does not take such a call, whatever its sizes, or ``None``."""
    if any(t.dim() != 4 for t in heads):
        return f"{who} takes four dimensions"
    if dropout:
        return f"{who} has no dropout"
    if not isinstance(scale, float | int | None):
        return f"{who} takes no scale of {scale}"
    found = dict.fromkeys(t.dtype for t in heads)
    if len(found) > 1 or not found.keys() <= {*dtypes}:
        return f"{who} takes no {' and '.join(map(str, found))}"
    return None


def why_not_alike(heads: Heads) -> str | None:
    """The reason why keys and values are not alike, of the queries' size and in equal groups of them, or ``None``."""
    query, key, value = heads
    batch, count, _, size = query.shape
    alike = all(statically_known_true(m == n) for m, n in zip(key.shape, value.shape, strict=True))
    if not alike or not statically_known_true(key.shape[3] == size) or not statically_known_true(key.shape[0] == batch):
        return "queries, keys and values are not alike"
    if not known(count) or not known(key.shape[1]) or count % key.shape[1]:
        return "heads are not in equal groups"
    return None


def _why_not_sizes(heads: Heads, documents: Sequence[Tensor]) -> str | None:
    query, key, _ = heads
    batch, _, length, size = query.shape
    if (reason := why_not_alike(heads)) is not None:
        return reason
    if not known(size) or size not in HEAD_SIZES:
        return f"block attention takes no heads of {size}"
    if not known(length) and query.device.type != "meta":  # plans are for any length
        # seen on an H200 with torch 2.11: gradients of a graph for all lengths were off, those for one length are right
        return "block attention takes texts of one length"
    if not guard_or_false(key.shape[2] == length):
        return f"{length} queries and {key.shape[2]} keys"
    if not all(_is_table(t, batch, length) for t in documents):
        return "a table of documents has another size"
    return None if guard_or_false(length > BLOCK) else f"{length} keys are one block"


def why_not_on(device: torch.device, inner: str) -> str | None:
    """The reason why a graph on ``device`` that ``inner`` compiles cannot attend in blocks, or ``None``. On the meta
    device, where nothing is computed, what counts is that a GPU can."""
    if inner == WIDE:
        return "block attention has no float64"
    if device.type == "meta":
        return None
    if device.type != "cuda":
        return "block attention is for GPUs"
    if inner != "inductor":
        return f"inner={inner!r} has no kernel for block attention"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= OLDEST else f"block attention needs a GPU of compute capability 8.0, not {capability}"


def _is_table(table: Tensor, batch: int, length: int) -> bool:
    *lead, last = table.shape
    shared = all(statically_known_true(n == 1) for n in lead)
    return len(lead) <= 1 and (shared or statically_known_true(lead[0] == batch)) and guard_or_false(last == length)


def known(size: object) -> bool:
    """Whether a size is a number and no symbol."""
    return isinstance(size, int)


def _flat_if_shared(table: Tensor) -> Tensor:
    """A table that all sequences share, without its batch."""
    return table.reshape(-1) if statically_known_true(table.shape[0] == 1) else table


def _allowed(window: int | None) -> Callable[..., Tensor]:
    """The mask as a function of one element's place, and of the tables."""

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tables: Tensor) -> Tensor:
        keep = k <= q
        if window is not None:
            keep = keep & (k > q - window)
        for table in tables:
            keep = keep & ((table[q] == table[k]) if table.dim() == 1 else (table[b, q] == table[b, k]))
        return keep

    return allowed


def _same_score(score: Tensor, *_: Any) -> Tensor:
    return score
