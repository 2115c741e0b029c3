"""Plans on the Hopper backend with a stand-in for the kernels: values, what is written over, what is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

import drive
import mirror
from codetta.backends.stacked import STATISTICS
from codetta.core.types import ROWS, bf16, tile
from codetta.ir.build import cast, input_, matmul, mul
from codetta.ir.graph import Graph
from codetta.partition.build import make_plan
from codetta.partition.cut import Memory
from codetta.partition.lifetime import overwritten, private
from codetta.partition.training import TrainingPlan, plan_training
from codetta.testing import relative_error
from epilogues import CASES, case, plan_of
from graphs import Sizes, llama_segment, trained

if find_spec("quack") is None or find_spec("triton") is None:
    pytest.skip("the kernels' packages are not installed", allow_module_level=True)

from standin import stand_in

from codetta.backends.hopper.execute import PREPARED, Executable
from codetta.backends.hopper.rounding import REDUCED, once

SMALL = Sizes(d=128, ffn=192, heads=2, kv_heads=1, inside=64)
TOLERANCE = 0.02


@pytest.fixture(autouse=True)
def _standin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):  # what numpy warns of, a GPU computes
        stand_in(patch)
        yield


def feed_of(graph: Graph, rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and cotangents in the graph's dtypes, and the float64 gradients."""
    feed = mirror.random_feed(graph, rows, 0)
    want = mirror.outputs(graph, feed, rows)
    given = drive.typed(graph, mirror.random_cotangents(want))
    return drive.typed(graph, feed), given, mirror.gradients(want, feed, given, trained(graph))


def small() -> tuple[Executable, dict[str, Tensor]]:
    """The forward of a small segment, and its inputs for 5 tokens."""
    graph = llama_segment(bf16, SMALL)
    return Executable(plan_training(graph, trained(graph)).forward), feed_of(graph, 5)[0]


