"""8. Dropout with a seed: random numbers without a state, so that no mask is stored.

codetta check examples/epilogues/08_dropout.py
"""

import torch

from codetta import Scalar, Tile, column_index, epilogue, i64, random, row_index, where

P = 0.1


# `random(seed, row, column)` is a function of three integers: the same three give the same number, on any backend, in
# forward and again in backward. `if` cannot look at a traced value; `where` chooses.
@epilogue
def dropout_residual(acc: Tile, residual: Tile, seed: Scalar[i64]):
    kept = random(seed, row_index(acc), column_index(acc)) >= P
    return dict(y=residual + where(kept, acc * (1 / (1 - P)), 0.0))


# The generator in PyTorch: a finaliser of MurmurHash3 over the three counters, 24 bits of it as a float32.
def mix(h):
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def dropout_residual_reference(acc, residual, seed):
    rows, cols = acc.shape
    h = torch.tensor(0x9E3779B9)
    for counter in (seed, torch.arange(rows)[:, None], torch.arange(cols)):
        h = mix((h + counter * 0x9E3779B1) & 0xFFFFFFFF)
    kept = (h >> 8).to(torch.float32) * 2.0**-24 >= P
    return dict(y=residual + torch.where(kept, acc / (1 - P), 0.0))


dropout_residual_SIZES = {"M": 16384, "N": 4096, "K": 4096}
