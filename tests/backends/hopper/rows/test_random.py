"""Random programs of every role: the kernels give in float64 what the reference backend gives."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interpreted import expect_reference, random_program

ROWS = [1, 3, 7]


@pytest.mark.parametrize("role", ["finalize", "leftover", "epilogue"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_programs(role: str, seed: int):
    rng = Random(seed)
    expect_reference(random_program(rng, role), rng.choice(ROWS), 1e-9, seed)
