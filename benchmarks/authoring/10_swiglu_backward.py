"""The backward of SwiGLU, behind the data gradient's GEMM of the down projection.

acc is (M, N): the gradient of y = silu(gate) * up. z is (M, 2 * N), saved: gate on the left, up on the right. dz,
(M, 2 * N), is the gradient of z; y is made again for the weight gradient; inner, (M,), is the inner product of dz
and z of each row.
"""

import torch
import torch.nn.functional as F


def swiglu_backward_reference(acc, z):
    def forward(z):
        gate, up = z.chunk(2, -1)
        return F.silu(gate) * up

    y, pull = torch.func.vjp(forward, z)
    (dz,) = pull(acc)
    return dict(dz=dz, y=y, inner=(dz * z).sum(1))


swiglu_backward_SIZES = {"M": 16384, "N": 11008, "K": 4096}
