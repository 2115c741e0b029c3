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
FORBIDDEN = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "tag_activation_checkpoint", "inference_mode")


def run(gm, inputs):
    """Outputs of ``gm`` and the gradients of the sum of their squares, on fresh copies of the inputs."""
    fresh = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    torch.manual_seed(3)
    outputs = gm(*fresh)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum(y.float().square().sum() for y in outputs if isinstance(y, Tensor) and y.requires_grad)
    if isinstance(total, Tensor):
        total.backward()
    return outputs, [x.grad if isinstance(x, Tensor) else None for x in fresh], fresh


def same(a, b):
    if not isinstance(a, Tensor):
        return a == b
    return isinstance(b, Tensor) and a.dtype == b.dtype and a.requires_grad == b.requires_grad and torch.equal(a, b)


def assert_same_as_dynamo(captured, autocast=False):
    """Bit for bit: outputs, gradients, and inputs that the graph writes to."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = run(captured.dynamo[-1], captured.inputs)
    assert_same(run(captured.graph, captured.inputs), expected)


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert [same(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(theirs)
    assert any(g is not None and g.abs().sum() > 0 for g in expected[1])


def assert_explicit(captured):
    """No node depends on a mode or has another effect than its value."""
    for node in captured.graph.graph.nodes:
        assert node.op in ("placeholder", "get_attr", "call_function", "output")
        assert not any(word in str(node.target) for word in FORBIDDEN), node.target


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
    assert_explicit(captured)
    assert_same_as_dynamo(captured, autocast="autocast" in mode)
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


# Functions of (x, w), both (4, 8) and (8, 8) and requiring gradients.


def no_grad_statistics(x, w):
    with torch.no_grad():
        scale = x.square().mean(-1, keepdim=True)
        view = x.view(-1)
    return (x * scale) @ w + view[:8], scale


def inference_inside(x, w):
    with torch.inference_mode():
        scale = x * 2
    return (x @ w) * scale.sum(), scale


def grad_inside_no_grad(x, w):
    with torch.no_grad():
        frozen = x @ w
        with torch.enable_grad():
            trained = x @ w
    return frozen, trained


def in_place(x, w):
    h = x @ w
    h.add_(1)
    h.mul_(x)
    return h.view(2, 16).relu_() * 2


def in_place_narrow(x, w):
    h = (x @ w).bfloat16()
    h.add_(x)
    return h * 2


def in_place_seen_by_a_view(x, w):
    h = x @ w
    view = h[:, :4]
    h.mul_(2)
    return h, view + 1


def in_place_through_a_view(x, w):
    h = x @ w
    h[:, ::2] = x[:, ::2]
    before = h + 1
    h[0].zero_()
    return h, before


def in_place_on_detached(x, w):
    h = x @ w
    with torch.no_grad():
        h.detach().clone().mul_(2)
    return h * h


def custom_backward(x, w):
    return StraightThrough.apply(x @ w) * 2


def einsum_under_autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.einsum("ij,jk->ik", x, w), functional.softmax(x @ w, -1), torch.cat([x, x @ w])


def aliases(x, w):
    return x, x.view(4, 8), x.clone(), w.t().t(), x[:], (x * 2).clone(), x.contiguous() + 1


def constants(x, w):
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0]).unsqueeze(1), functional.dropout(x, 0.3), x + torch.arange(8.0)


def nested_region(x, w):
    return region(region(x, w), w)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).relu()


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g * 3


@torch.compiler.nested_compile_region
def region(x, w):
    return (x @ w).relu()


FUNCTIONS = [
    no_grad_statistics,
    inference_inside,
    grad_inside_no_grad,
    in_place,
    in_place_narrow,
    in_place_seen_by_a_view,
    in_place_through_a_view,
    in_place_on_detached,
    custom_backward,
    einsum_under_autocast,
    aliases,
    constants,
    nested_region,
]


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(n, 8, generator=generator).requires_grad_() for n in (4, 8)]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_function_is_unchanged(f, dynamic, operands, capture):
    captured = capture(f, *operands, dynamic=dynamic)
    assert_explicit(captured)
    assert_same(run(captured.compiled, operands), run(f, operands))


def test_function_is_unchanged_without_gradients(operands, capture):
    with torch.no_grad():
        captured = capture(no_grad_statistics, *operands)
    assert "aten.detach.default" not in captured.ops()
    with torch.no_grad():
        assert torch.equal(captured.graph(*captured.inputs)[0], no_grad_statistics(*operands)[0])


def test_gradients_switched_on_inside_a_graph_without_are_refused(operands, capture):
    with torch.no_grad(), pytest.raises(Exception, match="gradients are switched on") as caught:
        capture(grad_inside_no_grad, *operands)
    assert "CaptureError" in str(caught.value)


def test_hidden_mutation_is_refused(operands, capture):
    def f(x, w):
        h = x @ w
        with torch.no_grad():
            h.mul_(2)
        return h * h

    with pytest.raises(Exception, match="writes under no_grad"):
        capture(f, *operands)


def test_private_in_place_becomes_pure_and_the_rest_is_pinned(operands, capture):
    captured = capture(in_place, *operands)
    assert captured.ops()[:3] == ["aten.matmul.default", "aten.add.Tensor", "aten.mul.Tensor"]
    assert not any(n.meta.get("codetta_pinned") for n in captured.graph.graph.nodes)
    torch._dynamo.reset()
    captured = capture(in_place_seen_by_a_view, *operands)
    pinned = [str(n.target) for n in captured.graph.graph.nodes if n.meta.get("codetta_pinned")]
    assert pinned == ["aten.matmul.default", "aten.slice.Tensor", "aten.mul_.Tensor", "aten.add.Tensor"]


def test_input_mutation_stays(operands, capture):
    def f(x, w, count):
        count.add_(1)
        return x @ w * count

    count = torch.zeros(1)
    captured = capture(f, *operands, count)
    assert "aten.add_.Tensor" in captured.ops()
    assert count == 1
    assert_same_as_dynamo(captured)


def test_casts_of_weights_are_shared_and_those_of_activations_are_not(operands, capture):
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            h = x.sin()
            return functional.linear(h, w) + functional.linear(h, w)

    captured = capture(f, *operands)
    casts = [n.args[0].name for n in captured.graph.graph.nodes if n.target is aten.to.dtype]
    assert casts == ["l_w_", "sin", "sin"]
    assert_same_as_dynamo(captured)


def test_identities_are_peeled(operands, capture):
    def f(x, w):
        h = (x @ w).to(torch.float32).contiguous()
        h = functional.dropout(h, 0.0, training=True)
        h = functional.dropout(h, 0.5, training=False)
        h = torch.cat([h, h[:, 8:]], -1).clone()
        h = h[:, 0:].expand(4, 8).view(4, 8).type_as(w)
        return h * h.bfloat16()

    captured = capture(f, *operands)
    assert captured.ops() == ["aten.matmul.default", "aten.to.dtype", "aten.mul.Tensor"]
    assert_same_as_dynamo(captured)


def test_full_slices_are_peeled_when_the_size_is_symbolic(operands, capture):
    captured = capture(lambda x, w: x[:, 0:][0:] @ w, *operands, dynamic=True)
    assert captured.ops() == ["aten.matmul.default"]


def test_a_clone_that_the_caller_sees_is_a_clone(operands, capture):
    captured = capture(lambda x, w: (x.clone(), w * 2), *operands)
    assert captured.ops() == ["aten.clone.default", "aten.mul.Tensor"]


@pytest.mark.parametrize("dynamic", [None, True])
def test_python_floats_are_constants_with_a_guard(dynamic, operands):
    torch._dynamo.reset()
    seen = []

    def backend(gm, example_inputs):
        seen.append(normalise(gm, example_inputs))
        return seen[-1]

    f = torch.compile(lambda x, factor: x * factor, backend=backend, dynamic=dynamic, fullgraph=True)
    x = operands[0]
    for factor in (2.5, 3.5, 2.5):
        assert torch.equal(f(x, factor), x * factor)
    constants = [n.args[1] for gm in seen for n in gm.graph.nodes if n.op == "call_function"]
    assert constants == [2.5, 3.5]


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
    functions: set[object] = set()
    monkeypatch.setattr(torch._dynamo.config, "ignore_logging_functions", functions)
    monkeypatch.setattr(logging.Logger, "warning_once", print, raising=False)
    ignore_warning_loggers()
    assert print in functions
