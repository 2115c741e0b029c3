"""9. A scaled residual with LoRA's delta: tiles that were made elsewhere.

codetta check examples/epilogues/09_lora_residual.py
"""

from codetta import Scalar, Tile, epilogue


# LoRA adds (x @ a.T) @ b.T, a product of small rank, to x @ w.T. It is a GEMM of its own, and an epilogue has one GEMM:
# so the delta comes in as a tile, read where the accumulator is. Two tiles in and one out is three times the bytes of a
# bare GEMM's output; with K = 4096 the next tile's products hide them. A Scalar is one number, read at run time.
@epilogue
def lora_residual(acc: Tile, delta: Tile, residual: Tile, alpha: Scalar, scale: Scalar):
    return dict(y=residual + scale * (acc + alpha * delta))


def lora_residual_reference(acc, delta, residual, alpha, scale):
    return dict(y=residual + scale * (acc + alpha * delta))


lora_residual_SIZES = {"M": 16384, "N": 4096, "K": 4096}
