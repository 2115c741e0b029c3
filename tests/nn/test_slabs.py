"""The model of the head's memory: the peaks that are promised, what is covered, what lent memory holds when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codetta.errors import SettingsError
from codetta.nn.slabs import OF_DEVICE, Sizes, choose, peak, regions, slabs

GIB = 1 << 30
VOCABULARY, TOKENS = 128_256, 8192
# d, mode: GiB with lent memory, in eager mode; what may be taken
PEAKS = [
    (2048, "fast", 2.4785, 2.4785),  # torch.compile's: logits, both gradients
    (4096, "fast", 2.25, 3.00),
    (8192, "fast", 3.00, 4.04),
    (2048, "lean", 0.67, 0.70),
    (4096, "lean", 1.22, 1.25),
    (8192, "lean", 2.41, 2.45),
]
SIZES = st.builds(
    Sizes,
    tokens=st.integers(1, 20_000),
    features=st.integers(1, 2048).map(lambda n: 8 * n),
    columns=st.integers(1, 300_000),
    itemsize=st.sampled_from([2, 4]),
)
MODES = st.sampled_from(["fast", "lean"])


@pytest.mark.parametrize("features, mode, most, promised", PEAKS)
def test_peaks(features, mode, most, promised):
    """8,192 tokens and a vocabulary of 128,256 in bf16, the weight's gradient included."""
    sizes = Sizes(TOKENS, features, VOCABULARY)
    assert peak(sizes, slabs(sizes, mode, True)) / GIB <= most <= promised
    without = peak(sizes, slabs(sizes, mode, False)) / GIB
    assert without <= promised


def test_what_is_kept_costs_nothing_where_tokens_are_few():
    """At 8,192 features all logits fit into the memory of the weight's gradient: lean computes nothing again."""
    sizes = Sizes(TOKENS, 8192, VOCABULARY)
    assert {s.how for s in slabs(sizes, "lean", True)} == {"lent"}
    again = [
        sum(s.columns for s in slabs(Sizes(TOKENS, d, VOCABULARY), "lean", True) if s.how == "again")
        for d in (2048, 4096)
    ]
    assert again == [VOCABULARY * 3 // 4, VOCABULARY // 2]


@given(sizes=SIZES, mode=MODES, lends=st.booleans())
def test_every_column_is_in_one_slab(sizes: Sizes, mode: str, lends: bool):
    """In order; the ranges that forward takes at once are the same columns, and what they keep is the same."""
    held = slabs(sizes, mode, lends)
    for parts in (held, tuple(regions(held, True)), tuple(regions(held, False))):
        edges = [0, *(s.stop for s in parts)]
        assert [s.start for s in parts] == edges[:-1]
        assert edges[-1] == sizes.columns
        assert all(s.columns > 0 for s in parts)
    assert [s for s in regions(held, True) if s.how != "again"] == [s for s in held if s.how != "again"]
    assert not [s for s in held if s.how == ("again" if mode == "fast" else "own")]


@given(sizes=SIZES, mode=MODES)
def test_lent_memory_is_read_before_it_is_written(sizes: Sizes, mode: str):
    """A slab's logits lie inside the weight's gradient, apart from other slabs', and the rows that earlier slabs wrote
    end before they begin."""
    end = 0
    for s in slabs(sizes, mode, True):
        if s.how != "lent":
            continue
        first = s.start * sizes.stride
        assert first >= end
        assert first >= s.start * sizes.features  # rows of slabs before this one
        end = first + s.columns * sizes.tokens
        assert end <= sizes.columns * sizes.features
        assert s.columns % 8 == 0


@given(sizes=SIZES)
def test_auto_is_fast_where_that_is_cheap(sizes: Sizes):
    """By sizes and device alone."""
    for lends in (True, False):
        assert choose(sizes, "auto", lends, sizes.logits * OF_DEVICE) == "fast"
        assert choose(sizes, "lean", lends, 0) == "lean"
        assert choose(sizes, "auto", lends, 1 << 50) == "fast"
    assert choose(sizes, "auto", False, 1) == "lean"
    assert choose(sizes, "auto", False, sizes.logits * OF_DEVICE - 1) == "lean"
    with pytest.raises(SettingsError, match="memory='both'"):
        choose(sizes, "both", True, 0)
