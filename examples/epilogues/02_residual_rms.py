"""2. Residual, gain and partial sums of squares: what a norm can do before its row is complete.

codetta check examples/epilogues/02_residual_rms.py
"""

from codetta import ColVec, RowVec, Tile, epilogue, finalize, rsqrt, sum_row

WIDTH = 4096


# RMSNorm scales a row by 1/rms, which needs the whole row; a tile holds a part of it. So this program stores the sum of
# squares, one *partial* per tile, and leaves the scale out: a row scale commutes with the next GEMM, whose epilogue
# applies it. To use `ssq` here, in `x * rsqrt(ssq / WIDTH)`, would be a BlockLocalError.
@epilogue
def residual_rms(acc: Tile, residual: Tile, gain: RowVec):
    x = acc + residual
    return dict(x=x, h=x * gain, ssq=sum_row(x * x))


def residual_rms_reference(acc, residual, gain):
    x = acc + residual
    return dict(x=x, h=x * gain, ssq=x.square().sum(1))


# A finalize is a small step on vectors: the partials come folded, and the result is a vector for the next epilogue.
@finalize
def rms_scale(ssq: ColVec):
    return dict(rstd=rsqrt(ssq / WIDTH + 1e-6))


def rms_scale_reference(ssq):
    return dict(rstd=(ssq / WIDTH + 1e-6) ** -0.5)


# A sum of squares is not negative, and random inputs are: this hook puts them right for both sides.
def rms_scale_inputs(inputs):
    return {"ssq": inputs["ssq"].abs() * WIDTH}


# The next GEMM got h = x * gain; behind it the rows are scaled. (x * gain) @ w.T * rstd = (x * rstd * gain) @ w.T
@epilogue
def scaled(acc: Tile, rstd: ColVec):
    return dict(y=acc * rstd)


def scaled_reference(acc, rstd):
    return dict(y=acc * rstd[:, None])


residual_rms_SIZES = scaled_SIZES = {"M": 16384, "N": 4096, "K": 4096}
rms_scale_SIZES = {"M": 16384}
