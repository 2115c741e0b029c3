"""Whole models cut into segments: how many, which inputs and outputs, what is left over, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import LlamaConfig, LlamaForCausalLM

from codetta.capture.normalise import normalise
from codetta.capture.wide import double_precision, widened
from codetta.core.types import Kind
from cutting import Cut, assert_equal, assert_same, compiled, cut_function, cut_graph, gradients, tensors, traced

MODELS = ("llama", "qwen3", "gemma2", "mistral", "phi3", "olmo2", "gpt2", "meta")


def wide_inputs(inputs: list[Any]) -> list[Any]:
    """The inputs of a run in float64, as leaves that ask for gradients where the originals do."""
    found: list[Any] = []
    for x in inputs:
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
            wide = torch.complex128 if x.is_complex() else torch.float64
            found.append(x.detach().to(wide).requires_grad_(x.requires_grad))
        else:
            found.append(x)
    return found


def cut_wide(captured: Any) -> tuple[Cut, list[Any]]:
    """A captured graph, cut in float64, and its inputs."""
    return cut_graph(widened(captured.graph)), wide_inputs(captured.inputs)


def assert_same_in_float64(cut: Cut, inputs: list[Any]) -> None:
    with double_precision():
        assert_same(cut, *inputs, rtol=1e-9, atol=1e-9)


DYNAMIC = ("llama", "gpt2", "meta")


@pytest.mark.parametrize("name, dynamic", [*((n, None) for n in MODELS), *((n, True) for n in DYNAMIC)])
def test_models_in_float64(name: str, dynamic: bool | None, build: Any, capture: Any, tokens: Tensor) -> None:
    captured = capture(build(name), input_ids=tokens, labels=tokens, dynamic=dynamic)
    cut, inputs = cut_wide(captured)
    assert cut.gemms() == {"gpt2": [1, 4, 4], "phi3": [1, 4, 4], "meta": [3, 1]}.get(name, [3, 7, 5])
    assert_same_in_float64(cut, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name, batch", [("llama", 1), ("llama", 2), ("gpt2", 2)])
def test_models_in_their_own_dtype(
    name: str, batch: int, dtype: torch.dtype, build: Any, capture: Any, tokens: Tensor
) -> None:
    captured = capture(build(name).to(dtype), input_ids=tokens[:batch], labels=tokens[:batch])
    cut = cut_graph(captured.graph)
    expected, found = tensors(cut.gm(*captured.inputs)), tensors(cut.run(*captured.inputs))
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a - b).norm() <= 2 * torch.finfo(dtype).eps * b.norm()
    for g, h in zip(gradients(found, captured.inputs), gradients(expected, captured.inputs), strict=True):
        assert (g is None) == (h is None)
        assert g is None or h is None or (g.dtype, g.shape) == (h.dtype, h.shape)


# --- Llama: the exact shape of the program ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_llama_has_a_segment_between_two_attentions(
    layers: int, batch: int, changes: dict[str, Any], build: Any, capture: Any, tokens: Tensor
) -> None:
    model = build("llama", num_hidden_layers=layers, **changes)
    cut = cut_graph(capture(model, input_ids=tokens[:batch], labels=tokens[:batch]).graph)
    assert cut.gemms() == [3, *[7] * (layers - 1), 5]
    assert len(cut.graphs) == min(layers + 1, 3)  # all inner segments are one tensor graph
    assert cut.opaque().count("scaled_dot_product_attention") == layers
    assert cut.opaque().count("embedding") == 1
    assert cut.opaque().count("matmul") == 1  # of the rotation's angles
    assert all(o.reason for o in cut.capture.opaque)


@pytest.fixture(scope="module")
def three_layers() -> Cut:
    """A Llama of three layers, cut."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        use_cache=False,
    )
    found: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(normalise(gm, inputs))
        return gm.forward

    tokens = torch.arange(48).view(2, 24)
    torch._dynamo.reset()
    torch.compile(LlamaForCausalLM(config), backend=keep)(input_ids=tokens, labels=tokens)
    return cut_graph(found[0])


def names(inputs: tuple[Any, ...]) -> list[str]:
    return [str(n.attrs[0]) for n in inputs]


