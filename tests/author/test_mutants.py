"""A sample of `benchmarks/mutate_epilogues.py`: `codetta check --quick` notices wrong epilogues."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from codetta.author.file import load

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "epilogues").glob("*.py"))


@pytest.fixture(scope="module")
def mutate():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("mutate_epilogues")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_mutants_are_noticed(mutate, file, tmp_path):
    found = [m for authored in load(str(file)) for m in mutate.chosen(authored, 3, seed=7)]
    assert len(found) >= 3
    states = {str(m): mutate.verdict(m, tmp_path)[0] for m in found}
    assert not [m for m, state in states.items() if state == "survives"]


def test_there_are_ten_of_every_example_and_of_every_kind(mutate):
    kinds = set()
    for file in FILES:
        found = {m for authored in load(str(file)) for m in mutate.mutants(authored)}
        assert len(found) >= 10, file
        kinds |= {m.kind for m in found}
    assert kinds == set(mutate.KINDS)


def test_the_program_itself_is_no_mutant(mutate, tmp_path):
    (authored,) = load(str(FILES[0]))
    source = FILES[0].read_text(encoding="utf-8")
    same = mutate.Mutant(FILES[0], authored.name, 0, "none", "", source)
    assert mutate.verdict(same, tmp_path) == ("survives", "")
    assert all(m.text != source for m in mutate.mutants(authored))
