"""Relative errors against float64 at real sizes: PyTorch eager, Inductor and codetta side by side, per tensor.

Two things are measured at the shapes of Llama-3's 1B and 8B layers, in bfloat16. *segment*: what lies between two
attentions, from attention's output y and the stream x to x2, q, k, v, with random incoming gradients; its errors stand
next to those of CODA's kernels at 2,048 tokens. *model*: two whole layers with attention, the LM head and the loss, of
transformers. The bar is ``codetta verify``'s; float64 is the captured graph with every cast widened.

    python benchmarks/errors.py --out benchmarks/results
    python benchmarks/errors.py --out /tmp/errors --device cpu --small
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from codetta.audit.models import perturb_gains
from codetta.audit.runs import Step, compiled_step, eager_step, float64_step, many_compilations
from codetta.testing import Bar, Errors, geometric_mean, mean_ratio, pooled, relative_error

# What cuBLAS wants before PyTorch may be deterministic, which is how the verifier fills fresh memory with NaN.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

WAYS = ("eager", "inductor", "codetta")
BF16 = torch.bfloat16
BAR = Bar()
# CODA's kernels on the same segment, d 2048, 2,048 tokens, measured on an H200 as the relative Frobenius error against
# float64, and eager's beside them. Its inputs had other scales than ours: compare how far each is below its eager.
CODA = {
    "x2": "2.5e-3 (3.5e-3)",
    "q, k": "3.0e-3 (4.9e-3)",
    "v": "3.0e-3 (4.2e-3)",
    "dx": "3.5e-3 (4.3e-3)",
    "dy": "3.9e-3 (4.6e-3)",
    "dW": "3.8e-3 to 4.8e-3 (4.6e-3 to 6.2e-3)",
    "gains": "3.2e-3 to 4.5e-3 (4.7e-3 to 6.0e-3)",
}


@dataclass(frozen=True)
class Sizes:
    """A Llama's layer. ``vocabulary`` is that of the model's head."""

    name: str
    d: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int = 2048


LAYERS = (Sizes("1B", 2048, 8192, 32, 8, 64), Sizes("8B", 4096, 14_336, 32, 8, 128))
TOKENS = (2048, 16_384)
SMALL_LAYERS = (Sizes("tiny", 128, 352, 4, 2, 32, 257), Sizes("small", 264, 696, 4, 2, 64, 257))
SMALL_TOKENS = (64, 200)
LENGTH = 1024  # tokens of a sequence, so that attention in float64 fits
LONG_SEEDS = 2  # of the larger token count; a GEMM of 16,384 rows varies little


class Norm(nn.Module):
    """RMSNorm as transformers' Llama has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Segment(nn.Module):
    """From attention's output to the next attention's inputs."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.head = s.head
        q, kv = s.heads * s.head, s.kv_heads * s.head
        self.norm1, self.norm2 = Norm(s.d), Norm(s.d)
        self.o, self.down = nn.Linear(q, s.d, bias=False), nn.Linear(s.ffn, s.d, bias=False)
        self.gate, self.up = nn.Linear(s.d, s.ffn, bias=False), nn.Linear(s.d, s.ffn, bias=False)
        self.q, self.k, self.v = (nn.Linear(s.d, n, bias=False) for n in (q, kv, kv))

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The halves of each head turned."""
        heads = x.view(*x.shape[:-1], -1, self.head)
        a, b = heads.chunk(2, -1)
        turned: Tensor = heads * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
        return turned.flatten(-2)

    def forward(self, y: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Tensor]:
        x1 = x + self.o(y)
        h = self.norm1(x1)
        x2 = x1 + self.down(functional.silu(self.gate(h)) * self.up(h))
        h = self.norm2(x2)
        q, k = self.rotated(self.q(h), cos, sin), self.rotated(self.k(h), cos, sin)
        return {"x2": x2, "q": q, "k": k, "v": self.v(h)}


@dataclass(frozen=True)
class Subject:
    """A module, its inputs for a number of tokens and a seed, and the group that a tensor belongs to."""

    part: str
    sizes: Sizes
    module: nn.Module
    batch: Callable[[int, int], dict[str, Any]]
    group: Callable[[str, int], str]


def segment(s: Sizes, device: str) -> Subject:
    """The segment, its weights drawn as models initialise them."""

    def batch(tokens: int, seed: int) -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        widths = {"y": s.heads * s.head, "x": s.d}
        found = {n: torch.randn(tokens, w, generator=generator, device=device) for n, w in widths.items()}
        angle = torch.arange(tokens, device=device)[:, None] / 1e4 ** (
            torch.arange(0, s.head, 2, device=device).double() / s.head
        )
        tables = {n: getattr(torch.cat([angle] * 2, -1), n)().to(BF16) for n in ("cos", "sin")}
        return {**{n: t.to(BF16).requires_grad_() for n, t in found.items()}, **tables}

    def group(name: str, dim: int) -> str:
        outputs = {"x2": "x2", "q": "q, k", "k": "q, k", "v": "v", "d x": "dx", "d y": "dy"}
        return outputs.get(name) or ("gains" if dim == 1 else "dW")

    torch.manual_seed(0)
    with torch.device(device):
        module = Segment(s)
    return Subject("segment", s, initialised(module), batch, group)


