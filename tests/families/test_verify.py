"""Every model family against float64 and eager, tiny: as one graph, and each block compiled alone."""

import pytest
import torch

from codetta.audit.families import FAMILIES, subject
from codetta.audit.verify import check
from codetta.testing import Bar
from ways import BARS

SEEDS = 2
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
QUICK = {("whole", "bf16"), ("blocks", "f32")}
WAYS = [
    pytest.param(regime, dtype, marks=() if (regime, dtype) in QUICK else pytest.mark.slow)
    for regime in ("whole", "blocks")
    for dtype in DTYPES
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("regime, dtype", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, regime, dtype):
    """Outputs and the gradients of all parameters clear the bar."""
    torch._dynamo.reset()
    bar = BARS.get(DTYPES[dtype], Bar())
    found = check(subject(family, DTYPES[dtype], tiny=True), seeds=SEEDS, per_block=regime == "blocks", bar=bar)
    assert len(found.tensors) > 15
    assert not found.problems, "\n".join(found.problems)