def test_llama_names_read_well(three_layers: Cut) -> None:
    first, inner, last = (three_layers.graph(i) for i in (0, 1, 3))
    assert three_layers.graph(2) == inner
    weights = ["input_layernorm_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
    assert sorted(names(first.inputs)) == sorted([*weights, "x", "cos", "sin"])
    assert [n for n in names(first.inputs) if n in weights] == weights  # as the model reads them
    assert [n for n, _ in first.outputs] == ["q_proj", "k_proj", "v_proj", "x"]
    assert [n for n, _ in inner.outputs] == ["down_proj", "q_proj", "k_proj", "v_proj"]
    assert [n for n, _ in last.outputs] == ["lm_head", "loss"]
    assert {"residual", "x", "target", "lm_head_weight"} <= set(names(last.inputs))
    assert three_layers.capture.segments[1].layers == ("model.layers.0", "model.layers.1")
    assert {o.module for o in three_layers.capture.opaque} >= {"model.embed_tokens", "model.layers.2.self_attn"}


def test_cosines_are_entered_once_for_all_layers(three_layers: Cut) -> None:
    tables = {f.border for s in three_layers.capture.segments for f in s.feeds if f.border.type.kind is Kind.TABLE}
    assert len(tables) == 2


def test_an_activation_that_two_segments_read_is_handed_on(three_layers: Cut) -> None:
    first, second, third, _ = three_layers.capture.segments
    assert first.graph.outputs[3][1] in first.graph.inputs  # the embedding, for the residual of the second
    made_by = {str(n.attrs[0]): f.made_by for n, f in zip(second.graph.inputs, second.feeds, strict=True)}
    assert made_by["residual"] == (0, 3)
    made_by = {str(n.attrs[0]): f.made_by for n, f in zip(third.graph.inputs, third.feeds, strict=True)}
    assert made_by["residual"] == (1, 0)
    embedding = next(n for n in three_layers.spliced.graph.nodes if n.name == "embedding")
    assert len(embedding.users) == 1


def test_one_block_alone_has_two_segments(build: Any, capture: Any, tokens: Tensor) -> None:
    model = build("llama")
    x = torch.randn(2, 24, 64, requires_grad=True)
    positions = torch.arange(24)[None]
    tables = model.model.rotary_emb(x, positions)
    layer = model.model.layers[0]
    captured = capture(layer, x, attention_mask=None, position_ids=positions, position_embeddings=tables)
    cut, inputs = cut_wide(captured)
    assert cut.gemms() == [3, 4]
    assert_same_in_float64(cut, inputs)


def test_checkpointed_layers_are_not_mixed(build: Any, capture: Any, tokens: Tensor) -> None:
    model = build("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    captured = capture(model, input_ids=tokens, labels=tokens)
    cut = cut_graph(captured.graph)
    assert cut.gemms() == [3, 4, 3, 4, 1]
    regions = [s.region.get("ac_graph_id") for s in cut.capture.segments]
    assert regions[0] == regions[1] != regions[2] == regions[3]
    assert regions[4] is None
    calls = [n for n in cut.spliced.graph.nodes if n.target is torch.ops.codetta.segment.default]
    assert [n.meta.get("ac_graph_id") for n in calls] == regions
    cut, inputs = cut_wide(captured)
    assert_same_in_float64(cut, inputs)


# --- other ways to call a model ---------------------------------------------------------------------------------------


def case_no_labels(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens}


def case_positions(tokens: Tensor) -> dict[str, Any]:
    packed = torch.tensor([0, 1, 2, 3, 0, 1, 0, 5, 9, 2]).repeat(2, 3)[:, :24]
    return {"input_ids": tokens, "labels": tokens, "position_ids": packed}


def case_item_count(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens, "labels": tokens, "num_items_in_batch": torch.tensor(40)}


def case_padding(tokens: Tensor) -> dict[str, Any]:
    mask = torch.ones_like(tokens)
    mask[0, 20:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask == 1, tokens, -100)}


def case_one_token(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens[:1, :1]}


def case_two_sequences_of_one_token(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens[:, :1]}


CASES = [case_no_labels, case_positions, case_item_count, case_padding, case_one_token, case_two_sequences_of_one_token]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_ways_to_call_llama(case: Callable[[Tensor], dict[str, Any]], build: Any, capture: Any, tokens: Tensor) -> None:
    cut, inputs = cut_wide(capture(build("llama"), **case(tokens)))
    assert cut.gemms() == [3, 7, 5]
    assert_same_in_float64(cut, inputs)


def test_autocast_casts_weights_inside(build: Any, capture: Any, tokens: Tensor) -> None:
    model = build("llama")

    def under_autocast(**kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**kwargs)

    cut = cut_graph(capture(under_autocast, input_ids=tokens, labels=tokens).graph)
    assert cut.gemms() == [3, 7, 5]
    weights = [f.border for s in cut.capture.segments for f in s.feeds if f.border.dims is None]
    assert {b.type.dtype.name for b in weights} == {"f32"}


def test_without_gradients_nothing_is_threaded_or_asked_for(build: Any, capture: Any, tokens: Tensor) -> None:
    model = build("llama")

    def quiet(**kwargs: Any) -> Any:
        with torch.no_grad():
            return model(**kwargs)

    cut = cut_graph(capture(quiet, input_ids=tokens).graph)
    assert not any(any(s.requires_grad) for s in cut.capture.segments)
    assert [n for n, _ in cut.graph(0).outputs] == ["q_proj", "k_proj", "v_proj"]


def test_frozen_weights_ask_for_no_gradient(build: Any, capture: Any, tokens: Tensor) -> None:
    model = build("llama")
    model.lm_head.weight.requires_grad_(False)
    captured = capture(model, input_ids=tokens, labels=tokens)
    cut, inputs = cut_wide(captured)
    last = cut.capture.segments[-1]
    wanted = dict(zip(names(last.graph.inputs), last.requires_grad, strict=True))
    assert not wanted["lm_head_weight"]
    assert not wanted["target"]
    assert wanted["norm_weight"]
    assert wanted["residual"]
    assert_same_in_float64(cut, inputs)


# --- graphs that are no Llama -----------------------------------------------------------------------------------------


def made(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


class Fused(nn.Module):
    """q, k and v in one projection, heads outermost."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q * 0.5, k, v)
        return self.out(y.transpose(1, 2).reshape(x.shape)) + x


class Bmm(nn.Module):
    """Attention by hand, heads folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, 4, 16).transpose(1, 2).reshape(b * 4, s, 16) for t in self.qkv(x).chunk(3, -1))
        y = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 4, -1), v)
        return self.out(y.view(b, 4, s, 16).transpose(1, 2).reshape(b, s, 64))


