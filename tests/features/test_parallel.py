"""Two processes of a gloo group, each with its half of the batch: the training of one process with all of it."""

import subprocess
import sys

import pytest
import torch
from torch import distributed

from codetta.testing import relative_error
from features import ranks
from features.training import CLOSE

TIMEOUT = 240


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank gives for every case."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("PyTorch was built without gloo")
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, ranks.__file__]
    running = [subprocess.Popen([*command, str(r), str(folder)]) for r in range(ranks.WORLD)]
    try:
        assert [p.wait(TIMEOUT) for p in running] == [0] * ranks.WORLD
    finally:
        for p in running:
            p.kill()
    return [torch.load(folder / f"{r}.pt") for r in range(ranks.WORLD)]


def results(found, name):
    """Losses of the ranks averaged, norms and weights, which the ranks agree about."""
    mine = [rank[name] for rank in found]
    assert not isinstance(mine[0], str), mine[0]
    losses, norms, weights, _ = zip(*mine, strict=True)
    assert norms[0] == norms[1]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(w, weights[1][n]) for n, w in weights[0].items())
    return [sum(each) / ranks.WORLD for each in zip(*losses, strict=True)], norms[0], weights[0]


@pytest.mark.parametrize("name", ["ddp whole", "ddp blocks", "fsdp whole", "fsdp blocks"])
def test_as_one_process(name, found):
    """Losses, clipped norms and weights after two steps of two accumulated micro-batches are those of eager PyTorch in
    one process; there are segments on each rank, and each rank's own loss is another."""
    losses, norms, weights = results(found, name)
    exact = ranks.one_process(ranks.build())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(exact[0]), rtol=CLOSE, atol=0.0)
    # PyTorch's float32 norm of 384,000 numbers, and of its halves: eager FSDP is as far from one process
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(exact[1]), rtol=1e-4, atol=0.0)
    assert min(norms) > ranks.CLIP
    assert weights.keys() >= exact[2].keys()
    far = {n: e for n, w in exact[2].items() if (e := relative_error(weights[n], w)) > CLOSE}
    assert not far
    assert all(rank[name][3] >= 4 for rank in found)
    assert found[0][name][0] != found[1][name][0]


def test_mixed_precision_of_fsdp(found):
    """bfloat16 parameters of float32 shards: the weights move as near to float32's as eager's do."""
    start = dict(ranks.build().named_parameters())
    exact = ranks.one_process(ranks.build())[2]
    (_, _, ours), (_, _, eager) = (results(found, f"fsdp bfloat16{which}") for which in ("", " eager"))
    assert all(w.dtype is torch.float32 for w in ours.values())
    for name, p in start.items():
        moved = exact[name] - p.detach()
        mine, theirs = ((w[name] - exact[name]).norm() / moved.norm() for w in (ours, eager))
        assert mine < 1.3 * theirs + 2**-9, name
