"""Stacked parameters side by side in memory: nothing but addresses changes, and a pack that breaks is noticed."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from codetta import pack_
from codetta.backends.reference.execute import Executable
from codetta.backends.stacked import STATISTICS, are_adjacent, stacked
from codetta.capture.backend import recording
from codetta.errors import UnsupportedError
from codetta.runtime import pack
from codetta.runtime.pack import pack_group
from ways import compiled, llama

WIDTH = 16


class Block(nn.Module):
    """Two siblings with biases behind a norm, and what takes them up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(seed))


def packed(**options: object) -> Model:
    """A model that a compiled forward call has packed."""
    found = model()
    compiled(found, pack=True, **options)(batch())
    return found


def groups(m: nn.Module) -> Iterator[list[Tensor]]:
    for block in m.blocks:
        yield [block.gate.weight, block.up.weight]
        yield [block.gate.bias, block.up.bias]


def is_packed(m: nn.Module) -> bool:
    (answer,) = {are_adjacent(g) for g in groups(m)}
    return answer


@pytest.fixture(autouse=True)
def _nothing_was_told_or_seen() -> Iterator[None]:
    yield
    pack._told.clear()
    pack._LAYOUTS.clear()


@pytest.fixture
def stacking(monkeypatch) -> None:
    """The reference backend asks for stacked inputs as kernels do."""
    run = Executable.run

    def asking(self: Executable, inputs: dict[str, Tensor], rows: int, *given_up: object) -> dict[str, Tensor]:
        for names in self.plan.stacks:
            assert torch.equal(stacked([inputs[n] for n in names]), torch.cat([inputs[n] for n in names]))
        return run(self, inputs, rows, *given_up)

    monkeypatch.setattr(Executable, "run", asking)


def copies(call: Callable[[], object]) -> tuple[int, int]:
    """How many views and copies a call made."""
    before = STATISTICS.views, STATISTICS.copies
    call()
    return STATISTICS.views - before[0], STATISTICS.copies - before[1]


# --- by itself --------------------------------------------------------------------------------------------------------


def test_one_step_copies_nothing(stacking):
    """Forward and backward read views of the packed weights and biases of both blocks."""
    m = model()
    ours = compiled(m, pack=True)
    views, copied = copies(lambda: ours(batch()).sum().backward())
    assert is_packed(m)
    assert copied == 0
    assert views >= 2 * 3  # per block: weights and biases in forward, weights in backward


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_every_way_to_run_the_rest(stacking, inner):
    m = model()
    ours = compiled(m, pack=True, inner=inner)
    with torch.no_grad():  # what a graph saves of a weight is a view of it
        expected = m(batch())
    with warnings.catch_warnings(), recording() as graphs:
        warnings.simplefilter("ignore")  # Inductor's own
        assert copies(lambda: ours(batch()).sum().backward())[1] == 0
        assert is_packed(m)
        torch.testing.assert_close(ours(batch()), expected)
        assert len(graphs) == 1  # nothing guards an offset
        torch.testing.assert_close(ours(batch()[:, :3]), expected[:, :3])
        assert len(graphs) == 2


def test_llama_with_biases(stacking):
    """q, k and v have different sizes: 3 weights and 3 biases in one buffer each."""
    m = llama(2, torch.float32, attention_bias=True)
    tokens = torch.arange(24).view(2, 12)
    ours = compiled(m, pack=True)

    def step() -> None:
        ours(input_ids=tokens, labels=tokens).loss.backward()

    assert copies(step)[1] == 0
    for layer in m.model.layers:
        for kind in ("weight", "bias"):
            parts = [getattr(getattr(layer.self_attn, f"{n}_proj"), kind) for n in "qkv"]
            assert are_adjacent(parts)
    assert not ours(input_ids=tokens, labels=tokens).loss.isnan()


@pytest.mark.parametrize("options", [{}, {"pack": False}])
def test_not_unless_it_is_of_use(stacking, options):
    """The reference backend needs no pack, and False declines one: nothing moves and nothing is said."""
    m = model()
    where = [p.data_ptr() for p in m.parameters()]
    assert copies(lambda: compiled(m, **options)(batch()))[1] > 0
    assert [p.data_ptr() for p in m.parameters()] == where


def test_a_second_graph_moves_nothing():
    m = model()
    ours = compiled(m, pack=True)
    ours(batch())
    where = [p.data_ptr() for p in m.parameters()]
    with torch.no_grad():
        ours(batch())
    ours(torch.randn(4, 7, WIDTH))
    assert [p.data_ptr() for p in m.parameters()] == where


