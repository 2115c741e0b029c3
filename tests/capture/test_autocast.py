"""Autocast said in explicit casts, also for CUDA on a machine without it: fake tensors are enough."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codetta.capture.autocast import Explicit, autocast_as, explicit_form

aten = torch.ops.aten
HALF, FLOAT = torch.float16, torch.float32


def fake(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def form(op, *args):
    return explicit_form(op, args, {}, (("cuda", HALF),))


@pytest.fixture(autouse=True)
def _fakes():
    with FakeTensorMode():
        yield


def test_narrow_operators_cast_their_arguments():
    x, w, b = fake(4, 8, dtype=HALF), fake(8, 8), fake(8)
    assert form(aten.linear.default, x, w, b) == Explicit({1: HALF, 2: HALF})
    assert form(aten.matmul.default, w, w) == Explicit({0: HALF, 1: HALF})
    assert form(aten.linear.default, x, x) == Explicit({})


def test_attention_casts_its_mask_too():
    q, mask = fake(1, 2, 8, 8), fake(8, 8)
    assert form(aten.scaled_dot_product_attention.default, q, q, q, mask) == Explicit(dict.fromkeys(range(4), HALF))


def test_wide_operators_cast_their_arguments():
    x, gain = fake(4, 8, dtype=HALF), fake(8, dtype=HALF)
    assert form(aten.layer_norm.default, x, [8], gain) == Explicit({0: FLOAT, 2: FLOAT})
    assert form(aten.pow.Tensor_Scalar, x, 2) == Explicit({0: FLOAT})
    assert form(aten.pow.Tensor_Scalar, fake(4, 8), 2) == Explicit({})


def test_reductions_are_told_their_dtype():
    x = fake(4, 8, dtype=HALF)
    for op, args in ((aten.softmax.int, (x, -1)), (aten.sum.default, (x,)), (aten.cumsum.default, (x, -1))):
        assert form(op, *args) == Explicit({}, dtype=FLOAT)


def test_a_loss_stays_whole():
    x, labels = fake(4, 8, dtype=HALF), torch.empty(4, dtype=torch.long, device="cuda")
    assert form(aten.cross_entropy_loss.default, x, labels) == Explicit({0: FLOAT})


def test_operators_that_follow_their_arguments_are_left_alone():
    x = fake(4, 8, dtype=HALF)
    assert form(aten.silu.default, x) == Explicit({})
    assert form(aten.add.Tensor, x, fake(4, 8)) == Explicit({})


def test_casts_between_inner_steps_have_no_explicit_form():
    x, w = (torch.empty(4, n, device="cpu") for n in (8, 8))
    args = ("ij,kj->ik", [x, w])
    assert explicit_form(aten.einsum.default, args, {}, (("cpu", torch.bfloat16),)) is None


def test_ambient_autocast_is_put_back():
    with torch.autocast("cpu", torch.bfloat16):
        with autocast_as((("cuda", HALF),)):
            assert (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")) == (False, True)
        assert (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")) == (True, False)
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
