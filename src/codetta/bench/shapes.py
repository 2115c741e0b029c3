"""What is measured: a Llama layer's sizes by name, the module between two attentions, the one behind the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from codetta.audit.models import PRESETS, perturb_gains
from codetta.errors import SettingsError

BF16 = torch.bfloat16
EPS = 1e-5
THETA = 500_000.0
LENGTH = 8192  # tokens of a sequence: positions begin again behind it
HEAD_TOKENS = 8192  # of the LM head: its logits alone are 2 GiB then


@dataclass(frozen=True)
class Shape:
    """A Llama's layer and head, and the number of tokens that it is measured with."""

    name: str
    d: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int = 2048
    tokens: int = 16_384

    @property
    def qkv(self) -> tuple[int, int, int]:
        """The columns of q, k and v."""
        return self.heads * self.head, self.kv_heads * self.head, self.kv_heads * self.head


def _llama(name: str, tokens: int) -> Shape:
    p = PRESETS[f"llama3-{name}"]
    return Shape(name, p.hidden, p.ffn, p.heads, p.kv_heads, p.head, p.vocabulary, tokens)


def _paper(d: int, ffn: int) -> Shape:
    return Shape(f"paper-{d}", d, ffn, d // 128, d // 128, 128, 32_768)


SHAPES = {
    s.name: s
    for s in (
        *(_llama(name, tokens) for name, tokens in (("1b", 16_384), ("8b", 16_384), ("70b", 8192))),
        *(_paper(d, ffn) for d, ffn in ((2048, 5632), (4096, 11_008), (8192, 22_016))),
        Shape("tiny", 128, 352, 4, 2, 32, 512, 64),
    )
}
LLAMA = ("1b", "8b", "70b")
PAPER = tuple(name for name in SHAPES if name.startswith("paper"))


def chosen(names: Sequence[str], tokens: int | None = None) -> list[Shape]:
    """The shapes of those names, with another number of tokens if one is given."""
    for name in names:
        if name not in SHAPES:
            raise SettingsError(f"no shape {name!r}", hint=f"there are: {', '.join(SHAPES)}")
    return [replace(SHAPES[n], tokens=tokens or SHAPES[n].tokens) for n in names]


class Norm(nn.Module):
    """RMSNorm as transformers' Llama has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Rounded before the gain."""
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


class Segment(nn.Module):
    """From attention's output y and the stream x to the new stream x2 and the next attention's q, k and v."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.head = s.head
        q, kv, _ = s.qkv
        self.norm1, self.norm2 = Norm(s.d), Norm(s.d)
        self.o, self.down = nn.Linear(q, s.d, bias=False), nn.Linear(s.ffn, s.d, bias=False)
        self.gate, self.up = nn.Linear(s.d, s.ffn, bias=False), nn.Linear(s.d, s.ffn, bias=False)
        self.q, self.k, self.v = (nn.Linear(s.d, n, bias=False) for n in (q, kv, kv))

    def forward(self, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
        """The four results by name."""
        x1 = x + self.o(y)
        h = self.norm1(x1)
        x2 = x1 + self.down(functional.silu(self.gate(h)) * self.up(h))
        h = self.norm2(x2)
        q, k = (rotated(w(h), cos, sin, self.head) for w in (self.q, self.k))
        return {"x2": x2, "q": q, "k": k, "v": self.v(h)}


class Head(nn.Module):
    """The last norm, the LM head, and the mean cross-entropy."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.norm, self.head = Norm(s.d), nn.Linear(s.d, s.vocabulary, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        return functional.cross_entropy(self.head(self.norm(x)).float(), target)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, head: int) -> Tensor:
    """The halves of each head turned, as transformers writes it, in the dtype of x."""
    heads = x.view(*x.shape[:-1], -1, head)
    a, b = heads.chunk(2, -1)
    turned = heads * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
    return turned.flatten(-2)


def initialised(module: nn.Module) -> nn.Module:
    """Weights of standard deviation 0.02, gains not one, in bfloat16."""
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 2:
                p.normal_(std=0.02)
    module = module.to(BF16).train()
    perturb_gains(module, 0)
    return module


def build(kind: type[nn.Module], s: Shape, device: str) -> nn.Module:
    """A segment or a head with its weights drawn."""
    torch.manual_seed(0)
    with torch.device(device):
        module = kind(s)
    return initialised(module)


def rope_tables(tokens: int, head: int, device: str, theta: float = THETA, length: int = LENGTH) -> dict[str, Tensor]:
    """Cosines and sines, one row a token."""
    place = torch.arange(tokens, device=device) % length
    angle = place[:, None] / theta ** (torch.arange(0, head, 2, device=device).double() / head)
    return {n: getattr(torch.cat([angle] * 2, -1), n)().to(BF16) for n in ("cos", "sin")}


def segment_batch(s: Shape, device: str, seed: int = 0) -> dict[str, Tensor]:
    """Random normal inputs of a segment."""
    generator = torch.Generator(device).manual_seed(seed)
    widths = {"y": s.qkv[0], "x": s.d}
    found = {n: torch.randn(s.tokens, w, generator=generator, device=device) for n, w in widths.items()}
    tables = rope_tables(s.tokens, s.head, device)
    return {**{n: t.to(BF16).requires_grad_() for n, t in found.items()}, **tables}


def head_batch(s: Shape, device: str, seed: int = 0) -> dict[str, Tensor]:
    """Random normal inputs of a head, and random targets."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(s.tokens, s.d, generator=generator, device=device).to(BF16).requires_grad_()
    return {"x": x, "target": torch.randint(s.vocabulary, (s.tokens,), generator=generator, device=device)}


def cotangents(outputs: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Random incoming gradients, one an output."""
    first: Any = next(iter(outputs.values()))
    generator = torch.Generator(first.device).manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator, device=t.device).to(t.dtype) for n, t in outputs.items()}
