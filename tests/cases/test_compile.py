"""What torch.compile and autograd ask of a segment: the gradients wanted and no more, any size, tensors left alone."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cases.modules import INPUTS, Block, Calls, Deep, half
from codetta.capture.backend import CapturedGraph, captured, recording
from codetta.errors import UnsupportedError
from codetta.testing import relative_error
from ways import agree, backward_plans, compiled, counts, forward_plans, fresh, llama, run


def block_inputs(generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(6, 24, generator=generator).requires_grad_() for _ in range(2)]


def deep_inputs(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape, 24, requires_grad=True), torch.randint(0, 65, shape)]


def wanted_gradients(found: list[CapturedGraph]) -> list[set[str]]:
    """For each segment the names of its inputs that want a gradient."""
    segments = [s for g in found for s in g.capture.segments]
    return [
        {str(n.attrs[0]) for n, wanted in zip(s.graph.inputs, s.requires_grad, strict=True) if wanted} for s in segments
    ]


COMBINATIONS = [
    pytest.param(w, id="+".join(itertools.compress(INPUTS, w)) or "nothing")
    for w in itertools.product([False, True], repeat=5)
]


@pytest.mark.parametrize("wanted", COMBINATIONS)
def test_exactly_the_gradients_that_are_asked_for(wanted):
    """C24: every combination of requires_grad over input, residual, weight, bias and gain: exactly those gradients, the
    same value of the loss, and nothing computed in vain: no output of a plan, no GEMM, nothing kept for backward."""
    asked = dict(zip(INPUTS, wanted, strict=True))
    module = Block()
    fresh(module, 0)
    named = {"weight": module.linear.weight, "bias": module.linear.bias, "gain": module.norm.weight}
    x, residual = block_inputs(torch.Generator().manual_seed(1))
    named |= {"input": x, "residual": residual}
    for name, tensor in named.items():
        tensor.requires_grad_(asked[name])
    expected = module(x, residual).square().sum()
    with recording() as found:
        loss = compiled(module)(x, residual).square().sum()
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad == any(wanted)
    (segment,) = [s for _, s in found[0].compiled()]
    if not any(wanted):
        assert wanted_gradients(found) == [set()]
        assert segment.results == [name for name, _ in segment.graph.outputs]
        return
    theirs = torch.autograd.grad(expected, [t for n, t in named.items() if asked[n]])
    loss.backward()
    gradients = {n: t.grad for n, t in named.items()}
    assert [n for n, g in gradients.items() if g is not None] == [n for n in named if asked[n]]
    for name, g in zip([n for n in named if asked[n]], theirs, strict=True):
        assert relative_error(gradients[name], g) < 1e-6, name
    (plan,) = backward_plans(found)
    through = asked["input"] or asked["residual"] or asked["gain"]
    assert {name for name, _ in plan.outputs} == {f"d_{n}" for n in wanted_gradients(found)[0]}
    assert plan.count("gemm") == asked["weight"] + through


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "eval", "frozen"])
def test_modes_without_gradients(mode):
    """C24: no_grad, inference_mode, eval, and a model with all weights frozen: the same loss. Where no gradient is
    asked for, nothing is kept for one."""
    module = Deep()
    fresh(module, 0)
    x, targets = deep_inputs(2, 5)
    expected, _ = module(x, targets)
    if mode == "frozen":
        module.requires_grad_(False)
        x = x.detach()
    module.train(mode != "eval")
    modes: dict[str, Callable[[], object]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    ours = compiled(module)
    with modes.get(mode, torch.enable_grad)(), recording() as found:
        loss, stream = ours(x, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for _, segment in found[0].compiled():
        assert (segment.wrt == ()) == (mode != "eval")
        if mode != "eval":
            assert segment.results == [name for name, _ in segment.graph.outputs]
    assert loss.requires_grad == stream.requires_grad == (mode == "eval")
    if mode == "eval":
        loss.backward()
        assert all(p.grad is not None for p in module.parameters())


def test_a_mode_that_changes_between_calls():
    """C24: training after evaluation and evaluation in between, of one compiled module."""
    module = Deep()
    fresh(module, 0)
    x, targets = deep_inputs(2, 5)
    ours = compiled(module)
    with torch.no_grad():
        first, _ = ours(x, targets)
    second, _ = ours(x, targets)
    second.backward()
    with torch.inference_mode():
        third, _ = ours(x, targets)
    assert first.item() == second.item() == third.item()
    assert module.head.weight.grad is not None


@pytest.mark.parametrize("used", ["loss", "stream", "both"])
def test_outputs_without_a_gradient(used):
    """C24: of two outputs only one is differentiated, or both: what no gradient reaches has None, as in PyTorch."""
    module = Deep().double()
    fresh(module, 0)
    x, targets = deep_inputs(2, 5)
    x = x.detach().double().requires_grad_()
    names, leaves = zip(*module.named_parameters(), strict=True)

    def gradients(f: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor | None, ...]:
        loss, stream = f(x, targets)
        total = {"loss": loss, "stream": stream.square().sum(), "both": loss + stream.square().sum()}[used]
        return torch.autograd.grad(total, [x, *leaves], allow_unused=True)

    for name, a, b in zip(("x", *names), gradients(compiled(module)), gradients(module), strict=True):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            assert relative_error(a, b) < 1e-12, name


def test_output_that_no_gradient_reaches():
    """C24: an output that depends on nothing trainable is no part of the backward graph, though the segment that makes
    it has one, and neither is one that depends on it by a comparison alone."""
    frozen, trained = nn.Linear(24, 16).requires_grad_(False), nn.Linear(16, 8)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        h = frozen(x)
        y = trained(torch.tanh(h))
        return h, y, torch.where(y > 0.0, 1.0, -1.0)

    x = torch.randn(6, 24)
    ours, theirs = compiled(f)(x), f(x)
    assert [t.requires_grad for t in ours] == [t.requires_grad for t in theirs] == [False, True, False]
    torch.testing.assert_close(ours, theirs)
    ours[0].numpy()
    ours[1].sum().backward()
    assert trained.weight.grad is not None


# --- sizes that change ------------------------------------------------------------------------------------------------


def test_changing_token_count():
    """C29: one graph without breaks. Dynamo compiles again at the first change of a size, and once each for 1 and 0
    tokens; our plans are made once."""
    module = Deep()
    fresh(module, 0)
    ours, graphs = compiled(module), []
    with recording() as found:
        for tokens in (23, 40, 64, 1, 7, 0, 33, 1, 0, 500):
            same_as_eager(ours, module, tokens)
            graphs.append(len(found))
    assert graphs == [1, 2, 2, 3, 3, 4, 4, 4, 4, 4]
    assert len({id(s) for g in found for _, s in g.compiled()}) == 1


def same_as_eager(ours, module, *shape):
    """A step of this size: the outputs are eager's, and there is a gradient."""
    x, targets = deep_inputs(*shape)
    loss, stream = ours(x, targets)
    (loss.nan_to_num() + stream.square().sum()).backward()
    expected, theirs = module(x.detach(), targets)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.testing.assert_close(stream, theirs)
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_changing_batch_and_length():
    """C29: the same for batch and length, each of which Dynamo learns to be dynamic when it first changes."""
    module = Deep()
    fresh(module, 0)
    ours = compiled(module)
    with recording() as found:
        for shape in ((2, 23), (2, 40), (3, 40), (5, 33), (1, 1), (2, 0), (4, 56), (7, 3), (1, 1)):
            same_as_eager(ours, module, *shape)
    assert len(found) == 5  # the first, length, batch, ones, zeros
    assert len({id(s) for g in found for _, s in g.compiled()}) == 1


