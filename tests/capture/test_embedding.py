"""Embeddings whose gradient is added in place: which ones, that a step means the same, and that nothing is copied."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from capture.conftest import VOCABULARY, build
from codetta.capture import backend as entry
from codetta.capture.backend import backend
from codetta.nn.embedding import embedding_and_weight
from codetta.testing import relative_error

ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))


class Spliced:
    """Stands for Inductor: keeps the graph it is given, and runs it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs: list[fx.GraphModule] = []
        patch.setattr(entry, "lookup_backend", lambda name: self)

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(gm)
        return aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g))(gm, inputs)

    @property
    def taken(self) -> int:
        """How many embeddings are ours."""
        return sum(n.target is embedding_and_weight for gm in self.graphs for n in gm.graph.nodes)


def gradients(model: nn.Module, run: Any) -> list[Tensor]:
    model.zero_grad()
    run(input_ids=ids, labels=ids).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("logits", ["never", "auto"])
@pytest.mark.parametrize(
    "name, changes, taken",
    [
        ("llama", {"tie_word_embeddings": True}, 1),
        ("llama", {"tie_word_embeddings": False}, 1),
        ("llama", {"tie_word_embeddings": True, "pad_token_id": int(ids[0, 0])}, 1),
        ("gpt2", {}, 2),
    ],
)
def test_gradients(name, changes, taken, logits, monkeypatch):
    """A head in a segment, and one that is a call, tied or not; also where one id has no gradient of the embedding.
    GPT-2's positions are an embedding, too."""
    model = build(name, **changes)
    torch._dynamo.reset()
    inner = Spliced(monkeypatch)
    options = {"inner": "inductor", "logits": logits}
    found = gradients(model, torch.compile(model, backend=partial(backend, options=options)))
    assert inner.taken == taken
    wanted = gradients(model.double(), model)
    assert max(map(relative_error, found, wanted)) < 1e-5


def test_left_alone(monkeypatch):
    """A frozen weight, one that somebody else reads, and inference."""
    inner = Spliced(monkeypatch)

    def run(model: nn.Module, train: bool = True) -> None:
        torch._dynamo.reset()
        with torch.set_grad_enabled(train):
            torch.compile(model, backend=partial(backend, options={"inner": "inductor"}))(input_ids=ids, labels=ids)

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build("llama", tie_word_embeddings=True)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            weight = self.model.model.embed_tokens.weight
            return self.model(input_ids=input_ids, labels=labels).loss + weight.square().mean()

    frozen = build("llama", tie_word_embeddings=True)
    frozen.model.embed_tokens.weight.requires_grad_(False)
    run(frozen)
    run(Penalised())
    run(build("llama", tie_word_embeddings=True), train=False)
    assert len(inner.graphs) == 3
    assert inner.taken == 0


def test_inductor_writes_in_place():
    """What the head's backward made is what the rows are added to, and what comes out: no copy, no zeros. AOTAutograd's
    cache takes the graph, so that another process need not trace it."""
    model = build("llama", tie_word_embeddings=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=partial(backend, options={"inner": "inductor", "logits": "never"}))

    def step() -> None:
        compiled(input_ids=ids, labels=ids).loss.backward()

    counters.clear()
    _, codes = run_and_get_code(step)
    assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
    (line,) = [x.strip() for code in codes for x in code.splitlines() if "codetta.add_rows_.default(" in x]
    into = line.split("(")[1].split(",")[0]
    (code,) = [c for c in codes if line in c]
    assert f"assert_size_stride({into}, ({VOCABULARY}, 64), (64, 1), 'torch.ops.codetta.head_backward.default')" in code
    assert into in code.rsplit("return (", 1)[1]