def test_a_first_call_in_inference_mode():
    """What was packed there can be trained afterwards."""
    m = model()
    with torch.inference_mode():
        compiled(m, pack=True)(batch())
    assert is_packed(m)
    assert not any(p.is_inference() for p in m.parameters())
    m(batch()).sum().backward()


# --- nothing else changes ---------------------------------------------------------------------------------------------


def test_parameters_are_the_same_objects_with_the_same_values():
    m, plain = model(), model()
    before = dict(m.named_parameters())
    compiled(m, pack=True)(batch())
    assert is_packed(m)
    for name, p in m.named_parameters():
        assert p is before[name]
        assert p.is_leaf
        assert not p._is_view()
    state = m.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("kind", ["foreach", "fused", "neither"])
def test_training_is_bit_equal(kind):
    """Three AdamW steps of two accumulated gradients each, packed and not."""

    def trained(pack: bool) -> dict[str, Tensor]:
        m = model()
        ours = compiled(m, pack=pack)
        how = {name: name == kind for name in ("foreach", "fused")}
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, **how)
        for step in range(3):
            for half in range(2):
                ours(batch(2 * step + half)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert is_packed(m) is pack
        return m.state_dict()

    ours, plain = trained(True), trained(False)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_loading_stays_packed_and_assigning_does_not():
    m, other = packed(), model(1)
    m.load_state_dict(other.state_dict())
    assert is_packed(m)
    torch.testing.assert_close(m(batch()), other(batch()), rtol=0, atol=0)
    m.load_state_dict(other.state_dict(), assign=True)
    assert not is_packed(m)


def test_a_copy_is_not_packed_and_right():
    m = packed()
    twin = copy.deepcopy(m)
    assert not is_packed(twin)
    torch.testing.assert_close(compiled(twin, pack=True)(batch()), m(batch()))
    assert is_packed(twin)
    assert is_packed(m)


def test_saving(tmp_path):
    m = packed()
    torch.save(m.state_dict(), tmp_path / "state")
    loaded = model(1)
    loaded.load_state_dict(torch.load(tmp_path / "state"))
    torch.testing.assert_close(loaded(batch()), m(batch()), rtol=0, atol=0)


def test_tied_modules_stay_tied():
    """One Parameter in two places is one Parameter still."""
    m = model()
    m.blocks[1].gate.weight = m.blocks[0].gate.weight
    compiled(m, pack=True)(batch())
    assert m.blocks[1].gate.weight is m.blocks[0].gate.weight
    assert are_adjacent([m.blocks[0].gate.weight, m.blocks[0].up.weight])
    torch.testing.assert_close(compiled(m, pack=True)(batch()), m(batch()))


# --- broken and repaired ----------------------------------------------------------------------------------------------

BREAKS = {
    "cast": lambda m: m.bfloat16().float(),
    "assign": lambda m: m.load_state_dict(model(1).state_dict(), assign=True),
}


@pytest.mark.parametrize("case", BREAKS)
def test_a_broken_pack_is_told_once_and_repaired(stacking, case):
    m = model()
    ours = compiled(m, pack=True)
    ours(batch())
    BREAKS[case](m)
    with pytest.warns(UserWarning, match=r"copies stacked parameters.*gate_weight, up_weight.*codetta.pack_\(model\)"):
        found = ours(batch())
    torch.testing.assert_close(found, m(batch()))
    assert copies(lambda: ours(batch()))[1] > 0  # a second warning would be an error
    assert [s.reason for s in pack_(m)] == [None] * 4
    assert is_packed(m)
    assert copies(lambda: ours(batch()))[1] == 0
    torch.testing.assert_close(ours(batch()), m(batch()))


def test_by_name_before_anything_is_compiled():
    m = model()
    with pytest.raises(UnsupportedError, match=r"no graph compiled in this process(.|\n)*pack_\(model, \["):
        pack_(m)
    layouts = [("gate.weight", "up.weight"), ("gate.bias", "up.bias"), ("no.weight", "such.weight")]
    found = pack_(m, layouts)
    assert [s.names[0] for s in found] == [f"blocks.{i}.gate.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    assert is_packed(m)


def test_what_was_compiled_by_layer_is_found_in_the_whole():
    m, other = model(), model(1)
    compiled(m.blocks[0])(batch())
    assert len(pack_(other)) == 4
    assert is_packed(other)


# --- what is left alone -----------------------------------------------------------------------------------------------


def parameters(*shapes: tuple[int, ...], **kwargs: object) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(*s, **kwargs)) for s in shapes]


