"""The oracle is float64 throughout: it agrees with PyTorch in float64, and a narrow cast left in it would show."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter
from torch.nn import functional

from codetta.capture.normalise import placeholder_name
from codetta.capture.oracle import float64_gradients, float64_run, widen
from codetta.errors import CaptureError

EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Narrow(Interpreter):
    """Collects the nodes of a graph whose value is a narrow float."""

    def __init__(self, gm):
        super().__init__(gm)
        self.found = []

    def run_node(self, n):
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
            self.found.append(n.name)
        return value


class Block(nn.Module):
    """A norm, a SwiGLU and a loss, with the narrow casts that real models make, each in another spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(16) + 0.5)
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16)
        self.register_buffer("scale", torch.rand(16))

    def forward(self, x: Tensor, labels: Tensor, wide: bool = False) -> tuple[Tensor, Tensor]:
        narrow = torch.float64 if wide else torch.float32
        short = torch.float64 if wide else torch.bfloat16
        h = x.to(narrow)
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True, dtype=narrow) + 1e-5)).type_as(x) * self.gain
        angles = torch.arange(16, dtype=narrow, device=x.device) / torch.full((16,), 3.0, dtype=narrow)
        h = h * angles.to(short) * self.scale + (torch.arange(16) / 7).to(short)
        y = functional.silu(self.gate(h)) * self.up(h)
        logits = (x + self.down(y)).to(narrow)
        weights = torch.softmax(logits, -1, dtype=narrow)
        return functional.cross_entropy(logits, labels) + (weights * weights).sum(), logits


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(6, 16, generator=generator), torch.randint(0, 16, (6,), generator=generator)


@pytest.fixture
def block():
    torch.manual_seed(5)
    return Block()


def test_equals_pytorch_in_float64(block, batch, capture):
    captured = capture(block.bfloat16(), batch[0].bfloat16(), batch[1])
    outputs, gradients = float64_gradients(captured.graph, captured.inputs)
    names = [placeholder_name(n) for n in captured.graph.graph.nodes if n.op == "placeholder"]
    torch.set_default_dtype(torch.float64)
    try:
        loss, logits = block.double()(batch[0].bfloat16().double(), batch[1], wide=True)
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(outputs, (loss.detach(), logits.detach()), **EXACT)
    expected = {name: p.grad for name, p in block.named_parameters()}
    found = {name: g for name, g in zip(names, gradients, strict=True) if g is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **EXACT)


def test_is_not_the_narrow_graph(block, batch, capture):
    captured = capture(block, batch[0], batch[1])
    wide = float64_run(captured.graph, captured.inputs)
    narrow = captured.graph(*captured.inputs)
    assert wide[0].dtype == torch.float64
    assert 1e-4 < relative(narrow[1], wide[1]) < 1e-2  # the bfloat16 table


MODELS = [
    ("llama", "bfloat16"),
    ("gemma2", "autocast"),
    ("gpt2", "float32"),
    ("meta", "bfloat16"),
]


@pytest.mark.parametrize("name, mode", MODELS)
def test_no_narrow_value_is_left(name, mode, build, tokens, capture):
    model = build(name)
    if mode == "bfloat16":
        model = model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        captured = capture(model, input_ids=tokens, labels=tokens)
    wide, run = widen(captured.graph), Narrow(widen(captured.graph))
    inputs = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in captured.inputs]
    inputs = [x.to(torch.complex128) if isinstance(x, Tensor) and x.is_complex() else x for x in inputs]
    with torch.no_grad():
        run.run(*inputs)
    assert run.found == []
    assert [n.name for n in wide.graph.nodes if n.op == "placeholder"] == [
        n.name for n in captured.graph.graph.nodes if n.op == "placeholder"
    ]


