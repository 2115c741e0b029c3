"""A residual add and the first part of RMSNorm behind a GEMM.

acc and residual are (M, N), gain is (N,). x is the new residual stream; h, the gained stream, feeds the next GEMM;
ssq, (M,), is each row's sum of squares, of which somebody else makes the norm's scale.
"""


from codetta import RowVec, Tile, epilogue, sum_row


@epilogue
def residual_rms(acc: Tile, residual: Tile, gain: RowVec):
    x = acc + residual
    return dict(x=x, h=x * gain, ssq=sum_row(x * x))


def residual_rms_reference(acc, residual, gain):
    x = acc + residual
    return dict(x=x, h=x * gain, ssq=(x * x).sum(1))


residual_rms_SIZES = {"M": 16384, "N": 4096, "K": 11008}