def test_whole_model_with_changing_sizes():
    """C29: a Llama of transformers, whose mask and table depend on the sizes too."""
    model = llama(1)
    ours = compiled(model)
    with recording() as found:
        for shape in ((2, 24), (2, 40), (3, 40), (4, 12)):
            ids = torch.randint(0, 128, shape)
            loss = ours(input_ids=ids, labels=ids).loss
            torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss)
            loss.backward()
    assert len(found) == 3
    assert len({id(s) for g in found for _, s in g.compiled()}) == 2


def test_dynamic_from_the_start():
    """C29: with dynamic=True there is one graph for all sizes from two on, and numbers of the model stay numbers."""
    module = Deep()
    fresh(module, 0)
    torch._dynamo.reset()
    ours = torch.compile(module, backend="codetta", fullgraph=True, dynamic=True)
    with recording() as found:
        for shape in ((2, 23), (3, 40), (5, 33)):
            x, targets = deep_inputs(*shape)
            torch.testing.assert_close(ours(x, targets), module(x, targets))
    assert len(found) == 1


def test_layers_of_one_structure_share_their_plans():
    """Whole graph: the segments of a deep model are compiled once each kind: first, between layers, last."""
    with torch.device("meta"):
        model = llama(6)
        ids = torch.zeros(2, 12, dtype=torch.long)
    (graph,) = captured(model, input_ids=ids, labels=ids)
    assert len(graph.capture.segments) == 7
    assert len({id(s) for _, s in graph.compiled()}) == 3


