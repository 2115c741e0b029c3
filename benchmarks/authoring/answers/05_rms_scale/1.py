"""RMSNorm's row scale behind the GEMM that took the gained, unscaled input.

acc is (M, N), rstd is (M,): one over each row's root mean square, known before the GEMM starts.
"""


from codetta import ColVec, Tile, epilogue


@epilogue
def rms_scale(acc: Tile, rstd: ColVec):
    return dict(y=acc * rstd)


def rms_scale_reference(acc, rstd):
    return dict(y=acc * rstd[:, None])


rms_scale_SIZES = {"M": 16384, "N": 4096, "K": 4096}
