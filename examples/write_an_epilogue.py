"""Write what follows a GEMM by hand, run it, and let codetta derive its backward programs.

python examples/write_an_epilogue.py
"""

from typing import Annotated

import torch

from codetta import RowVec, Tile, epilogue, halves, silu, sum_row


@epilogue
def swiglu(acc: Annotated[Tile, "2*N"]):
    gate, up = halves(acc)
    return dict(y=silu(gate) * up)


@epilogue
def residual_rms(acc: Tile, residual: Tile, gain: RowVec):
    x = acc + residual
    return dict(x=x, h=x * gain, ssq=sum_row(x * x))


def main() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 8), torch.randn(6, 8)  # x @ w.T: 5 rows, 2 * 3 columns
    y = swiglu.run(x, w)["y"]
    gate, up = (x @ w.T).chunk(2, -1)
    print("as PyTorch computes it:", torch.allclose(y, torch.nn.functional.silu(gate) * up, atol=1e-6))
    print(swiglu)
    print("# its backward:\n")
    print(swiglu.vjp())
    print("# the backward of residual_rms, with the gradient of h from the next GEMM:\n")
    print(residual_rms.vjp("h"))


if __name__ == "__main__":
    main()
