"""What normalisation makes of single functions: modes, mutation, constants, identities."""

import pytest
import torch
from torch.nn import functional

from codetta.capture.normalise import normalise

aten = torch.ops.aten

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


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_function_is_unchanged(f, dynamic, operands, capture):
    captured = capture(f, *operands, dynamic=dynamic)
    captured.assert_explicit()
    captured.assert_same_as(f, operands)


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
    captured.assert_same_as_dynamo()


def test_casts_of_weights_are_shared_and_those_of_activations_are_not(operands, capture):
    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            h = x.sin()
            return functional.linear(h, w) + functional.linear(h, w)

    captured = capture(f, *operands)
    casts = [n.args[0].name for n in captured.graph.graph.nodes if n.target is aten.to.dtype]
    assert casts == ["l_w_", "sin", "sin"]
    captured.assert_same_as_dynamo()


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
    captured.assert_same_as_dynamo()


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


def test_a_copy_by_cast_is_a_copy(operands, capture):
    def f(x, w):
        copied = x.to(torch.float32, copy=True)
        copied.add_(1)
        return copied @ w, x.to(torch.float32, copy=True)

    captured = capture(f, *operands)
    captured.assert_same_as(f, operands)
