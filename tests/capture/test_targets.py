"""A target that names no class: PyTorch raises, a segment cannot, so the loss must be NaN and never plausible."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@pytest.mark.parametrize("wrong", [11, 4000, -1, -101])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_target_out_of_range_gives_nan(wrong: int, reduction: str):
    torch._dynamo.reset()
    x, w = torch.randn(5, 8), torch.randn(11, 8)

    def loss(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), t, reduction=reduction)

    compiled = torch.compile(loss, backend="codetta")
    right = torch.tensor([1, -100, 3, 0, 10])
    torch.testing.assert_close(compiled(x, right), loss(x, right))
    found = compiled(x, torch.tensor([1, -100, 3, wrong, 10]))
    if reduction == "none":
        assert found.isnan().tolist() == [False, False, False, True, False]
    else:
        assert found.isnan()
