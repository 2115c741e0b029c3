"""Where the borders of compilation lie: blocks compiled alone, checkpointed, sharded; and what is left to PyTorch."""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from codetta.backends.hopper import support
from codetta.backends.reference.execute import Executable
from codetta.capture import backend as entry
from codetta.capture.backend import CapturedGraph, backend, captured, recording
from codetta.capture.options import BackendOptions
from codetta.errors import SettingsError
from codetta.testing import relative_error
from ways import (
    backward_plans,
    compiled,
    counts,
    data_gradients_with_epilogue,
    forward_plans,
    llama,
)

# Dynamo looks at the gradient of what goes into a block, and PyTorch warns it; it catches the warning, not an error
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of all parameters."""
    loss = model(input_ids=ids, labels=ids).loss
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def same_step(model: nn.Module, reference: nn.Module, bound: float = 1e-5) -> None:
    """One model's loss and gradients are another's."""
    (loss, ours), (expected, theirs) = gradients(model, tokens()), gradients(reference, tokens())
    torch.testing.assert_close(loss, expected, rtol=bound, atol=0.0)
    for (name, _), a, b in zip(reference.named_parameters(), ours, theirs, strict=True):
        assert relative_error(a, b) < bound, name


def by_layer(model: nn.Module, **options: object) -> nn.Module:
    """Each block compiled alone, as torchtitan does it and transformers' regional compilation."""
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="codetta", fullgraph=True, options=options or None)
    return model


def graphs_of(model: nn.Module) -> list[CapturedGraph]:
    """What is captured in a training step."""
    with recording() as found:
        gradients(model, tokens())
    return found


# --- blocks alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_of_a_block(dtype, biased):
    """One graph serves all layers. A block alone has 4 GEMMs forward, each with an epilogue; 1 leftover, its first
    norm's statistic and gain, since no GEMM of its own made the stream; 1 finalize, the second norm's statistic.
    Backward 8 GEMMs, of which 3 data gradients have an epilogue (down's, gate_up's, qkv's); 1 leftover, which rotates
    dqkv back; 3 finalizes, two gains and a row statistic. Biases add a finalize each, qkv's, o's, gate_up's, down's,
    and a leftover, since down's is the sum of an incoming gradient, which no GEMM of the block makes."""
    model = by_layer(llama(3, dtype, attention_bias=biased, mlp_bias=biased))
    found = graphs_of(model)
    assert len(found) == 1
    forward, backward = forward_plans(found), backward_plans(found)
    assert counts(forward) == {"gemms": 4, "epilogues": 4, "finalizes": 1, "leftovers": 1}
    assert counts(backward) == {"gemms": 8, "epilogues": 3, "finalizes": 3 + 4 * biased, "leftovers": 1 + biased}
    assert len(data_gradients_with_epilogue(backward)) == 3
    assert [call.op for call in found[0].capture.opaque] == ["aten.scaled_dot_product_attention.default"]
    assert all(s.reason for p in forward + backward for s in p.steps if s.kind == "leftover")


def test_step_of_blocks():
    """A step with every block compiled alone is the step of the model."""
    model = llama(3)
    same_step(by_layer(copy.deepcopy(model)), model)


