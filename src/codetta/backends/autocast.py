"""What autocast asks for."""

from __future__ import annotations

import torch


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype in which a linear layer on devices of this kind is to be computed; None where autocast is off."""
    # ``torch.amp.is_autocast_available`` would ask for any kind, but the Dynamo of torch 2.11 does not trace it.
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
