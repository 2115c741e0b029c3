"""The timing protocol, on wall times."""

from __future__ import annotations

import time

import pytest

from codetta import timing
from codetta.timing import Timing, launch_times, measure, measure_alone


def test_quantiles_and_paired_ratio():
    a, b = Timing((1.0, 2.0, 3.0, 4.0, 50.0)), Timing((2.0, 4.0, 6.0, 8.0, 10.0))
    assert (a.median, a.p10, a.p90) == (3.0, pytest.approx(1.4), pytest.approx(31.6))
    assert a.over(b) == 0.5  # the one slow round does not count
    assert Timing((7.0,)).p90 == 7.0


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("on_a_cpu")
def test_every_round_calls_each_variant_once_behind_the_filler_in_another_order():
    calls: list[str] = []
    told: list[tuple[int, int]] = []
    variants = {n: (lambda n=n: calls.append(n)) for n in "abcd"}
    found = measure(variants, rounds=20, filler=lambda: calls.append("-"), progress=lambda *given: told.append(given))
    assert {n: len(t.samples) for n, t in found.items()} == dict.fromkeys("abcd", 20)
    assert calls[::2] == ["-"] * (len(calls) // 2)
    rounds = [tuple(calls[i + 1 : i + 8 : 2]) for i in range(0, len(calls), 8)]
    assert len(rounds) == 20 + timing.WARM_ROUNDS
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert len(set(rounds)) > 5
    assert told[-1] == (20, 20)


@pytest.mark.usefixtures("on_a_cpu")
def test_times_are_microseconds_and_the_seed_decides_the_order():
    orders: list[list[str]] = [[], []]
    for order in orders:
        measure({n: (lambda n=n, o=order: o.append(n)) for n in "abc"}, rounds=5, seed=3)
    assert orders[0] == orders[1]
    found = measure({"slow": lambda: time.sleep(0.005), "quick": lambda: None}, rounds=5)
    assert 4e3 < found["slow"].median < 2e5
    assert found["slow"].over(found["quick"]) > 10


@pytest.mark.usefixtures("on_a_cpu")
def test_a_budget_ends_the_rounds_but_not_before_five():
    found = measure({"slow": lambda: time.sleep(0.002)}, rounds=1000, budget=0.0)
    assert len(found["slow"].samples) == timing.FEWEST_ROUNDS


@pytest.mark.usefixtures("on_a_cpu")
def test_a_run_of_its_own_is_one_variant_over_and_over():
    calls: list[str] = []
    told: list[tuple[int, int]] = []
    variants = {n: (lambda n=n: (calls.append(n), time.sleep(0.001))) for n in "abc"}
    found = measure_alone(variants, rounds=4, seconds=0.02, progress=lambda *given: told.append(given))
    assert {n: len(t.samples) for n, t in found.items()} == dict.fromkeys("abc", 4)
    assert all(1e3 < s < 5e4 for t in found.values() for s in t.samples)
    runs = [n for i, n in enumerate(calls) if not i or calls[i - 1] != n]
    assert len(calls) > 4 * len(runs)
    assert sorted(runs[:3]) == list("abc")
    assert told[-1] == (4, 4)
    once = measure_alone(variants, rounds=50, seconds=0.02, budget=0.0)
    assert len(once["a"].samples) == 1


@pytest.mark.usefixtures("on_a_cpu")
def test_launch_times_leave_out_what_is_freed():
    class Heavy:
        def __del__(self) -> None:
            time.sleep(0.003)

    found = launch_times({"a": Heavy, "b": lambda: None}, calls=4)
    assert found["a"].median < 2e3
    assert len(found["b"].samples) == 4


def test_on_a_gpu_events_lie_around_the_call_behind_the_filler(monkeypatch: pytest.MonkeyPatch):
    """Nothing waits inside a round, and the events' milliseconds become microseconds."""
    log: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, other: Event) -> float:
            assert other is not self
            return 0.25

    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "HEAT_SECONDS", 0.0)
    found = measure({n: (lambda: log.append("call")) for n in "ab"}, rounds=3, filler=lambda: log.append("filler"))
    assert found["a"].samples == (250.0,) * 3
    assert log == [*["filler", "event", "call", "event"] * 2, "wait"] * (3 + timing.WARM_ROUNDS)