class Parallel(nn.Module):
    """Attention and MLP beside each other, both from their own norm of the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.attention, self.up, self.down = Bmm(), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norms[0](x)) + self.down(F.gelu(self.up(self.norms[1](x))))


class Adapted(nn.Module):
    """Low-rank adapters beside a linear, and merged into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x) + 2 * self.b(self.a(x))
        return F.linear(h, self.base.weight + self.b.weight @ self.a.weight)


class Mixed(nn.Module):
    """Many ways to read a projection, and what it is read for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(64, 64), nn.Linear(16, 16), nn.Linear(64, 1)
        self.gain, self.weight = nn.Parameter(torch.rand(4, 1)), nn.Parameter(torch.rand(64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x).unflatten(-1, (4, 16))
        h = h * self.gain + self.b(h)
        h = h - h.mean(-1, keepdim=True) + h.amax(-2, keepdim=True)
        y = h.flatten(2) * (1 + self.weight)
        z = (y * torch.sigmoid(self.gate(y))).sum(-1) + self.gate(x).squeeze(-1)
        return z, (y > 0).sum(), h[:, :, 1:3].relu(), torch.cat([y, x], -1), y.transpose(0, 1), y.detach() * y


class Rows(nn.Module):
    """Tokens that are picked, averaged and turned around between linears; a weight used in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.positions = nn.Linear(64, 64), nn.Linear(64, 64), nn.Parameter(torch.rand(6, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x) + self.positions
        turned = self.b(h[:, torch.arange(5, -1, -1)]) + h
        return turned, self.b(h[:, 0]), self.b(h.mean(1)), h.std(-1), h @ self.b.weight, self.b.weight @ h[0].T


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("module", [Fused, Bmm, Parallel, Adapted, Mixed, Rows], ids=lambda m: m.__name__)
def test_graphs_that_are_no_llama(module: type[nn.Module], dynamic: bool | None, capture: Any) -> None:
    torch.manual_seed(0)
    captured = capture(module(), torch.randn(2, 6, 64, requires_grad=True), dynamic=dynamic)
    cut, inputs = cut_wide(captured)
    assert all(o.reason for o in cut.capture.opaque)
    assert_same_in_float64(cut, inputs)


def test_siblings_that_read_one_outside_tensor_are_one_segment() -> None:
    inputs = (made(2, 3, 8), made(8, 8, seed=1), made(4, 8, seed=2))
    cut = cut_function(lambda x, w, v: (F.linear(x, w), F.linear(x, v)), *inputs)
    assert cut.gemms() == [2]
    assert_same(cut, *inputs)


def test_branches_side_by_side_share_the_segment(capture: Any) -> None:
    torch.manual_seed(0)
    cut = cut_graph(capture(Parallel(), torch.randn(2, 6, 64, requires_grad=True)).graph)
    assert cut.gemms() == [3, 1]


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (0, 3, 8)], ids=str)
def test_no_tokens(shape: tuple[int, ...]) -> None:
    inputs = (made(*shape), made(8, 8, seed=1), made(8, seed=2), made(8, 8, seed=3))

    def fn(x: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        return x + F.linear(F.silu(F.linear(F.rms_norm(x, (8,), g), w)), v)

    cut = cut_function(fn, *inputs)
    assert cut.gemms() == [2]
    assert_same(cut, *inputs)
    assert [g.shape for g in gradients([cut.run(*inputs)], inputs) if g is not None] == [x.shape for x in inputs]


def test_nothing_to_understand() -> None:
    cut = cut_function(lambda x: (x * 2).cos(), made(3, 4))
    assert cut.capture.segments == []
    assert_same(cut, made(3, 4))


# --- memory that changes, random numbers ----------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls, and keeps a running mean, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.seen.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return self.b(h * self.seen) + self.seen


def test_memory_that_changes_is_left_to_pytorch(capture: Any) -> None:
    module = Counting()
    captured = capture(module, torch.randn(2, 6, 64))
    cut = cut_graph(captured.graph)
    assert cut.gemms() == [1, 1]
    results = []
    for run in (cut.gm, cut.run):
        inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in captured.inputs]
        results.append((tensors(run(*inputs)), inputs))
    torch.testing.assert_close(*results)


