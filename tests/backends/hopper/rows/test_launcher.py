"""How prepared launches are started: by addresses where Triton's kernels allow it, by Triton where not."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from codetta.backends.hopper.rows import Spec, compile_rows
from codetta.backends.hopper.rows.bind import Bound
from codetta.backends.hopper.rows.launcher import _tell, launcher_of
from codetta.lang.source import parse_program

NORM = """
@leftover
def norm(x: Tile[40, f32], w: RowVec[40, f32]):
    r = rsqrt(sum_row(x * x) * 0.025 + 1e-05)
    return dict(h=x * r * w, r=r)
"""


class Made:
    """A compiled kernel of Triton's, which records its launches."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.function, self.packed_metadata = 77, (4, 1)

    def run(self, *given: object) -> None:
        self.calls.append(given)

    def __getitem__(self, grid: object) -> Any:
        return lambda *given: self.calls.append(("by triton", grid, *given))


def bound_to(made: object) -> tuple[Bound, list[Any]]:
    """A launch as on a GPU: its kernel is compiled already, its tensors lie on the CPU."""
    kernel = compile_rows(parse_program(NORM), {})
    tensors = [torch.randn(6, 40), torch.rand(40), None, None]
    (bound,), _ = kernel.bind([Spec.of(t) for t in tensors[:2]], 6, torch.device("cpu"), (0, 1), (2, 3), 4)
    bound.quick = launcher_of(made)
    return bound, tensors


def test_a_launch_by_addresses():
    """Grid, stream, function and metadata, no hooks, then every argument in order, tensors as numbers."""
    made = Made()
    bound, tensors = bound_to(made)
    bound(tensors, 5)
    ((x, y, z, stream, function, metadata, *rest),) = made.calls
    assert (x, y, z, stream, function, metadata) == (*bound.grid, 5, 77, (4, 1))
    assert rest[:3] == [None, None, None]
    given = dict(zip([*(a.name for a in bound.step.kernel.arguments), "BM", "BT"], rest[3:], strict=True))
    whats = {a.name: (a.what, a) for a in bound.step.kernel.arguments}
    addresses = [given[name] for name, (what, _) in whats.items() if what in ("input", "output")]
    assert sorted(addresses) == sorted(t.data_ptr() for t in tensors)
    assert [given[name] for name, (what, _) in whats.items() if what == "stride"] == [40]
    assert (given["BM"], given["BT"]) == (bound.bm, bound.bt)


def test_an_odd_address_goes_to_triton():
    """Triton compiles another kernel for it; in its interpreter here."""
    made = Made()
    bound, tensors = bound_to(made)
    memory = torch.randn(6 * 40 + 1)
    tensors[0] = memory[1:].view(6, 40)
    bound(tensors, 5)
    assert made.calls == []
    want = tensors[0] * (tensors[0].square().sum(1, keepdim=True) * 0.025 + 1e-5).rsqrt() * tensors[1]
    torch.testing.assert_close(tensors[2], want)


@pytest.mark.parametrize("missing", ["run", "function", "packed_metadata"])
def test_another_triton_is_said_and_works(missing: str, caplog: pytest.LogCaptureFixture):
    _tell.cache_clear()
    made = SimpleNamespace(run=print, function=1, packed_metadata=())
    delattr(made, missing)
    with caplog.at_level(logging.INFO, "codetta"):
        assert launcher_of(made) is None
    assert f"has no {missing} here" in caplog.text
    bound, tensors = bound_to(made)
    bound(tensors, 0)
    want = tensors[0] * (tensors[0].square().sum(1, keepdim=True) * 0.025 + 1e-5).rsqrt() * tensors[1]
    torch.testing.assert_close(tensors[2], want)


def test_strides_are_those_of_the_tensors():
    """A launch is prepared for rows that are apart, too; what is not even that is made contiguous."""
    kernel = compile_rows(parse_program(NORM), {})
    wide, w = torch.randn(6, 100), torch.rand(40)
    for x in (wide[:, 8:48], wide[:, :80:2], torch.randn(40, 6).t()):
        h, r = kernel([x, w], 6)
        want = (x.double().square().sum(1) * 0.025 + 1e-5).rsqrt()
        torch.testing.assert_close(r.double(), want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(h.double(), x * want[:, None] * w, rtol=1e-5, atol=1e-6)
