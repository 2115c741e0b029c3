"""Every code block of docs/authoring, llms.txt and AGENTS.md runs, and says what the page says it does.

A Python block that begins with ``# file: NAME`` is written; other Python blocks run. Commands run in order, in the
folder of the files, with ``--quick`` added to ``check``: kernels are compiled elsewhere. ``# exit N`` is a command's
exit code. A text block behind commands holds lines, or parts of lines, of what they print."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from codetta.author.check import check
from codetta.author.conditions import WAYS
from codetta.author.kernels import Kernel
from codetta.author.tables import KINDS
from codetta.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "authoring").glob("*.md")), ROOT / "llms.txt", ROOT / "AGENTS.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INSTALL = ("python -m venv", ". .venv", "pip install", "git clone", "python benchmarks/")
REFUSED = {"clipped.py": 2, "rms_norm.py": 2, "softcap.py": 1, "centred.py": 2}


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def written(text: str) -> str | None:
    found = re.match(r"# file: (\S+)\n", text)
    return found.group(1) if found else None


def run(line: str) -> str:
    command, _, wanted = line.partition("  # exit ")
    words = shlex.split(command, comments=True)
    assert words[0] == "codetta", line
    quick = ["--quick"] if words[1] == "check" and "--quick" not in words else []
    result = CliRunner().invoke(app, [*words[1:], *quick])
    assert result.exit_code == int(wanted or 0), f"{line}: {result.output}{result.stderr}"
    return result.output + result.stderr


def plain(text: str) -> str:
    """On one line, so that wrapping does not matter."""
    return " ".join(text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_runs(page, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    output = ""
    for kind, text in blocks(page):
        if kind == "python" and (name := written(text)):
            Path(name).write_text(text, encoding="utf-8")
        elif kind == "python":
            exec(compile(text, f"<{page.name}>", "exec"), {"__name__": "page"})
        elif kind == "sh":
            lines = [line for line in text.splitlines() if not line.startswith(INSTALL)]
            output = "".join(run(line) for line in lines if not (line.startswith("codetta new") and _exists(line)))
        elif kind == "text":
            missing = [
                line for line in text.splitlines() if page.name != "reference.md" and plain(line) not in plain(output)
            ]
            assert not missing, output
        else:
            pytest.fail(f"a block of kind {kind!r}: {text[:80]}")


def _exists(line: str) -> bool:
    return Path(f"{line.split()[2]}.py").exists()


FILES = [(page, name, text) for page in PAGES for kind, text in blocks(page) if (name := written(text))]


@pytest.mark.parametrize("page,name,text", FILES, ids=[f"{page.name}-{name}" for page, name, _ in FILES])
def test_every_file_of_a_page_is_right_or_refused(page, name, text, tmp_path):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["check", str(file), "--quick"])
    assert result.exit_code == REFUSED.get(name, 0), result.output + result.stderr


def test_the_page_of_context_gives_no_program_of_the_experiment():
    """Its examples share no computation with a task: they show the same language at other work."""
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    code = "".join(block for kind, block in BLOCK.findall(text) if kind == "python")
    assert not re.findall(r"silu|sigmoid|logsumexp|select_column|rstd|residual|gain", code)
    assert len(text) < 16_000


def test_the_page_of_context_names_all_of_the_json():
    names = set(re.findall(r"`(\w+)`", (ROOT / "llms.txt").read_text(encoding="utf-8")))
    report = check(str(ROOT / "examples" / "epilogues" / "01_bias_gelu.py"), quick=True).to_json()
    (program,) = report["programs"]
    kernel = Kernel("f", "forward", "kernel").to_json()
    assert {*report, *program, *program["comparisons"][0], *kernel} <= names
    assert {*KINDS, *WAYS} <= names


def test_the_tutorial_begins_with_what_new_writes(tmp_path):
    found = next(text for kind, text in blocks(ROOT / "docs" / "authoring" / "tutorial.md") if written(text))
    assert run(f"codetta new my_epilogue --folder {tmp_path}")
    made = (tmp_path / "my_epilogue.py").read_text(encoding="utf-8")
    code = [line for line in made.splitlines() if line.strip() and not line.startswith(("#", '"""'))]
    assert code == [line for line in found.splitlines() if line.strip() and not line.startswith("#")]
    assert check(str(tmp_path / "my_epilogue.py"), quick=True).ok


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_linked_exist(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link