# --- the ops ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, shape",
    [
        pytest.param(Deep, (2, 5), id="float32"),
        pytest.param(lambda: half(Deep()), (7,), id="bfloat16, partly frozen"),
        pytest.param(lambda: Deep().double(), (1,), id="float64, one token"),
        pytest.param(lambda: Deep(reduction="sum"), (3, 0), id="no tokens"),
    ],
)
def test_opcheck(make, shape):
    """C29: PyTorch's own check of both ops, on several plans: the schema is true (nothing is mutated, nothing aliased),
    autograd is registered, fakes equal what is computed in shape, stride and dtype, also with dynamic sizes."""
    module = make()
    fresh(module, 0)
    x, targets = deep_inputs(*shape)
    x = x.detach().to(module.head.weight.dtype).requires_grad_()
    torch._dynamo.reset()
    calls = Calls(logits="never")
    loss, stream = torch.compile(module, backend=calls.backend, fullgraph=True)(x, targets)
    with calls:
        (loss + stream.square().sum()).backward()
    calls.check()


def test_fake_and_meta_tensors():
    """C29: a model without memory is captured into the same segments as a real one."""
    ids = torch.zeros(2, 12, dtype=torch.long)
    real = captured(llama(1), input_ids=ids, labels=ids)
    with torch.device("meta"):
        model, ids = llama(1), torch.zeros(2, 12, dtype=torch.long)
    without = captured(model, input_ids=ids, labels=ids)
    assert [g.keys for g in without] == [g.keys for g in real]


# --- autograd ---------------------------------------------------------------------------------------------------------


def test_second_backward():
    """A second backward through a graph that was retained equals the first, to the bit, and without retaining it
    PyTorch's own error comes."""
    module = Deep()
    fresh(module, 0)
    x, targets = deep_inputs(2, 5)
    loss, stream = compiled(module)(x, targets)
    total = loss + stream.square().sum()
    leaves = [x, *module.parameters()]
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    second = torch.autograd.grad(total, leaves, retain_graph=True)
    one, other = torch.autograd.grad(loss, leaves, retain_graph=True), torch.autograd.grad(stream.square().sum(), x)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert relative_error(one[0] + other[0], first[0]) < 1e-6
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(total, leaves)


def test_double_backward_is_refused():
    """A second derivative is a clear error, not a wrong number."""
    module = Block()
    fresh(module, 0)
    inputs = block_inputs(torch.Generator())
    y = compiled(module)(*inputs)
    (g,) = torch.autograd.grad(y.square().sum(), inputs[0], create_graph=True)
    torch.testing.assert_close(g, torch.autograd.grad(module(*inputs).square().sum(), inputs[0])[0])
    with pytest.raises(UnsupportedError, match="no second derivative"):
        g.square().sum().backward()


def test_nothing_that_is_not_ours_is_written_to():
    """Inputs, weights, outputs and incoming gradients keep their bits and their versions through forward and two
    backward passes; no gradient shares memory with another, or with what came in."""
    module = Deep()
    fresh(module, 0)
    x, targets = deep_inputs(2, 5)
    loss, stream = compiled(module)(x, targets)
    g = torch.randn(2, 5, 24)
    leaves = [x, *module.parameters()]
    theirs = [*leaves, targets, loss, stream, g]
    before = [(t.detach().clone(), t._version) for t in theirs]
    runs = [torch.autograd.grad([loss, stream], leaves, [torch.tensor(2.0), g], retain_graph=True) for _ in range(2)]
    for t, (value, version) in zip(theirs, before, strict=True):
        assert torch.equal(t.detach(), value)
        assert t._version == version
    foreign = {t.untyped_storage().data_ptr() for t in theirs}
    for gradients in runs:
        places = [(t.untyped_storage().data_ptr(), t.storage_offset()) for t in gradients]
        assert len(set(places)) == len(places)
        assert foreign.isdisjoint(place for place, _ in places)
    before = [t.clone() for t in runs[1]]
    for t in runs[0]:
        t.zero_()
    assert all(torch.equal(a, b) for a, b in zip(runs[1], before, strict=True))


