"""The gradient of an embedding, added to one that its weight already has, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def add_rows(into: Tensor, ids: Tensor, rows: Tensor, padding: int) -> None:
    """Add each of ``rows`` (tokens, features) to the row of ``into`` (columns, features) that its id names, but for
    those whose id is ``padding``. What is added to one row is added up in float32 at least, and rounded once."""
    wide = torch.promote_types(into.dtype, torch.float32)
    counted = torch.where((ids != padding)[:, None], rows, 0.0).to(wide)
    into.copy_(into.to(wide).index_add_(0, ids, counted))
