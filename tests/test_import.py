"""`import codetta` is cheap, and its public names are where the table says."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import codetta

PACKAGE = Path(codetta.__file__).parent
HEAVY = {"cutlass", "matplotlib", "numpy", "quack", "rich", "torch", "transformers", "triton", "typer"}


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after ``statement`` and did not hold before."""
    code = f"import json, sys; before = set(sys.modules); {statement}; print(json.dumps([*set(sys.modules) - before]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


def exported_to_type_checkers() -> dict[str, str]:
    """Name to module, as the imports for type checkers at the top of the package say."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: node.module or ""
        for block in tree.body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_import_loads_nothing_heavy():
    loaded = loaded_by("import codetta")
    assert not {name.partition(".")[0] for name in loaded} & HEAVY
    assert {name for name in loaded if name.startswith("codetta")} == {"codetta"}


def test_import_changes_no_global_state():
    loaded_by(
        "import logging, warnings; state = lambda: ([*warnings.filters], [*logging.root.handlers]); "
        "was = state(); import codetta; assert state() == was"
    )


def test_type_checkers_see_the_table():
    assert exported_to_type_checkers() == codetta._HOME


@pytest.mark.parametrize("name", codetta._HOME)
def test_public_name_resolves(name: str):
    file = PACKAGE.parent / codetta._HOME[name].replace(".", "/")
    if not file.with_suffix(".py").exists() and not file.is_dir():
        pytest.skip(f"{codetta._HOME[name]} is not written yet")
    value = getattr(codetta, name)
    assert value is getattr(importlib.import_module(codetta._HOME[name]), name)
    assert name in dir(codetta)


@pytest.mark.parametrize("name", codetta._HOME)
def test_public_name_is_not_also_a_module(name: str):
    # Importing `codetta.verify` the package would replace `codetta.verify` the function, silently, for everybody.
    assert not (PACKAGE / name).exists()
    assert not (PACKAGE / f"{name}.py").exists()


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'epilog'"):
        _ = codetta.epilog