@pytest.mark.parametrize("changed", ["input", "weight", "output"])
def test_a_saved_tensor_that_was_changed(changed):
    """Whoever writes to a tensor between forward and backward gets PyTorch's error if it was kept, else the gradients
    of what was computed; never those of something else."""
    module = Block()
    fresh(module, 0)
    x, residual = block_inputs(torch.Generator())
    leaves = [x, residual, *module.parameters()]
    expected = torch.autograd.grad(module(x, residual).sum(), leaves)
    y = compiled(module)(x, residual)
    with torch.no_grad():
        {"input": x, "weight": module.linear.weight, "output": y}[changed].mul_(2.0)
    refused, found = "", []
    try:
        found = torch.autograd.grad(y.sum(), leaves)
    except RuntimeError as error:
        refused = str(error)
    if refused:
        assert "modified by an inplace operation" in refused
    else:
        assert all(relative_error(a, b) < 1e-6 for a, b in zip(found, expected, strict=True))


def test_gradients_are_accumulated():
    """Two backward passes without zeroing add up, as for any module."""
    module = Deep()
    fresh(module, 0)
    ours, inputs = compiled(module), [deep_inputs(2, 5), deep_inputs(2, 5)]
    single = [torch.autograd.grad(ours(*i)[0], list(module.parameters())) for i in inputs]
    for i in inputs:
        ours(*i)[0].backward()
    for p, a, b in zip(module.parameters(), *single, strict=True):
        assert torch.equal(p.grad, a + b)


def test_the_same_bits_run_after_run():
    """Same inputs, same bits: outputs and gradients of three runs, and of a module compiled anew."""
    module = Deep()
    fresh(module, 0)
    inputs = deep_inputs(2, 50)
    ours = compiled(module)
    runs = [run(ours, inputs, module, 0) for _ in range(3)] + [run(compiled(module), inputs, module, 0)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0].outputs, other.outputs, strict=True))
        assert all(torch.equal(g, other.gradients[name]) for name, g in runs[0].gradients.items())


# --- tensors in other shapes and places -------------------------------------------------------------------------------


def test_a_tensor_used_twice():
    """The same tensor as input and residual, the same weight in two linears: gradients are sums over the uses."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(24, eps=1e-5), nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            h = x + self.linear(self.norm(x))
            return h + self.linear(self.norm(h)) * x

    agree(Twice().double(), lambda g: [torch.randn(6, 24, generator=g).double().requires_grad_()], gemms=2)
    block = Block().double()
    fresh(block, 0)
    x = torch.randn(6, 24, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(compiled(block)(x, x).square().sum(), x)
    assert relative_error(ours, torch.autograd.grad(block(x, x).square().sum(), x)[0]) < 1e-12


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
def test_inputs_that_are_not_contiguous(layout):
    """Transposed, strided, expanded and offset inputs, and a weight that is a transpose."""

    def laid_out(t: Tensor) -> Tensor:
        return {
            "transposed": lambda: t.T.contiguous().T,
            "strided": lambda: torch.stack([t, t], -1)[..., 0],
            "expanded": lambda: t[:1].expand(6, -1),
            "offset": lambda: torch.cat([t, t])[6:],
        }[layout]()

    def draw(generator: torch.Generator) -> list[Tensor]:
        return [laid_out(x.detach().double()).requires_grad_() for x in block_inputs(generator)]

    module = Block().double()
    with torch.no_grad():
        module.linear.weight = nn.Parameter(torch.randn(24, 16, dtype=torch.float64).T)
    assert not module.linear.weight.is_contiguous()
    found = agree(module, draw, gemms=1)
    assert counts(forward_plans(found))["leftovers"] == 1
