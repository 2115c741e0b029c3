"""The backward of SwiGLU, behind the data gradient's GEMM of the down projection.

acc is (M, N): the gradient of y = silu(gate) * up. z is (M, 2 * N), saved: gate on the left, up on the right. dz,
(M, 2 * N), is the gradient of z; y is made again for the weight gradient; inner, (M,), is the inner product of dz
and z of each row.
"""

import torch
import torch.nn.functional as F

from codetta import Tile, epilogue, halves, join_halves, sigmoid, sum_row


@epilogue
def swiglu_backward(acc: Tile, z: Tile["2*N"]):
    gate, up = halves(z)
    s = sigmoid(gate)
    act = gate * s
    dgate = acc * up * s * (1.0 + gate * (1.0 - s))
    dup = acc * act
    return dict(dz=join_halves(dgate, dup), y=act * up, inner=sum_row(dgate * gate + dup * up))


def swiglu_backward_reference(acc, z):
    def forward(z):
        gate, up = z.chunk(2, -1)
        return F.silu(gate) * up

    y, pull = torch.func.vjp(forward, z)
    (dz,) = pull(acc)
    return dict(dz=dz, y=y, inner=(dz * z).sum(1))


swiglu_backward_SIZES = {"M": 16384, "N": 11008, "K": 4096}
