"""10. Per-row absolute maximum: what a quantisation needs before it can quantise.

codetta check examples/epilogues/10_row_amax.py
"""

from codetta import ColVec, Tile, absmax_row, epilogue, finalize, maximum, silu

LARGEST = 448.0  # the largest number of float8 e4m3


# To quantise a row its largest magnitude must be known, which is complete only when all tiles are done. So y is stored,
# and its row maximum as a partial beside it, without another pass over y.
@epilogue
def silu_amax(acc: Tile):
    y = silu(acc)
    return dict(y=y, amax=absmax_row(y))


def silu_amax_reference(acc):
    y = acc * acc.sigmoid()
    return dict(y=y, amax=y.abs().amax(1))


# The scale of each row. `maximum` keeps a row of zeros from dividing by zero.
@finalize
def quantisation_scale(amax: ColVec):
    return dict(scale=LARGEST / maximum(amax, 1e-12))


def quantisation_scale_reference(amax):
    return dict(scale=LARGEST / amax.clamp(min=1e-12))


def quantisation_scale_inputs(inputs):
    return {"amax": inputs["amax"].abs() + 0.1}


silu_amax_SIZES = {"M": 16384, "N": 4096, "K": 4096}
quantisation_scale_SIZES = {"M": 16384}
