"""The demo's text: the same bytes for everybody, and windows of it."""

import sysconfig
from pathlib import Path

import torch

from codetta.audit.corpus import LIMIT, Corpus, standard_library


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


def test_fresh_windows_come_once_before_they_come_again():
    text = torch.arange(250, dtype=torch.uint8)
    corpus = Corpus(text, text, files=1)
    batches = [corpus.fresh(step, (3, 10))["input_ids"] for step in range(9)]
    first = [tuple(window.tolist()) for batch in batches for window in batch]
    assert {start for start, *_ in first[:25]} == set(range(0, 250, 10))
    assert all(window == tuple(range(window[0], window[0] + 10)) for window in first)
    assert first[25:] == first[:2]
    assert first[:25] != sorted(first[:25])


def test_the_packages_of_the_library_but_not_its_tests():
    text, top = standard_library(deep=True), standard_library()
    assert text.files > top.files
    source = (Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py").read_bytes()
    everything = bytes(text.train.tolist())
    assert source in everything
    assert b"class TestPyDecode" not in everything
