"""12. RMSNorm's backward, as derived: nobody has to write it, and here it is by hand.

codetta check examples/epilogues/12_rms_backward.py
python examples/epilogues/12_rms_backward.py    # prints the two programs
"""

import torch

from codetta import ColVec, RowVec, Tile, epilogue, sum_col, sum_row


# The forward of example 2. The norm's row scale is applied behind the next GEMM.
@epilogue
def residual_rms(acc: Tile, residual: Tile, gain: RowVec):
    x = acc + residual
    return dict(x=x, h=x * gain, ssq=sum_row(x * x))


def residual_rms_reference(acc, residual, gain):
    x = acc + residual
    return dict(x=x, h=x * gain, ssq=x.square().sum(1))


# Its backward is the epilogue of the next GEMM's data gradient, dz @ w: `acc` is the gradient of h. Three gradients
# meet in x: that of x itself (d_x, from the residual stream), that of h (acc * gain), and that of the sum of squares,
# which is one number per row, d_ssq, times 2 x. In RMSNorm's usual formula that is the term
# -rstd**3 / width * <dy, x gain> * x: the inner product was collected by an earlier epilogue, and a finalize made d_ssq
# of it. The gain's gradient is a sum over all rows, so it is stored as partials.
@epilogue
def residual_rms_backward(acc: Tile, d_x: Tile, saved_x: Tile, d_ssq: ColVec, gain: RowVec):
    d_residual = d_x + saved_x * (d_ssq * 2.0) + acc * gain
    return dict(d_residual=d_residual, sums=sum_col(acc * saved_x))


# The reference is autograd through the plain forward.
def residual_rms_backward_reference(acc, d_x, saved_x, d_ssq, gain):
    def forward(x, gain):
        return x, x * gain, x.square().sum(1)

    _, pull = torch.func.vjp(forward, saved_x, gain)
    d_residual, d_gain = pull((d_x, acc, d_ssq))
    return dict(d_residual=d_residual, sums=d_gain)


residual_rms_SIZES = residual_rms_backward_SIZES = {"M": 16384, "N": 4096, "K": 4096}


def is_the_derived_one() -> bool:
    """Expressions are interned: equal ones are the same object, so this compares the programs term by term."""
    return residual_rms.vjp("h")[0].outputs == residual_rms_backward.program.outputs


if __name__ == "__main__":
    print(residual_rms_backward)
    print(residual_rms.vjp("h"))
    print("# the first of the derived programs is the one by hand:", is_the_derived_one())
