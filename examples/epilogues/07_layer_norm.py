"""7. LayerNorm deferred over a GEMM: two statistics now, a rank-one correction later.

codetta check examples/epilogues/07_layer_norm.py
"""

from codetta import ColVec, RowVec, Tile, epilogue, finalize, rsqrt, sum_row

WIDTH = 4096


# LayerNorm subtracts the row's mean and divides by its deviation. Both need the whole row, so this program stores the
# two sums and passes the row on as it is, times the gain.
@epilogue
def residual_layer_norm(acc: Tile, residual: Tile, gain: RowVec):
    x = acc + residual
    return dict(x=x, h=x * gain, total=sum_row(x), squares=sum_row(x * x))


def residual_layer_norm_reference(acc, residual, gain):
    x = acc + residual
    return dict(x=x, h=x * gain, total=x.sum(1), squares=x.square().sum(1))


# mean and 1/deviation, and their product: three vectors of one number per row.
@finalize
def layer_norm_statistics(total: ColVec, squares: ColVec):
    mean = total / WIDTH
    rstd = rsqrt(squares / WIDTH - mean * mean + 1e-5)
    return dict(rstd=rstd, shift=mean * rstd)


def layer_norm_statistics_reference(total, squares):
    mean = total / WIDTH
    rstd = 1 / (squares / WIDTH - mean.square() + 1e-5).sqrt()
    return dict(rstd=rstd, shift=mean * rstd)


# Sums of squares that no row can have would give the root of a negative number.
def layer_norm_statistics_inputs(inputs):
    total, squares = inputs["total"], inputs["squares"]
    return dict(total=total, squares=(1 + squares.abs()) * WIDTH + total.square() / WIDTH)


# ((x - mean) * rstd * gain + beta) @ w.T = rstd * (h @ w.T) - (mean * rstd) * (w @ gain) + w @ beta
# The last two vectors depend on weights alone: they are RowVecs that exist before the program starts.
@epilogue
def shifted(acc: Tile, rstd: ColVec, shift: ColVec, w_gain: RowVec, w_beta: RowVec):
    return dict(y=acc * rstd - shift * w_gain + w_beta)


def shifted_reference(acc, rstd, shift, w_gain, w_beta):
    return dict(y=acc * rstd[:, None] - shift[:, None] * w_gain + w_beta)


residual_layer_norm_SIZES = shifted_SIZES = {"M": 16384, "N": 4096, "K": 4096}
layer_norm_statistics_SIZES = {"M": 16384}