# --- any graph ------------------------------------------------------------------------------------------------------

Step = Callable[[list[Tensor], Tensor, Tensor], Tensor]

STEPS: dict[str, Step] = {
    "linear": lambda p, x, w: F.linear(x, w),
    "linear and bias": lambda p, x, w: F.linear(x, w, w[0]),
    "product": lambda p, x, w: x @ w.T,
    "rms_norm": lambda p, x, w: F.rms_norm(x, (8,), w[1]),
    "layer_norm": lambda p, x, w: F.layer_norm(x, (8,), w[1], w[2]),
    "by hand": lambda p, x, w: (1 + w[0]) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)),
    "residual": lambda p, x, w: x + p[0],
    "gate": lambda p, x, w: F.silu(x) * p[len(p) // 2],
    "curve": lambda p, x, w: torch.tanh(x) * 1.5 - x / 3,
    "halves": lambda p, x, w: torch.cat([-x[..., 4:], x[..., :4]], -1),
    "heads": lambda p, x, w: (x.view(2, 3, 2, 4) * w[0, :4]).transpose(1, 2).mul(0.5).transpose(1, 2).flatten(2),
    "adjacent": lambda p, x, w: torch.stack([x.view(2, 3, 4, 2)[..., 1], -x.view(2, 3, 4, 2)[..., 0]], -1).flatten(2),
    "row": lambda p, x, w: x * torch.sigmoid(F.linear(x, w[:1])),
    "head norm": lambda p, x, w: F.rms_norm(x.view(2, 3, 2, 4), (4,)).flatten(2),
    "max": lambda p, x, w: x - x.amax(-1, keepdim=True),
    "softmax": lambda p, x, w: x.softmax(-1),
    "shift": lambda p, x, w: torch.roll(x, 1, 1),
    "mean of tokens": lambda p, x, w: x - x.mean(1, keepdim=True),
    "stop": lambda p, x, w: x.detach() * x,
    "table": lambda p, x, w: (x.view(2, 3, 2, 4) * torch.cos(p[0])[:, :, None, :4]).view(2, 3, 8),
}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3)), min_size=2, max_size=12))
def test_any_graph_compiles_and_keeps_its_values(steps: list[tuple[str, int]]) -> None:
    def fn(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        made = [x]
        for (name, back), w in zip(steps, weights, strict=True):
            made.append(STEPS[name](made, made[-1 - min(back, len(made) - 1)], w))
        return made[-1], made[len(made) // 2]

    inputs = (made(2, 3, 8), *(made(8, 8, seed=1 + i) for i in range(len(steps))))
    gm = traced(fn, *inputs)
    assert_equal(compiled(gm), gm, inputs, rtol=1e-8, atol=1e-8)
