"""``codetta show``: the passes are those of the compiler, marks are right, the page needs nothing else."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from codetta.audit.graph_text import Names, graph_lines
from codetta.audit.models import Request, find
from codetta.audit.page import page
from codetta.audit.passes import GROUPS, Pass, Shown, graph_pass, new_lines, stages
from codetta.audit.show import show_segment
from codetta.backends.hopper.choose import lowered_of
from codetta.cli import app
from codetta.core.types import bf16, colvec, f32, tile
from codetta.errors import SettingsError
from codetta.ir.build import cast, input_, matmul, mul
from codetta.ir.graph import Graph
from codetta.lang.source import parse_program
from codetta.rules.pipeline import FORWARD, reparameterise
from codetta.runtime.author import vjp

EXAMPLES = Path(__file__).parents[2] / "examples" / "epilogues"


@pytest.fixture(scope="module")
def llama() -> Shown:
    return show_segment(find(Request("llama-tiny", 2, dtype="bf16"), weights=False), None)


def two_gemms() -> Graph:
    x, w, v, r = (
        input_("x", tile(8, bf16)),
        input_("w", tile(8, bf16, rows=16)),
        input_("v", tile(16, bf16, rows=8)),
        input_("r", colvec(f32)),
    )
    return Graph((x, w, v, r), (("y", matmul(cast(mul(matmul(x, w, "nt"), r), bf16), v, "nt")),))


def test_the_groups_are_all_rules_that_the_compiler_applies_forward():
    assert [r for _, group in GROUPS for r in group] == FORWARD


def test_the_last_stage_is_what_the_compiler_makes(monkeypatch):
    seen = []
    monkeypatch.setattr("codetta.audit.show.forward_passes", lambda graph, names: seen.append(graph) or [])
    show_segment(find(Request("llama-tiny", 2, dtype="bf16"), weights=False), None)
    for graph in (seen[0], two_gemms()):
        *_, (_, _, last) = stages(graph)
        assert last.outputs == reparameterise(graph).outputs


def test_a_value_that_a_pass_leaves_alone_keeps_its_name():
    graph, names = two_gemms(), Names()
    assert [line.text for line in graph_lines(graph, names)] == [
        "x: Tile[8, bf16]",
        "w: Tile[16, 8, bf16]",
        "v: Tile[8, 16, bf16]",
        "r: ColVec[f32]",
        "t1 = x @ w.T  # Tile[16, f32]",
        "t2 = to(t1 * r, bf16) @ v.T  # Tile[8, f32]",
        "return y = t2",
    ]
    *_, (_, note, after) = [s for s in stages(graph) if s[0] == "row scales through GEMMs"]
    text = graph_pass("", "", after, names, graph)
    assert text.text.splitlines()[0] == "t1 = x @ w.T  # Tile[16, f32]"
    assert text.text.splitlines()[-1].endswith(" * r")
    assert 0 not in text.new
    assert text.text.count("\n") in text.new
    assert "(x1)" in note


@pytest.mark.parametrize(
    "before,after,wanted",
    [("a\nb", "a\nb", ()), ("a\nb", "a\nc\nb", (1,)), ("a\nb", "c\nb", (0,)), ("a\nb", "b", ()), ("", "a", (0,))],
)
def test_new_lines(before, after, wanted):
    assert new_lines(before, after) == wanted


def test_a_model(llama):
    names = [p.name for p in llama.passes]
    assert names[: len(GROUPS) + 2] == ["captured", "siblings", *(n for n, _ in GROUPS)]
    assert {"forward and backward", "plan, forward", "plan, backward"} <= set(names)
    assert sum(n.startswith("kernel: forward") for n in names) == 4
    joint = next(p for p in llama.passes if p.name == "forward and backward")
    lines = joint.text.splitlines()
    assert any(lines[i].startswith("return d_o_proj_weight") for i in joint.new)
    assert not any(lines[i].startswith("return q_proj") for i in joint.new)


def test_no_such_segment():
    with pytest.raises(SettingsError, match="no segment 9"):
        show_segment(find(Request("llama-tiny", 1), weights=False), 9)


class Tags(HTMLParser):
    """What a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_else(llama):
    text = page([llama])
    found = Tags()
    found.feed(text)
    assert not found.open
    assert found.tags.count("details") == len(llama.passes)
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert not {"src", "href"} & {name for name, _ in found.attributes}
    assert "url(" not in text
    assert "http" not in text
    assert found.attributes.count(("class", "new")) == sum(len(p.new) for p in llama.passes)
    for p in llama.passes:
        assert all(line.rstrip() in found.text for line in p.text.splitlines())


def test_the_page_escapes_what_it_shows():
    found = page([Shown("a <b> & c", (Pass("x<y", "n", "a < b"),))])
    assert "<b>" not in found
    assert "a &lt; b" in found.replace('</span><span class="r1">', "")


def test_a_program_as_json_and_as_a_page(tmp_path):
    out = tmp_path / "show.html"
    place = f"{EXAMPLES / '05_rope.py'}::rope"
    result = CliRunner().invoke(app, ["show", place, "--json", "--html", str(out)])
    assert result.exit_code == 0, result.output
    (shown,) = json.loads(result.stdout)["shown"]
    texts = {p["name"]: p["text"] for p in shown["passes"]}
    assert set(shown["passes"][0]) == {"name", "note", "text", "new_lines"}
    real = parse_program(texts["at real sizes"] + "\n")
    assert real.gemm is not None
    assert real.gemm.dtype is bf16
    assert lowered_of(vjp(real, width=4096).forward).source.rstrip() == texts["kernel: forward, weight"]
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_every_program_of_a_file():
    result = CliRunner().invoke(app, ["show", str(EXAMPLES / "07_layer_norm.py")])
    assert result.exit_code == 0, result.output
    assert "layer_norm_statistics (finalize)" in result.stdout
    assert "shifted (epilogue)" in result.stdout