def passed_on(plan: TrainingPlan, inputs: dict[str, Tensor], given: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """What backward reads: inputs, cotangents, and what forward keeps."""
    out = drive.run(plan.forward, inputs, rows, Executable)
    return {**inputs, **{f"d_{n}": g for n, g in given.items()}, **{name: out[o] for name, o in plan.saved}}


@pytest.mark.parametrize("rows, memory", [(1, "lean"), (130, "fast"), (70, "lean")])
def test_values_with_and_without_memory_given_up(memory: Memory, rows: int):
    """A second backward of a graph that is kept has the first's bits; the last may take the memory of saved values."""
    graph = llama_segment(bf16, SMALL)
    plan = plan_training(graph, trained(graph), memory)
    inputs, given, want = feed_of(graph, rows)
    held = passed_on(plan, inputs, given, rows)
    before = {n: t.clone() for n, t in held.items()}
    backward, mine = Executable(plan.backward), private(plan)
    first, second = (backward.run(held, rows) for _ in range(2))
    assert all(torch.equal(t, before[n]) for n, t in held.items())
    last = backward.run(held, rows, mine)
    changed = {n for n, t in held.items() if not torch.equal(t, before[n])}
    assert changed == {load for step in overwritten(plan.backward, mine) for load in step.values()} & mine
    assert len(changed) == {"fast": 1, "lean": 2}[memory]
    for name, view in plan.backward.outputs:
        assert all(torch.equal(run[view.buffer], first[view.buffer]) for run in (second, last)), name
        got = first[view.buffer][slice(*view.rows)] if view.rows else first[view.buffer]
        drive.close(got, want[name.removeprefix("d_")], 10 * TOLERANCE, name)
    memory_of = {t.untyped_storage().data_ptr() for t in held.values()}
    assert memory_of.isdisjoint(t.untyped_storage().data_ptr() for t in last.values())


def test_outputs_go_where_the_caller_says():
    """All that a plan stores may be given memory, sums, selections and maps included; what is left out is allocated."""
    forward, inputs = small()
    want = forward.run(inputs, 5)
    into = {name: torch.full_like(t, torch.nan) for name, t in list(want.items())[::2]}
    found = forward.run(inputs, 5, into=into)
    assert all(found[name] is t for name, t in into.items())
    assert all(torch.equal(found[name], t) for name, t in want.items())


def test_odd_addresses_and_strides():
    """What TMA cannot read is copied; the inputs stay as they are, and so does the result."""
    forward, inputs = small()
    want = forward.run(inputs, 5)

    def odd(t: Tensor) -> Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    moved = {n: odd(t) if i % 2 else t.mT.contiguous().mT for i, (n, t) in enumerate(inputs.items())}
    assert {t.data_ptr() % 16 for t in moved.values()} > {0}
    found = forward.run(moved, 5)
    assert all(torch.equal(found[name], t) for name, t in want.items())


def test_weights_side_by_side_are_not_copied():
    """A stack is found where it lies; one whose blocks lie apart is copied, and counted."""
    forward, inputs = small()
    plan = forward.plan
    want, copies = forward.run(inputs, 5), STATISTICS.copies
    assert forward.run(inputs, 5).keys() == want.keys()
    assert STATISTICS.copies == copies + len(plan.stacks)
    packed = dict(inputs)
    for names in plan.stacks:
        blocks = torch.cat([inputs[n] for n in names]).split([len(inputs[n]) for n in names])
        packed.update(zip(names, blocks, strict=True))
    copies, views = STATISTICS.copies, STATISTICS.views
    found = forward.run(packed, 5)
    assert (STATISTICS.copies, STATISTICS.views) == (copies, views + len(plan.stacks))
    assert all(torch.equal(found[name], t) for name, t in want.items())


def test_no_more_numbers_of_tokens_stay_prepared_than_agreed():
    graph = llama_segment(bf16, SMALL)
    inputs, _, _ = feed_of(graph, PREPARED + 2)
    forward = Executable(plan_training(graph, trained(graph)).forward)
    types = forward.plan.buffers
    for rows in range(1, PREPARED + 2):
        forward._schedule(rows, torch.device("cpu"), frozenset(), ())
        assert len(forward._schedules) <= PREPARED
    cut = {n: t[:3] if types[n].rows == ROWS else t for n, t in inputs.items()}
    assert forward.run(cut, 3)["x2"].shape[0] == 3


def test_the_switch_of_one_rounding_is_given_back():
    matmuls = torch.backends.cuda.matmul
    before = [getattr(matmuls, name) for name in REDUCED]
    with once():
        assert not any(getattr(matmuls, name) for name in REDUCED)
    assert [getattr(matmuls, name) for name in REDUCED] == before
    with pytest.raises(ZeroDivisionError), once():
        raise ZeroDivisionError
    assert [getattr(matmuls, name) for name in REDUCED] == before


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_epilogue(name: str, rows: int):
    """Each finds its operands and partials, of which it may want some columns only."""
    plan, feed, wanted = plan_of(name), *case(name, rows)
    found = Executable(plan).run({n: feed[n] for n in plan.inputs}, rows)
    for (output, _), want in zip(CASES[name][0].outputs, wanted, strict=True):
        drive.close(found[dict(plan.outputs)[output].buffer], want, TOLERANCE, output)


@pytest.mark.parametrize("rows", [3, 70])
def test_rows_that_are_apart_are_read_where_they_lie(rows: int, monkeypatch: pytest.MonkeyPatch):
    """Columns of something wider, as a pass over rows takes them; a GEMM's operand is made whole."""
    z, w = input_("z", tile(64, bf16)), input_("w", tile(64, bf16, rows=32))
    wide = torch.randn(rows, 200).bfloat16()
    weight = torch.randn(32, 64).bfloat16()
    part = wide[:, 72:136]
    copied: list[int] = []
    monkeypatch.setattr(Tensor, "contiguous", _counting(Tensor.contiguous, copied))
    mapped = Executable(make_plan(Graph((z,), (("y", cast(mul(z, 2.0), bf16)),))))
    for given, wanted in ((part, 0), (part.clone(), 0), (wide[:, ::2][:, :64], 1)):
        copied.clear()
        assert torch.equal(mapped.run({"z": given}, rows)["y"], 2 * given)
        assert len(copied) == wanted
    copied.clear()
    product = Executable(make_plan(Graph((z, w), (("y", cast(matmul(z, w), bf16)),))))
    got = product.run({"z": part, "w": weight}, rows)["y"]
    assert relative_error(got, part.double() @ weight.double().t()) < 4e-3
    assert len(copied) == 1


def _counting(inner: Callable[..., Tensor], found: list[int]) -> Callable[..., Tensor]:
    """The same, which notes when it has to copy."""

    def contiguous(t: Tensor) -> Tensor:
        if not t.is_contiguous():
            found.append(1)
        return inner(t)

    return contiguous
