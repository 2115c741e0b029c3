"""docs/models.md holds what is counted today."""

import re
from pathlib import Path

import pytest

from codetta.audit.families import FAMILIES
from codetta.audit.table import HEAD, REGIMES, rows_of

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
WRITE = "`codetta explain families > docs/models.md` writes it anew"


def section(regime: str) -> list[str]:
    """The lines below a heading."""
    return PAGE.partition(f"## {regime}\n")[2].partition("\n## ")[0].splitlines()


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_of_a_family(family):
    for regime, row in rows_of(family).items():
        written = [line for line in section(regime) if line.startswith(f"| {row.family} |")]
        counted = [f"| {' | '.join(cells)} |" for cells in (row.cells, *row.leftovers, *row.split)]
        assert counted == written, WRITE


def test_the_page_is_of_these_families_and_no_others():
    titles = ["family", *(f.title for f in FAMILIES.values())]
    assert PAGE.startswith(HEAD.partition("{")[0])
    for regime in REGIMES:
        first = dict.fromkeys(re.findall(r"^\| ([^|]+) \|", "\n".join(section(regime)), re.M))
        assert list(first) == titles, WRITE