def model(s: Sizes, device: str) -> Subject:
    """Two layers and the LM head of transformers' Llama; the input is the embedding, so that it has a gradient."""
    config = LlamaConfig(
        vocab_size=s.vocabulary,
        hidden_size=s.d,
        intermediate_size=s.ffn,
        num_hidden_layers=2,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )

    def batch(tokens: int, seed: int) -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        length = min(LENGTH, tokens)
        shape = (tokens // length, length)
        x = torch.randn(*shape, s.d, generator=generator, device=device).to(BF16).requires_grad_()
        return {"inputs_embeds": x, "labels": torch.randint(s.vocabulary, shape, generator=generator, device=device)}

    def group(name: str, dim: int) -> str:
        return {"loss": "loss", "logits": "logits", "d inputs_embeds": "dx"}.get(name) or (
            "gains" if dim == 1 else "dW"
        )

    torch.manual_seed(0)
    with torch.device(device):
        whole = LlamaForCausalLM(config)
    whole.model.embed_tokens.requires_grad_(False)
    return Subject("model", s, initialised(whole), batch, group)


def initialised(module: nn.Module) -> nn.Module:
    """Weights of standard deviation 0.02, gains not one, in bfloat16."""
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 2:
                p.normal_(std=0.02)
    module = module.to(BF16).train()
    perturb_gains(module, 0)
    return module


# --- measuring --------------------------------------------------------------------------------------------------------


Measurement = tuple[
    float, torch.dtype, int, bool
]  # the error, the tensor's dtype and dimensions, whether it is a scalar


@dataclass(frozen=True)
class Row:
    """One tensor: the error of each way, pooled over the seeds, and why codetta's misses the bar, if it does."""

    name: str
    group: str
    errors: dict[str, float]
    pair: Errors
    problem: str


@dataclass(frozen=True)
class Measured:
    """All tensors of one subject at one number of tokens."""

    part: str
    sizes: Sizes
    tokens: int
    seeds: int
    rows: tuple[Row, ...]
    problem: str
    seconds: float

    @property
    def problems(self) -> list[str]:
        """What misses the bar."""
        return [*(f"{r.name}: {r.problem}" for r in self.rows if r.problem), *([self.problem] if self.problem else [])]

    @property
    def title(self) -> str:
        """The heading."""
        return f"{self.part}, {self.sizes.name} layer (d {self.sizes.d}), {self.tokens:,} tokens, {self.seeds} seeds"

    def groups(self) -> dict[str, dict[str, float]]:
        """The geometric mean of each group's errors, by way."""
        names = dict.fromkeys(r.group for r in self.rows)
        return {g: {w: geometric_mean(r.errors[w] for r in self.rows if r.group == g) for w in WAYS} for g in names}


def measure(subject: Subject, tokens: Sequence[int], seeds: int) -> Iterator[Measured]:
    """The errors of all three ways, for each number of tokens. Every way is compiled once."""
    module = subject.module
    kernels = "hopper" if next(module.parameters()).is_cuda else "auto"  # an error where there are none
    with many_compilations():
        inductor: Any = torch.compile(module, dynamic=True)
        ours, oracle = compiled_step(module, {"kernels": kernels}), float64_step(module)
        ways: dict[str, Callable[[Mapping[str, Any], int], Step]] = {
            "eager": lambda batch, seed: eager_step(module, batch, seed),
            "inductor": lambda batch, seed: eager_step(inductor, batch, seed),
            "codetta": ours,
        }
        for count in tokens:
            begin = perf_counter()
            found: dict[str, dict[str, list[Measurement]]] = {}
            chosen = seeds if count == tokens[0] else min(seeds, LONG_SEEDS)
            for seed in range(chosen):
                batch = subject.batch(count, seed)
                exact = named(oracle(batch, seed))
                for way, step in ways.items():
                    for name, t in named(step(batch, seed)).items():
                        error = relative_error(t, exact[name]), t.dtype, t.dim(), t.numel() == 1
                        found.setdefault(name, {}).setdefault(way, []).append(error)
                del exact
            yield judged(subject, count, chosen, found, perf_counter() - begin)


def named(step: Step) -> dict[str, Tensor]:
    """Outputs and gradients by one name each; a compiled module calls its parameters by a longer one."""
    gradients = {n.removeprefix("_orig_mod."): g for n, g in step.gradients.items() if g is not None}
    return {**step.outputs, **{f"d {n}": g for n, g in gradients.items()}}


def judged(
    subject: Subject, tokens: int, seeds: int, found: Mapping[str, Mapping[str, Sequence[Measurement]]], seconds: float
) -> Measured:
    """Pooled, grouped, and held against the bar."""
    rows = []
    for name, ways in found.items():
        _, dtype, dim, scalar = ways["eager"][0]
        errors = {w: [e for e, *_ in ways[w]] for w in WAYS}
        pairs = [Errors(a, b, dtype, scalar) for a, b in zip(errors["codetta"], errors["eager"], strict=True)]
        means = {w: pooled([Errors(e, e, dtype, scalar) for e in errors[w]]).ours for w in WAYS}
        pair = pooled(pairs)
        rows.append(Row(name, subject.group(name, dim), means, pair, BAR.why_not(pair) or ""))
    together = BAR.why_not_all(r.pair for r in rows) or ""
    return Measured(subject.part, subject.sizes, tokens, seeds, tuple(rows), together, seconds)


# --- telling ----------------------------------------------------------------------------------------------------------


def per_tensor(found: Measured) -> Table:
    """A row a tensor."""
    table = Table(
        "tensor", *WAYS, "codetta/eager", "", title=found.title, title_justify="left", box=None, pad_edge=False
    )
    for r in found.rows:
        state = "[red]misses the bar[/red]" if r.problem else "[green]ok[/green]"
        table.add_row(r.name, *(f"{r.errors[w]:.2e}" for w in WAYS), f"{r.pair.ratio:.3f}", state)
    table.add_row(
        "geometric mean of ratios", "", "", "", f"{mean_ratio(r.pair for r in found.rows):.3f}", found.problem
    )
    return table


def per_group(results: Sequence[Measured]) -> Table:
    """A row a group of tensors, next to CODA's."""
    table = Table("", "group", *WAYS, "CODA, 2,048 tokens (its eager)", box=None, pad_edge=False)
    for found in results:
        for i, (group, errors) in enumerate(found.groups().items()):
            coda = CODA.get(group, "") if found.part == "segment" else ""
            table.add_row("" if i else found.title, group, *(f"{errors[w]:.2e}" for w in WAYS), coda)
    return table


def to_json(results: Sequence[Measured], device: str) -> dict[str, Any]:
    """Everything that was measured, with what it ran on."""
    return {
        "ok": not any(t.problems for t in results),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "command": sys.argv,
        "bar": {"factor": BAR.factor, "units": BAR.units, "mean": BAR.mean, "scalar_factor": BAR.scalar_factor},
        "coda_at_2048_tokens": CODA,
        "results": [
            {
                "part": t.part,
                "layer": t.sizes.name,
                "d": t.sizes.d,
                "tokens": t.tokens,
                "seeds": t.seeds,
                "seconds": t.seconds,
                "problems": t.problems,
                "geometric_mean": mean_ratio(r.pair for r in t.rows),
                "groups": t.groups(),
                "tensors": [
                    {"name": r.name, "group": r.group, **r.errors, "ratio": r.pair.ratio, "ok": not r.problem}
                    for r in t.rows
                ],
            }
            for t in results
        ],
    }


def main() -> int:
    """Run it; 1 if something misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for errors.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="small layers and few tokens, to try the script")
    parser.add_argument("--parts", nargs="+", default=["segment", "model"], choices=("segment", "model"))
    parser.add_argument("--seeds", type=int, default=5, help=f"of the larger token count {LONG_SEEDS} at most")
    parser.add_argument("--layers", nargs="+", default=["1B", "8B"], choices=("1B", "8B"), help="of which model")
    parser.add_argument("--tokens", nargs="+", type=int, help="token counts, instead of 2,048 and 16,384")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    console, begin = Console(width=160), perf_counter()
    layers, tokens = (SMALL_LAYERS, SMALL_TOKENS) if given.small else (LAYERS, TOKENS)
    layers = layers if given.small else [x for x in layers if x.name in given.layers]
    tokens = given.tokens or tokens
    builders = {"segment": segment, "model": model}
    given.out.mkdir(parents=True, exist_ok=True)
    results = []
    for part in given.parts:
        for sizes in layers:
            torch._dynamo.reset()
            for found in measure(builders[part](sizes, given.device), tokens, given.seeds):
                results.append(found)
                console.print(per_tensor(found), f"{found.seconds:.0f} s\n")
                (given.out / "errors.json").write_text(json.dumps(to_json(results, given.device), indent=1))
            gc.collect()
            if given.device == "cuda":
                torch.cuda.empty_cache()
    console.print(per_group(results), "", f"{perf_counter() - begin:.0f} s in all")
    for found in results:
        for problem in found.problems:
            console.print(f"[red]{found.title}: {problem}[/red]")
    return 0 if not any(t.problems for t in results) else 1


if __name__ == "__main__":
    sys.exit(main())
