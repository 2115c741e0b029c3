"""The normalised graph computes what Dynamo's graph computes, and says everything in plain ATen operators."""

import functools
import logging
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from codetta.capture.normalise import (
    ignore_warning_loggers,
    is_parameter,
    normalise,
    placeholder_name,
    readable_source,
)
from codetta.errors import CaptureError

aten = torch.ops.aten


class Shadow(Interpreter):
    """Runs a graph on real tensors and compares each value with what ``meta["val"]`` promises."""

    def run_node(self, n):
        value = super().run_node(n)
        if isinstance(value, Tensor):
            promised = n.meta["val"]
            assert (value.dtype, value.requires_grad) == (promised.dtype, promised.requires_grad), n.format_node()
            assert value.shape == promised.shape, n.format_node()
            assert value.stride() == promised.stride(), n.format_node()
        return value


CASES = [
    ("llama", "float32", None),
    ("llama", "float32", True),
    ("llama", "bfloat16", None),
    ("llama", "autocast", True),
    ("llama", "checkpoint", None),
    ("qwen3", "checkpoint+autocast", None),
    ("gemma2", "autocast", None),
    ("mistral", "bfloat16", None),
    ("gpt2", "float32", None),
    ("gpt2", "autocast", None),
    ("phi3", "bfloat16", None),
    ("olmo2", "bfloat16", None),
    ("meta", "float32", True),
    ("meta", "bfloat16", None),
    ("meta", "autocast", None),
]


@pytest.mark.parametrize("name, mode, dynamic", CASES)
def test_model_is_unchanged(name, mode, dynamic, build, tokens, capture):
    model = build(name)
    if "bfloat16" in mode:
        model = model.bfloat16()
    if "checkpoint" in mode:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in mode):
        captured = capture(model, input_ids=tokens, labels=tokens, dynamic=dynamic)
    captured.assert_explicit()
    captured.assert_same_as_dynamo(autocast="autocast" in mode)
    if dynamic is None:
        with torch.autocast("cpu", enabled=False):
            Shadow(captured.graph).run(*captured.inputs)


def test_model_equals_eager(build, tokens, capture):
    model = build("llama")
    captured = capture(model, input_ids=tokens, labels=tokens)
    outputs = captured.graph(*captured.inputs)
    names = [placeholder_name(n) for n in captured.graph.graph.nodes if n.op == "placeholder"]
    gradients = torch.autograd.grad(outputs[0], [x for x in captured.inputs if x.requires_grad])
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.testing.assert_close(outputs[0], loss)
    parameters = dict(model.named_parameters())
    trained = [n for n, x in zip(names, captured.inputs, strict=True) if x.requires_grad]
    assert set(trained) == parameters.keys()
    for name, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(gradient, parameters[name].grad, rtol=1e-5, atol=1e-6)


def test_llama_consists_of_whole_operators(build, tokens, capture):
    captured = capture(build("llama").bfloat16(), input_ids=tokens, labels=tokens)
    count = Counter(captured.ops())
    assert count["aten.linear.default"] == 15
    assert count["aten.scaled_dot_product_attention.default"] == 2
    assert count["aten.silu.default"] == 2
    assert count["aten.rsqrt.default"] == 5
    assert count["aten.cross_entropy_loss.default"] == 1
    assert count["aten.to.dtype"] == 15  # two a norm; cos, sin, both sides of their angles; the loss
    assert not {"aten.alias.default", "aten.to.dtype_layout", "aten.type_as.default", "aten.detach.default"} & {*count}


