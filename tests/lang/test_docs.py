"""The language reference is complete, its programs trace, and its error reads as the real one does."""

import inspect
import linecache
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import codetta
from codetta.errors import BlockLocalError
from codetta.lang.functions import LANGUAGE

REFERENCE = (Path(__file__).parents[2] / "docs" / "language.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", REFERENCE, re.S)


def call(name: str, function: Callable[..., object]) -> str:
    """The function as it is called: ``halves(x, groups=1)``."""
    shown = []
    for p in inspect.signature(function).parameters.values():
        star = "*" if p.kind is p.VAR_POSITIONAL else ""
        shown.append(f"{star}{p.name}" if p.default is p.empty else f"{p.name}={p.default}")
    return f"{name}({', '.join(shown)})"


@pytest.mark.parametrize("name", LANGUAGE)
def test_every_function_is_in_the_reference(name: str):
    meaning = (inspect.getdoc(LANGUAGE[name]) or "").replace("``", "`").replace("\n", " ").replace("|", "\\|")
    assert f"| `{call(name, LANGUAGE[name])}` | {meaning} |" in REFERENCE


def test_the_reference_names_no_other_function():
    rows = re.findall(r"^\| `(\w+)\(", REFERENCE, re.M)
    assert sorted(rows) == sorted(LANGUAGE)


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
