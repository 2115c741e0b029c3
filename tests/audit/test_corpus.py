"""The demo's text: the same bytes for everybody, and windows of it."""

import sysconfig
from pathlib import Path

import torch

from codetta.audit.corpus import LIMIT, standard_library


def test_bytes_of_the_standard_library():
    corpus = standard_library()
    assert len(corpus.train) + len(corpus.held_out) <= LIMIT
    first = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[0].read_bytes()
    assert bytes(corpus.train[: len(first)].tolist()) == first


def test_batches_depend_on_the_seed_alone():
    corpus = standard_library()
    a, b, c = (corpus.batch(seed, (4, 16))["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert a.shape == (4, 16)
    assert a.dtype is torch.long
    assert torch.equal(corpus.judge(3, 8)["labels"], corpus.judge(3, 8)["labels"])
