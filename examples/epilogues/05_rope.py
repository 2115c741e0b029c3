"""5. RoPE: heads, and a table that repeats over them.

codetta check examples/epilogues/05_rope.py
"""

import torch

from codetta import Table, Tile, epilogue, halves, join_halves

HEADS, HALF = 32, 64  # heads of 128 columns


# Columns are HEADS groups of 128. `halves(..., groups=HEADS)` takes the left and the right half of every head, as
# Hugging Face pairs them (Meta's neighbouring columns are `adjacent`). A Table has one row per token and one column per
# column *inside* a group: it is loaded once and used for every head, never stored at full width.
@epilogue
def rope(acc: Tile[2 * HEADS * HALF], cos: Table[HALF], sin: Table[HALF]):
    left, right = halves(acc, groups=HEADS)
    return dict(q=join_halves(left * cos - right * sin, right * cos + left * sin, groups=HEADS))


def rope_reference(acc, cos, sin):
    x = acc.unflatten(1, (HEADS, 2 * HALF))
    left, right = x.chunk(2, dim=2)
    turned = torch.cat([-right, left], dim=2)
    cos, sin = (torch.cat([t, t], dim=1).unsqueeze(1) for t in (cos, sin))  # the same for every head
    return dict(q=(x * cos + turned * sin).flatten(1))


rope_SIZES = {"M": 16384, "K": 4096}
