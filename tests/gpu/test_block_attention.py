"""Windows and packed documents through torch.compile: attention in blocks, as Inductor compiles it, next to float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from codetta.capture import mask
from codetta.capture.backend import CapturedGraph, recording
from codetta.testing import relative_error
from target import DEVICE, STANDIN
from ways import compiled, whole_model_agrees

SIZES = {
    "hidden_size": 264,
    "intermediate_size": 696,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1001,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 100
NOW = "now block attention (flex), enable_gqa=True"

# Dynamo looks at the gradient of what goes into a block, and PyTorch warns it
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def inner(monkeypatch: pytest.MonkeyPatch) -> str:
    """Who compiles the graph: Inductor; on the stand-in AOTAutograd alone, told that it can."""
    if STANDIN:
        monkeypatch.setattr(mask, "why_not_on", lambda device, inner: None)
    return "aot_eager" if STANDIN else "inductor"


def model(kind: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Two layers, gains random: Llama, or Mistral with a window shorter than the text."""
    torch.manual_seed(0)
    made: nn.Module
    if kind == "mistral":
        made = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))
    else:
        made = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() == 1:
                p.uniform_(0.5, 1.5)
    return made.train().to(DEVICE, dtype)


def batch(length: int, seed: int = 0) -> dict[str, Tensor]:
    """Two sequences, and labels of which some are ignored."""
    ids = torch.randint(0, 1001, (2, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    labels = ids.clone()
    labels[:, ::5] = -100
    return {"input_ids": ids, "labels": labels}


def packed(length: int) -> dict[str, Tensor]:
    """Positions that start again, elsewhere in each sequence: also inside of a block, and not at all for a while."""
    starts = torch.zeros(2, length, dtype=torch.long)
    for row, places in enumerate(([37, 38, 150], [256])):
        starts[row, places] = torch.tensor(places)
    positions = torch.arange(length) - starts.cummax(1).values
    return {"position_ids": positions.to(DEVICE)}


def told(found: list[CapturedGraph]) -> set[str]:
    """What was proven of the masks, and what was made of the calls."""
    return {line.split(": ")[1] for g in found for line in g.attention}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_window(dtype: torch.dtype, inner: str):
    """A window shorter than the text, and a text that is no multiple of a block."""
    with recording() as found:
        whole_model_agrees(model("mistral", dtype), batch(333), inner=inner, attention="sdpa")
    assert told(found) == {f"causal + window {WINDOW}; {NOW}"}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_documents(kind: str, inner: str):
    """Packed documents, other ones in each sequence; with a window, too."""
    with recording() as found:
        whole_model_agrees(model(kind), {**batch(300), **packed(300)}, inner=inner, attention="sdpa")
    window = f" + window {WINDOW}" if kind == "mistral" else ""
    assert told(found) == {f"causal{window} + same document (cumsum); {NOW}"}


def test_lengths_that_vary(inner: str):
    """A graph for one length attends in blocks; the one for all lengths keeps its mask. Both are as near to eager as
    bfloat16 allows."""
    eager = model("mistral")
    ours = compiled(eager, inner=inner, attention="sdpa")
    with recording() as found:
        for length in (300, 411, 512, 1100):
            given = {**batch(length, seed=length), **packed(length)}
            loss, gradients = step(ours, eager, given)
            expected, theirs = step(eager, eager, given)
            assert abs(loss - expected) <= 2**-7 * abs(expected)
            assert all(relative_error(a, b) < 0.05 for a, b in zip(gradients, theirs, strict=True))
    said = f"causal + window {WINDOW} + same document (cumsum); "
    assert told(found) == {said + NOW, said + "left alone"}
    assert len(found) <= 3  # AOTAutograd asks for the second one twice


def step(call, owner: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    loss = call(**given).loss
    return loss.detach(), torch.autograd.grad(loss, list(owner.parameters()))