@pytest.mark.parametrize("name, mode", [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32")])
def test_models_are_near_their_oracle(name, mode, build, tokens, capture):
    captured = capture(build(name).to(getattr(torch, mode)), input_ids=tokens, labels=tokens)
    outputs, gradients = float64_gradients(captured.graph, captured.inputs)
    narrow = captured.graph(*captured.inputs)
    wanted = [x for x in captured.inputs if isinstance(x, Tensor) and x.requires_grad]
    theirs = torch.autograd.grad(narrow[0], wanted)
    bound = 2e-5 if mode == "float32" else 5e-2
    assert relative(narrow[1].detach(), outputs[1]) < bound
    ours = [g for g in gradients if g is not None]
    errors = [relative(g, w) for g, w in zip(theirs, ours, strict=True)]
    assert max(errors) < bound
    assert min(errors) > 0


def test_meta_model_in_complex128(build, tokens, capture):
    model = build("meta")
    captured = capture(model, tokens, tokens)
    loss, _ = float64_run(captured.graph, captured.inputs)
    rotation = model.rotation
    model.double()
    model.rotation = rotation.to(torch.complex128)
    torch.testing.assert_close(loss, reference_loss(model, tokens), **EXACT)


def reference_loss(model, tokens):
    """The hand-written model once more, with no cast in it."""
    x = model.embedding(tokens)
    h = model.norm(x)
    q, k, v = (model.qkv[name](h).unflatten(-1, (model.heads, model.size)) for name in "qkv")

    def rotate(t):
        pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * model.rotation[: t.shape[1], None]).flatten(3)

    q, k, v = (t.transpose(1, 2) for t in (rotate(q), rotate(k), v))
    scores = (q @ k.mT) / model.size**0.5
    scores = scores.masked_fill(~torch.ones(24, 24).tril().bool(), float("-inf"))
    y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return functional.cross_entropy(model.output(x + y).flatten(0, 1), tokens.flatten()).detach()


def test_cotangents_and_inputs_without_a_gradient(capture):
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4)
    captured = capture(lambda x, w: (x @ w, x.sum(), x.long()), x, w)
    g = torch.randn(3, 4)
    outputs, gradients = float64_gradients(captured.graph, captured.inputs, [g, None, None])
    torch.testing.assert_close(gradients[0], g.double() @ w.double().T, **EXACT)
    assert gradients[1] is None
    assert outputs[2].dtype == torch.int64
    with pytest.raises(CaptureError, match="3 outputs, 1 cotangents"):
        float64_gradients(captured.graph, captured.inputs, [g])
    with pytest.raises(CaptureError, match="no loss"):
        float64_gradients(captured.graph, captured.inputs)


def test_leaves_inputs_and_defaults_alone(block, batch, capture):
    captured = capture(block, batch[0], batch[1])
    before = [x.clone() if isinstance(x, Tensor) else x for x in captured.inputs]
    with torch.autocast("cpu", torch.bfloat16):
        inside = float64_run(captured.graph, captured.inputs)
        assert torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(inside[0], float64_run(captured.graph, captured.inputs)[0])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(captured.inputs, before, strict=True))
    assert all(p.grad is None for p in block.parameters())


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.float() / 2

    @staticmethod
    def backward(ctx, g):
        return g.to(torch.float32) * 3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_custom_functions_are_widened_inside(capture):
    x = torch.randn(5, requires_grad=True)
    captured = capture(lambda x: (Halve.apply(x.sin()) ** 2).sum(), x)
    (loss,), (gradient,) = float64_gradients(captured.graph, captured.inputs)
    wide = x.detach().double()
    torch.testing.assert_close(loss, (wide.sin() / 2).square().sum(), **EXACT)
    torch.testing.assert_close(gradient, wide.sin() * 3 * wide.cos(), **EXACT)


def test_bits_have_no_float64(capture):
    captured = capture(lambda x: x.view(torch.int32) + 1, torch.randn(4))
    with pytest.raises(CaptureError, match="bits of a number"):
        widen(captured.graph)
