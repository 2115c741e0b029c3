"""The backward of a residual add and a deferred RMSNorm, behind a data gradient's GEMM.

acc is (M, N): the gradient of the gained stream x * gain. incoming, (M, N), is the stream's own gradient. dx is the
stream's gradient without the norm's correction, which is x times a number per row; inner, (M,), is the inner
product that this number is made of.
"""

from codetta import RowVec, Tile, epilogue, sum_row


@epilogue
def residual_rms_backward(acc: Tile, x: Tile, gain: RowVec, incoming: Tile):
    g = acc * gain
    return dict(dx=g + incoming, inner=sum_row(g * x))


def residual_rms_backward_reference(acc, x, gain, incoming):
    g = acc * gain
    return dict(dx=g + incoming, inner=(g * x).sum(1))


residual_rms_backward_SIZES = {"M": 16384, "N": 4096, "K": 22016}