def test_names_and_parameters(build, tokens, capture):
    captured = capture(build("llama"), input_ids=tokens, labels=tokens, dynamic=True)
    placeholders = [n for n in captured.graph.graph.nodes if n.op == "placeholder"]
    before = [n for n in captured.dynamo[0].graph.nodes if n.op == "placeholder"]
    assert [n.name for n in placeholders] == [n.name for n in before]
    assert [placeholder_name(n) for n in placeholders] == [placeholder_name(n) for n in before]
    names = {placeholder_name(n): is_parameter(n) for n in placeholders}
    assert names["model.layers.1.self_attn.q_proj.weight"]
    assert names["model.rotary_emb.inv_freq"]
    assert not names["input_ids"]
    linear = next(n for n in captured.graph.graph.nodes if n.target is aten.linear.default)
    assert "q_proj" in linear.meta["stack_trace"]
    assert any("layers" in path for path, _ in linear.meta["nn_module_stack"].values())


@pytest.mark.parametrize(
    "source, name",
    [
        ("L['self']._modules['model']._modules['layers']._modules['0']._parameters['weight']", "model.layers.0.weight"),
        ("L['input_ids']", "input_ids"),
        ("L['kwargs']['labels']", "labels"),
        ("L['batch'][1]", "batch.1"),
        ("G['net']._modules['0'].weight", "net.0.weight"),
        ("L['input_ids'].size()[1]", "input_ids.size()[1]"),
        ("something else", "something else"),
    ],
)
def test_readable_source(source, name):
    assert readable_source(source) == name


def test_checkpointed_bodies_are_inlined_and_tagged(build, tokens, capture):
    model = build("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    captured = capture(model, input_ids=tokens, labels=tokens)
    tagged = [n for n in captured.graph.graph.nodes if "ac_graph_id" in n.meta]
    regions = Counter(n.meta["ac_graph_id"] for n in tagged)
    assert len(regions) == 2
    assert len(set(regions.values())) == 1
    assert {n.meta["recompute"] for n in tagged} == {CheckpointPolicy.PREFER_RECOMPUTE}
    assert Counter(str(n.target) for n in tagged)["aten.linear.default"] == 14


def test_selective_checkpointing_keeps_its_policy(operands, capture):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def f(x, w):
        def body(x):
            return functional.linear(functional.linear(x, w).relu(), w).sigmoid()

        return checkpoint(body, x, use_reentrant=False, context_fn=contexts)

    captured = capture(f, *operands)
    saved = [n.name for n in captured.graph.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    assert saved == ["linear", "linear_1"]


def test_fake_inputs(operands, capture):
    captured = capture(lambda x, w: x @ w + 1, *operands)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in captured.inputs]
    graph = normalise(captured.dynamo[0], fakes)
    assert torch.equal(graph(*captured.inputs)[0], operands[0] @ operands[1] + 1)


def test_parameters_on_the_meta_device(build, capture):
    with torch.device("meta"):
        model = build("llama").bfloat16()
        tokens = torch.zeros(2, 24, dtype=torch.long)
    captured = capture(model, input_ids=tokens, labels=tokens)
    assert Counter(captured.ops())["aten.linear.default"] == 15
    loss, logits = (n.meta["val"] for n in captured.graph.graph.output_node().args[0])
    assert (loss.shape, logits.shape) == ((), (2, 24, 256))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).relu()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_one_graph_for_all_layers():
    torch._dynamo.reset()
    seen = []

    def backend(gm, example_inputs):
        seen.append(normalise(gm, example_inputs))
        return seen[-1]

    layers = [Layer() for _ in range(3)]
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)
    x = h = torch.randn(4, 8, requires_grad=True)
    for layer in layers:
        x, h = layer(x), layer.forward(h)
    assert torch.equal(x, h)
    assert len(seen) == 1


def test_what_cannot_be_traced_is_told():
    gm = torch.fx.symbolic_trace(lambda x: x.view(3, 3))
    with pytest.raises(CaptureError, match="could not be traced"):
        normalise(gm, [torch.zeros(4)])


def test_warnings_of_transformers_do_not_break_the_graph(monkeypatch):
    monkeypatch.setattr(logging.Logger, "warning_once", print, raising=False)
    with torch._dynamo.config.patch(ignore_logging_functions=set()):
        ignore_warning_loggers()
        assert print in torch._dynamo.config.ignore_logging_functions
    assert print not in torch._dynamo.config.ignore_logging_functions