@pytest.mark.parametrize("regime", ["whole", "blocks"])
def test_training(regime):
    """Five steps of AdamW, from the same weights on the same batches: the same losses and the same weights."""
    losses: dict[str, list[float]] = {}
    weights: dict[str, list[Tensor]] = {}
    for name in ("eager", "ours"):
        model = llama(2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = model if name == "eager" else by_layer(model) if regime == "blocks" else compiled(model)
        losses[name] = []
        for i in range(5):
            optimizer.zero_grad()
            loss = step(input_ids=tokens(i), labels=tokens(i)).loss
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
        weights[name] = [p.detach() for p in model.parameters()]
    assert losses["ours"] == pytest.approx(losses["eager"], rel=1e-5)
    assert losses["ours"][-1] != losses["ours"][0]
    for a, b in zip(weights["ours"], weights["eager"], strict=True):
        assert relative_error(a, b) < 1e-4


# --- activation checkpointing -----------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch) -> Counter[int]:
    """How often each plan is run."""
    found: Counter[int] = Counter()
    run = Executable.run

    def counted(self, *args):
        found[id(self.plan)] += 1
        return run(self, *args)

    monkeypatch.setattr(Executable, "run", counted)
    return found


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_counts_with_checkpointing(layers):
    """Whole graph, each block checkpointed: no segment crosses the border of a block, whose input is what is kept. So
    each of the L blocks and the head starts with its own norm: forward 4L+1 GEMMs, L+1 leftovers, L+1 finalizes (the
    second norms, and the loss); backward 8L+2 GEMMs, 3L+1 data gradients with an epilogue, L+1 leftovers, 3L+1
    finalizes."""
    model = llama(layers)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    found = captured(model, input_ids=tokens(), labels=tokens())
    gemms = 4 * layers + 1
    forward, backward = forward_plans(found), backward_plans(found)
    assert len(found[0].capture.segments) == 2 * layers + 1
    assert counts(forward) == {"gemms": gemms, "epilogues": gemms, "finalizes": layers + 1, "leftovers": layers + 1}
    assert counts(backward) == {
        "gemms": 8 * layers + 2,
        "epilogues": 3 * layers + 1,
        "finalizes": 3 * layers + 1,
        "leftovers": layers + 1,
    }
    assert len({key for g in found for key in g.keys}) == 3  # a block's two halves, and the head


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_step_with_checkpointing(inner, runs):
    """Whole graph, each block checkpointed: the step of the model. Where PyTorch's partitioner gets the graph, the four
    segments of two blocks run again in backward."""
    model = llama(2)
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    ours = compiled(checkpointed, inner=inner)
    with recording() as found:
        gradients(ours, tokens())
    runs.clear()
    same_step(ours, model)
    forward = {id(p) for p in forward_plans(found)}
    assert sum(n for plan, n in runs.items() if plan in forward) == 5 + (4 if inner == "aot_eager" else 0)
    assert sum(n for plan, n in runs.items() if plan not in forward) == 5


def test_checkpointing_around_compiled_blocks(runs):
    """Blocks compiled alone inside of checkpoints: they run again in backward, and the step is the model's."""
    model = llama(2)
    checkpointed = by_layer(copy.deepcopy(model))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    found = graphs_of(checkpointed)
    runs.clear()
    same_step(checkpointed, model)
    forward = {id(p) for p in forward_plans(found)}
    assert sum(n for plan, n in runs.items() if plan in forward) == 2 * 2 * 2
    assert sum(n for plan, n in runs.items() if plan not in forward) == 2 * 2


def test_checkpointing_inside_a_compiled_function():
    """A checkpoint written by hand in the compiled function, around a part of it that ends amid a chain."""
    first, second = nn.Sequential(nn.RMSNorm(24), nn.Linear(24, 40)), nn.Linear(40, 24)

    def f(x: Tensor) -> Tensor:
        h = checkpoint(lambda x: functional.silu(first(x)), x, use_reentrant=False)
        return x + second(h)

    x = torch.randn(5, 24, requires_grad=True)
    leaves = [x, *first.parameters(), *second.parameters()]
    expected = torch.autograd.grad(f(x).square().sum(), leaves)
    with recording() as found:
        ours = torch.autograd.grad(compiled(f)(x).square().sum(), leaves)
    assert counts(forward_plans(found))["gemms"] == 2
    for a, b in zip(ours, expected, strict=True):
        assert relative_error(a, b) < 1e-6


# --- several processes, of which there is one -------------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path) -> Iterator[None]:
    """A group of one process."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("PyTorch was built without gloo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_buckets_of_ddp(process_group):
    """DDP splits the graph at its buckets, and hands over parts of it: each is compiled, the step is the model's."""
    model = llama(2, vocab_size=6000)
    parallel = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=1)
    torch._dynamo.reset()
    ours = torch.compile(parallel, backend="codetta")
    found = graphs_of(ours)
    assert len(found) == 2
    assert counts(forward_plans(found))["gemms"] == 9
    same_step(ours, model)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_layers_of_fsdp(process_group):
    """FSDP2 around blocks compiled alone: one graph for all of them, the step is the model's."""
    model, sharded = llama(2), llama(2)
    mesh = init_device_mesh("cpu", (1,))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    by_layer(fully_shard(sharded, mesh=mesh))
    with recording() as found:
        sharded(input_ids=tokens(), labels=tokens()).loss.backward()
    assert len(found) == 1
    _, expected = gradients(model, tokens())
    for p, g in zip(sharded.parameters(), expected, strict=True):
        assert relative_error(p.grad.full_tensor(), g) < 1e-5


# --- left to PyTorch --------------------------------------------------------------------------------------------------


