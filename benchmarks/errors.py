"""Relative errors against float64 at real sizes: PyTorch eager, Inductor and codetta side by side, per tensor.

Two things are measured at the shapes of Llama-3's 1B and 8B layers, in bfloat16. *segment*: what lies between two
attentions, from attention's output y and the stream x to x2, q, k, v, with random incoming gradients; its errors stand
next to those of CODA's kernels at 2,048 tokens. *model*: two whole layers with attention, the LM head and the loss, of
transformers. The bar is ``codetta verify``'s; float64 is the captured graph with every cast widened.

    python benchmarks/errors.py --out benchmarks/results --parallel
    python benchmarks/errors.py --out /tmp/errors --device cpu --small
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from codetta.audit.runs import Step, compiled_step, eager_step, float64_step, many_compilations
from codetta.bench.shapes import BF16, SHAPES, Segment, Shape, build, initialised, rope_tables, segment_batch
from codetta.testing import Bar, Errors, geometric_mean, mean_ratio, pooled, relative_error

# What cuBLAS wants before PyTorch may be deterministic, which is how the verifier fills fresh memory with NaN.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

WAYS = ("eager", "inductor", "codetta")
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


VOCABULARY = 2048  # of the model's head
LAYERS = tuple(replace(SHAPES[n], name=n.upper(), vocabulary=VOCABULARY) for n in ("1b", "8b"))
TOKENS = (2048, 16_384)
SMALL_LAYERS = (Shape("tiny", 128, 352, 4, 2, 32, 257), Shape("small", 264, 696, 4, 2, 64, 257))
SMALL_TOKENS = (64, 200)
LENGTH = 1024  # tokens of a sequence, so that attention in float64 fits
RESULT = "errors.json"


@dataclass(frozen=True)
class Subject:
    """A module, its inputs for a number of tokens and a seed, and the group that a tensor belongs to."""

    part: str
    sizes: Shape
    module: nn.Module
    batch: Callable[[int, int], dict[str, Any]]
    group: Callable[[str, int], str]


def segment(s: Shape, device: str) -> Subject:
    """The segment, its weights drawn as models initialise them."""

    def batch(tokens: int, seed: int) -> dict[str, Any]:
        inputs = segment_batch(replace(s, tokens=tokens), device, seed)
        return {**inputs, **rope_tables(tokens, s.head, device, theta=1e4, length=tokens)}

    def group(name: str, dim: int) -> str:
        outputs = {"x2": "x2", "q": "q, k", "k": "q, k", "v": "v", "d x": "dx", "d y": "dy"}
        return outputs.get(name) or ("gains" if dim == 1 else "dW")

    return Subject("segment", s, build(Segment, s, device), batch, group)


def model(s: Shape, device: str) -> Subject:
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


# --- measuring --------------------------------------------------------------------------------------------------------


# The error, the tensor's dtype and dimensions, whether it is a scalar, and then its error with a sign.
Measurement = tuple[float, torch.dtype, int, bool, float]


@dataclass(frozen=True)
class Row:
    """One tensor: the error of each way, pooled over the seeds, and why codetta's misses the bar, if it does."""

    name: str
    group: str
    errors: dict[str, float]
    pair: Errors
    problem: str
    signed: dict[str, list[float]]  # of a scalar: its error over the value, seed by seed, which shows a bias


@dataclass(frozen=True)
class Measured:
    """All tensors of one subject at one number of tokens."""

    part: str
    sizes: Shape
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
            for seed in range(seeds):
                batch = subject.batch(count, seed)
                exact = named(oracle(batch, seed))
                for way, step in ways.items():
                    for name, t in named(step(batch, seed)).items():
                        found.setdefault(name, {}).setdefault(way, []).append(measured(t, exact[name]))
                del exact
            yield judged(subject, count, seeds, found, perf_counter() - begin)


def measured(t: Tensor, exact: Tensor) -> Measurement:
    """One tensor beside its exact value."""
    scalar = t.numel() == 1
    signed = float(t.double() / exact.double() - 1) if scalar else 0.0
    return relative_error(t, exact), t.dtype, t.dim(), scalar, signed


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
        _, dtype, dim, scalar, _ = ways["eager"][0]
        errors = {w: [e for e, *_ in ways[w]] for w in WAYS}
        pairs = [Errors(a, b, dtype, scalar) for a, b in zip(errors["codetta"], errors["eager"], strict=True)]
        means = {w: pooled([Errors(e, e, dtype, scalar) for e in errors[w]]).ours for w in WAYS}
        pair = pooled(pairs)
        signed = {w: [m[-1] for m in ways[w]] for w in WAYS} if scalar else {}
        rows.append(Row(name, subject.group(name, dim), means, pair, BAR.why_not(pair) or "", signed))
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
                    {
                        "name": r.name,
                        "group": r.group,
                        **r.errors,
                        "ratio": r.pair.ratio,
                        "ok": not r.problem,
                        "signed": r.signed,
                    }
                    for r in t.rows
                ],
            }
            for t in results
        ],
    }


def side_by_side(given: argparse.Namespace, layers: Sequence[Shape]) -> int:
    """A process for each layer, their results in one file as they come; what each printed, once all are done. Compiling
    takes most of the time, and compilations do not share a process. The largest returned code."""
    workers = []
    for sizes in layers:
        folder = given.out / "parts" / sizes.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).unlink(missing_ok=True)
        command = [sys.executable, *(a for a in sys.argv if a != "--parallel"), "--layers", sizes.name]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen([*command, "--out", str(folder)], stdout=log, stderr=subprocess.STDOUT)
        workers.append((folder, process))
    while True:
        running = any(process.poll() is None for _, process in workers)  # asked first: the last result is not missed
        merge([folder / RESULT for folder, _ in workers], given.out / RESULT)
        if not running:
            break
        sleep(1.0)
    for folder, _ in workers:
        print((folder / "log").read_text())
    return max(process.returncode for _, process in workers)


def merge(parts: Sequence[Path], whole: Path) -> None:
    """The results of several files in one; a file that is not there, or not whole, comes later."""
    found: dict[str, Any] = {}
    for path in parts:
        with suppress(FileNotFoundError, json.JSONDecodeError):
            part = json.loads(path.read_text())
            before = found or {"ok": True, "results": []}
            found = {**part, "ok": before["ok"] and part["ok"], "results": [*before["results"], *part["results"]]}
    if found:
        whole.write_text(json.dumps({**found, "command": sys.argv}, indent=1))


def main() -> int:
    """Run it; 1 if something misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for errors.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="small layers and few tokens, to try the script")
    parser.add_argument("--parts", nargs="+", default=["segment", "model"], choices=("segment", "model"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--layers", nargs="+", choices=[x.name for x in (*LAYERS, *SMALL_LAYERS)], help="of which model"
    )
    parser.add_argument("--tokens", nargs="+", type=int, help="token counts, instead of 2,048 and 16,384")
    parser.add_argument("--parallel", action="store_true", help="each layer in a process of its own")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    console, begin = Console(width=160), perf_counter()
    layers, tokens = (SMALL_LAYERS, SMALL_TOKENS) if given.small else (LAYERS, TOKENS)
    layers = [x for x in layers if given.layers is None or x.name in given.layers]
    if given.parallel:
        return side_by_side(given, layers)
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
                (given.out / RESULT).write_text(json.dumps(to_json(results, given.device), indent=1))
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
