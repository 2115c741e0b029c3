"""A Llama as Meta wrote it and torchtitan trains it: adjacent columns of a head are a complex number, which turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    theta: float = 500_000.0

    @property
    def head(self) -> int:
        """Columns of a head."""
        return self.hidden // self.heads


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.wq = nn.Linear(sizes.hidden, sizes.heads * sizes.head, bias=False)
        self.wk, self.wv = (nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head, bias=False) for _ in range(2))
        self.wo = nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        q, k, v = (w(x).view(*x.shape[:-1], -1, self.head) for w in (self.wq, self.wk, self.wv))
        q, k, v = (y.transpose(1, 2) for y in (rotate(q, turns), rotate(k, turns), v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.hidden, sizes.ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """A pre-norm layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(sizes.hidden, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        h = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class ComplexLlama(nn.Module):
    """Tokens to the loss of the next ones."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.layers)})
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy over all tokens."""
        turns = turns_of(tokens.shape[1], self.sizes.head, self.sizes.theta, tokens.device)
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, turns)
        logits = self.output(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def turns_of(tokens: int, head: int, theta: float, device: torch.device) -> Tensor:
    """A complex number of length one for each position and pair of columns."""
    frequencies = 1.0 / theta ** (torch.arange(0, head, 2, device=device).float() / head)
    angles = torch.outer(torch.arange(tokens, device=device).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """(batch, tokens, heads, head), each pair of adjacent columns turned."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(-2).type_as(x)