def test_disabled(monkeypatch, runs):
    """CODETTA_DISABLE=1 passes the graph through, to the bit, for bisecting."""
    monkeypatch.setenv("CODETTA_DISABLE", "1")
    model = llama(1)
    ours = compiled(model)
    with recording() as found:
        loss, got = gradients(ours, tokens())
    expected, theirs = gradients(model, tokens())
    assert found == []
    assert not runs
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)  # Dynamo's own graph has the mask written out
    for a, b in zip(got, theirs, strict=True):
        assert relative_error(a, b) < 1e-6


WRONG = {
    "attention": ("flash", "'auto', 'sdpa'"),
    "batch_invariant": ("yes", "False, True"),
    "logits": ("sometimes", "'auto', 'always', 'never'"),
    "memory": ("small", "'fast', 'balanced', 'lean'"),
    "inner": ("triton", "'auto', 'eager', 'aot_eager', 'inductor'"),
    "kernels": ("cublas", "'auto', 'hopper', 'reference'"),
    "pack": ("never", "'auto', True, False"),
    "prove_masks": ("no", "True, False"),
    "rewrite": ("yes", "True, False"),
    "widen": (None, "True, False"),
    "cudagraphs": ("maybe", "False, True"),
}


def test_every_option_is_tried():
    """The table above has them all."""
    assert WRONG.keys() == {f.name for f in fields(BackendOptions)}


@pytest.mark.parametrize("name", WRONG)
def test_options_are_checked(name):
    """A value that means nothing: the error names the option, what was given and what there is."""
    value, choices = WRONG[name]
    with pytest.raises(SettingsError, match=f"option {name}={value!r}") as error:
        backend(torch.fx.symbolic_trace(nn.Identity()), [torch.zeros(1)], options={name: value})
    assert choices in str(error.value)


def test_unknown_option():
    """An option that does not exist: the error lists those that do. Through torch.compile it comes in Dynamo's."""
    with pytest.raises(BackendCompilerFailed, match=r"SettingsError: no option 'speed'(.|\n)*kernels, logits, memory"):
        compiled(nn.Linear(3, 3), speed="high")(torch.zeros(2, 3))


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_memory_modes(memory):
    """What is kept for backward is a choice that changes no result."""
    model = llama(2)
    same_step(compiled(model, memory=memory), model)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_dtype_that_is_not_understood(dtype):
    """A linear of complex numbers stays with PyTorch, which gives its own result; the reason is kept."""
    x, w, v = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((3, 8), (8, 8), (4, 8)))

    def f(x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, w), v)

    with recording() as found:
        y = compiled(f)(x)
    torch.testing.assert_close(y, f(x))
    y.abs().sum().backward()
    assert x.grad is not None
    assert forward_plans(found) == []
    assert {c.op for c in found[0].capture.opaque} == {"aten.linear.default"}
    assert all(c.reason for c in found[0].capture.opaque)


def test_operators_that_are_not_understood():
    """A convolution, a sort and a softmax between linears: they stay with PyTorch, each with its reason, and what lies
    around them is compiled."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
            self.conv = nn.Conv1d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            h = torch.softmax(self.conv(h), -1).sort(-1).values
            return self.b(h * h)

    module = Mixed()
    x = torch.randn(2, 3, 8, requires_grad=True)
    with recording() as found:
        y = compiled(module)(x)
    torch.testing.assert_close(y, module(x))
    leaves = [x, *module.parameters()]
    for a, b in zip(*(torch.autograd.grad(f.square().sum(), leaves) for f in (y, module(x))), strict=True):
        assert relative_error(a, b) < 1e-5
    assert counts(forward_plans(found))["gemms"] == 2
    reasons = {c.op: c.reason for c in found[0].capture.opaque}
    assert {"aten.conv1d.default", "aten.softmax.int", "aten.sort.default"} <= reasons.keys()
    assert all(reasons.values())


def test_gpu_without_kernels(monkeypatch):
    """A GPU that there are no kernels for gets the original graph through Inductor and one warning that says why; the
    slow reference is never used there unasked."""
    asked = []

    def lookup(name: str):
        asked.append(name)
        return lambda gm, example_inputs: gm.forward

    monkeypatch.setattr(entry, "_device", lambda example_inputs: "cuda")
    monkeypatch.setattr(entry, "lookup_backend", lookup)
    monkeypatch.setattr(entry, "_TOLD", set())
    monkeypatch.setattr(support, "why_not", lambda device=None: "it is too old")
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    with recording() as found, pytest.warns(UserWarning, match="no kernels for this GPU: it is too old.*unchanged"):
        y = compiled(module)(x)
    torch.testing.assert_close(y, module(x))
    assert found == []
    assert asked == ["inductor"]
