"""What the tests of training features share: models compiled in place, a recipe of training, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from codetta.capture.backend import CapturedGraph, recording
from codetta.testing import relative_error
from ways import counts, forward_plans

VOCABULARY = 128
REGIMES = ("whole", "blocks")
CLOSE = 1e-5  # gradients and losses in float32 that differ by the order of sums; a missing term is off by 1e-3 at least


def tokens(seed: int = 0, shape: tuple[int, int] = (2, 12)) -> Tensor:
    """Random token ids."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def gpt2(dropout: float = 0.1) -> GPT2LMHeadModel:
    """A tiny GPT-2 in training mode, which draws random numbers after the embedding, in attention and in each block."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    config = GPT2Config(
        **sizes, **rates, loss_type="ForCausalLMLoss", use_cache=False, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config).train()


def compile_(model: nn.Module, regime: str = "whole", fullgraph: bool = True, **options: object) -> nn.Module:
    """The same model, compiled in place: as one graph, or each of its blocks alone."""
    torch._dynamo.reset()
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    for module in [model] if regime == "whole" else blocks:
        module.compile(backend="codetta", fullgraph=fullgraph, options=options or None)
    return model


@contextmanager
def gemms_compiled() -> Iterator[list[CapturedGraph]]:
    """Collects what is captured; an error if there was no GEMM in it, since an empty capture agrees with everything."""
    with recording() as found:
        yield found
    assert counts(forward_plans(found))["gemms"] > 0


@dataclass(frozen=True)
class Recipe:
    """How a training run goes: what happens around the model's call is PyTorch's own."""

    steps: int = 3
    micro_batches: int = 1
    clip: float | None = None
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.5)
    set_to_none: bool = True
    autocast: torch.dtype | None = None
    scales: Sequence[float | None] = ()  # GradScaler's scale before each step, None to leave it; no scaler if empty
    first_batch: int = 0


@dataclass
class Trained:
    """What a training run leaves."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(model: nn.Module, recipe: Recipe, optimizer: torch.optim.Optimizer | None = None) -> Trained:
    """Follow the recipe, the same random numbers each time."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or recipe.optimizer(wanted)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=bool(recipe.scales))
    found = Trained()
    torch.manual_seed(7)
    for step in range(recipe.first_batch, recipe.first_batch + recipe.steps):
        if recipe.scales and recipe.scales[step] is not None:
            scaler.update(recipe.scales[step])
        total = 0.0
        for part in range(recipe.micro_batches):
            ids = tokens(step * recipe.micro_batches + part)
            with torch.autocast("cpu", recipe.autocast) if recipe.autocast else nullcontext():
                loss = model(input_ids=ids, labels=ids).loss / recipe.micro_batches
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        if recipe.clip is not None:
            found.norms.append(nn.utils.clip_grad_norm_(wanted, recipe.clip).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        found.losses.append(total)
        found.scales.append(scaler.get_scale())
    found.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def step(model: nn.Module, ids: Tensor | None = None, **more: object) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one ``backward()``, the same random numbers each time."""
    ids = tokens() if ids is None else ids
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**{"input_ids": ids, "labels": ids, **more}).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(
    ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]], bound: float = CLOSE
) -> None:
    """Two steps have the same loss, and the same parameters have the same gradients."""
    torch.testing.assert_close(ours[0].double(), theirs[0].double(), rtol=bound, atol=0.0)
    assert ours[1].keys() == theirs[1].keys()
    far = {n: e for n, g in theirs[1].items() if (e := relative_error(ours[1][n], g)) > bound}
    assert not far
    assert any(g.any() for g in ours[1].values())


def assert_same_training(ours: Trained, theirs: Trained, bound: float = CLOSE) -> None:
    """Two runs have the same losses, norms and scales, and end at the same weights, which have moved."""
    for mine, other in ((ours.losses, theirs.losses), (ours.norms, theirs.norms)):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=bound, atol=0.0)
    assert ours.scales == theirs.scales
    assert len(set(ours.losses)) == len(ours.losses)
    assert ours.weights.keys() == theirs.weights.keys()
    far = {n: e for n, w in theirs.weights.items() if (e := relative_error(ours.weights[n], w)) > bound}
    assert not far