def of_one_memory() -> list[nn.Parameter]:
    a, b = parameters((4, 8), (4, 8))
    other = nn.Parameter(torch.empty(0))
    other.data = a.data
    return [a, b, other]


def views() -> list[nn.Parameter]:
    buffer = torch.randn(20, 8)
    return [nn.Parameter(buffer[:4]), nn.Parameter(buffer[8:])]


def fakes() -> list[nn.Parameter]:
    with FakeTensorMode():
        return parameters((4, 8), (4, 8))


def shared() -> list[nn.Parameter]:
    found = parameters((4, 8), (4, 8))
    found[0].share_memory_()
    return found


def frozen() -> list[nn.Parameter]:
    found = parameters((4, 8), (4, 8))
    found[1].requires_grad_(False)
    return found


class Special(nn.Parameter):
    pass


LEFT = {
    "tied by memory": (of_one_memory, "shares its memory"),
    "views": (views, "shares its memory"),
    "fakes": (fakes, "no plain parameter"),
    "subclass": (lambda: [Special(torch.randn(4, 8)), *parameters((4, 8))], "is a Special"),
    "no parameter": (lambda: [torch.randn(4, 8), *parameters((4, 8))], "is a Tensor"),
    "twice": (lambda: parameters((4, 8)) * 2, "there twice"),
    "dtypes": (lambda: [*parameters((4, 8)), *parameters((4, 8), dtype=torch.bfloat16)], "differ in dtype"),
    "row sizes": (lambda: parameters((4, 8), (4, 16)), "differ in dtype, device, row size"),
    "frozen in part": (frozen, "requires_grad"),
    "strides": (lambda: [nn.Parameter(torch.randn(8, 4).t()), *parameters((4, 8))], "not contiguous"),
    "meta": (lambda: parameters((4, 8), (4, 8), device="meta"), "meta device"),
    "shared": (shared, "other processes"),
    "alignment": (lambda: parameters((3,), (4,)), "begin 12 bytes after the first, at no multiple of 16"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_must_stay_stays_and_says_why(case):
    make, reason = LEFT[case]
    group = make()
    if case != "meta":
        where = [p.untyped_storage()._cdata for p in group]
    assert reason in (pack_group(group) or "")
    if case != "meta":
        assert [p.untyped_storage()._cdata for p in group] == where


def test_an_alias_that_somebody_holds():
    """Its owner would keep reading the old memory."""
    group = parameters((4, 8), (4, 8))
    alias = group[1].detach()
    assert "shares its memory" in (pack_group(group) or "")
    del alias
    assert pack_group(group) is None
    assert are_adjacent(group)


def test_no_memory_for_the_copy(monkeypatch):
    group = parameters((4, 8), (4, 8))
    where = [p.data_ptr() for p in group]

    def full(*size: int, **kwargs: object) -> Tensor:
        if size and size[0] == 8:
            raise torch.OutOfMemoryError
        return torch.zeros(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", full)
    assert "no memory" in (pack_group(group) or "")
    assert [p.data_ptr() for p in group] == where


@pytest.fixture
def process_group() -> Iterator[None]:
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("PyTorch was built without gloo")
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_sharded_parameters_are_copied_and_told(process_group, stacking):
    """FSDP2 owns its parameters' memory: they stay, and the step is right."""
    m, plain = model(), model()
    mesh = init_device_mesh("cpu", (1,))
    for block in m.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(m, mesh=mesh)
    for block in m.blocks:
        block.compile(backend="codetta", options={"pack": True})
    with pytest.warns(UserWarning, match="copies stacked parameters"):
        m(batch()).sum().backward()
    plain(batch()).sum().backward()
    for p, q in zip(m.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5)
    assert all("no plain parameter" in s.reason for s in pack_(m))


def test_buckets_of_ddp_are_packed_when_asked(process_group, stacking):
    """DDP hands over fake tensors where it splits a graph: what is stacked is known, the parameters are not."""
    m = llama(2, torch.float32, vocab_size=6000)
    parallel = DistributedDataParallel(m, bucket_cap_mb=1)
    tokens = torch.arange(24).view(2, 12)
    torch._dynamo.reset()
    ours = torch.compile(parallel, backend="codetta", options={"pack": True})
    with pytest.warns(UserWarning, match="copies stacked parameters"):
        before = ours(input_ids=tokens, labels=tokens).loss
    before.backward()
    del before  # and with it what its graph saved of the weights
    assert [s.reason for s in pack_(parallel)] == [None] * 4
    assert copies(lambda: ours(input_ids=tokens, labels=tokens))[1] == 0
