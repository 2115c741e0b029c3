"""The README, docs/explain.md and docs/conditions.md name what there is, and nothing else."""

import ast
import re
from dataclasses import fields
from pathlib import Path

from codetta.audit.models import PRESETS
from codetta.audit.parts import Half
from codetta.capture.options import CHOICES, BackendOptions
from codetta.cli import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXPLAIN = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
FOR_TESTS = {"rewrite", "widen"}


def test_commands_and_presets():
    assert set(re.findall(r"`?codetta (\w+)", README)) - {"import"} >= set(COMMANDS) - {"demo"}
    assert all(f"`{name}`" in README for name in PRESETS)


def test_options_of_the_backend():
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|", README, re.M))
    assert rows.keys() == {f.name for f in fields(BackendOptions)} - FOR_TESTS
    for name, values in rows.items():
        assert set(re.findall(r"`(\w+)`", values)) == {str(c) for c in CHOICES[name]}
        assert values.startswith(f"`{getattr(BackendOptions(), name)}`"), f"the default of {name} comes first"


def test_keys_of_the_json():
    block = EXPLAIN.partition("## JSON")[2].partition("segments:")[0]
    block = re.sub(r"\{.*?\}", "", block).replace("forward, backward:", "")
    assert set(re.findall(r"\w+", block)) == {f.name for f in fields(Half)}


def test_files_that_are_linked_exist():
    for page in (README, *(p.read_text(encoding="utf-8") for p in (ROOT / "docs").glob("*.md"))):
        base = ROOT if page is README else ROOT / "docs"
        for link in re.findall(r"\]\((?!http)([^)#]+)", page):
            assert (base / link).exists(), link


def test_conditions_are_where_the_page_says():
    """Each row names tests, which name the condition."""
    page = (ROOT / "docs" / "conditions.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (C\d\d) \| [^|]+ \| ([^|]+) \|", page, re.M))
    assert list(rows) == [f"C{i:02}" for i in range(1, 35)]
    named: dict[str, set[str]] = {c: set() for c in rows}
    on_models = "families/test_conditions"
    for file in (ROOT / "tests").rglob("test_*.py"):
        name = file.relative_to(ROOT / "tests").with_suffix("").as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documented = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.FunctionDef, ast.ClassDef))]
        texts = [text for n in documented if (text := ast.get_docstring(n)) and "are in test_" not in text]
        for c in {c for text in texts for c in re.findall(r"\bC\d\d\b", text)} & named.keys():
            named[c].add(name)
    for c, cell in rows.items():
        files = set(re.findall(r"`([^`]+)`", cell))
        assert files, c
        assert files <= named[c], c
    marked = set(re.findall(r"^\| (C\d\d) .* \| yes \|$", page, re.M))
    assert marked == {c for c, files in named.items() if on_models in files}
