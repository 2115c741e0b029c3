"""The language reference is complete, its programs trace, and its error reads as the real one does."""

import linecache
import re
from pathlib import Path

import pytest

import codetta
from codetta.audit.language_page import CALLS, FAMILIES, language_page
from codetta.errors import BlockLocalError
from codetta.lang.functions import LANGUAGE

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "language.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", REFERENCE, re.S)


def test_the_reference_is_up_to_date():
    """`codetta show language > docs/authoring/reference.md` makes it so."""
    assert (DOCS / "authoring" / "reference.md").read_text(encoding="utf-8") == language_page()


def test_every_function_is_in_the_reference():
    assert set(CALLS) == set(LANGUAGE)
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(LANGUAGE)


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_call_of_the_reference_calls_the_function(name: str):
    assert CALLS[name][0].startswith(f"{name}(")
    assert "{}" in CALLS[name][1]


def test_every_function_is_public():
    assert set(codetta._EXPORTS["codetta.lang.functions"]) == set(LANGUAGE)


PUBLIC = [name for name, module in codetta._HOME.items() if module.startswith(("codetta.lang", "codetta.core"))]


def trace(source: str) -> None:
    linecache.cache["norm.py"] = (len(source), None, source.splitlines(keepends=True), "norm.py")
    exec(compile(source, "norm.py", "exec"), {name: getattr(codetta, name) for name in PUBLIC})


@pytest.mark.parametrize("source", [b for b in BLOCKS if "# refused" not in b], ids=lambda b: b.split("(")[0][-20:])
def test_the_programs_of_the_reference_trace(source: str):
    trace(source)


@pytest.mark.parametrize("source", [b for b in BLOCKS if "# refused" in b])
def test_the_error_of_the_reference_is_the_real_one(source: str):
    with pytest.raises(BlockLocalError) as caught:
        trace(source)
    assert f"```text\nBlockLocalError: {caught.value}\n```" in REFERENCE
