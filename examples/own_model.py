"""A block that is no Llama: LayerNorm with biases, a GELU, attention and MLP side by side. Nothing is registered.

cd examples
codetta explain own_model:build --layers 3
codetta verify own_model:build
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = self.out(y.transpose(1, 2).flatten(2))
        return x + attended + self.down(functional.gelu(self.up(h), approximate="tanh"))


class Regressor(nn.Module):
    """Blocks, and a loss of its own."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ParallelBlock(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.head(self.blocks(x)), target)


def build(layers: int = 2, tokens: int = 64, batch: int = 2) -> tuple[nn.Module, dict[str, Tensor]]:
    """What codetta's commands ask of a callable: a model, and the keyword arguments of one call."""
    width = 64
    shape = (batch, tokens // batch)
    return Regressor(layers, width, heads=4), {"x": torch.randn(*shape, width), "target": torch.randn(*shape, 16)}
