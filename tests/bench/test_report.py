"""What is kept, shown and drawn of a run, and the command."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from rich.console import Console
from typer.testing import CliRunner

from codetta.bench.environment import QUERY, environment, medians
from codetta.bench.plots import OVERVIEW, SHOWN, draw, draw_errors, draw_one, draw_overview, draw_shares
from codetta.bench.profile import SHARES
from codetta.bench.report import OURS, Report, Row, timed
from codetta.bench.shapes import chosen
from codetta.cli import app
from codetta.errors import SettingsError
from codetta.timing import Timing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TIMINGS = {OURS: Timing((2.0, 3.0, 4.0)), "cuBLAS": Timing((1.0, 2.0, 4.0))}


def rows() -> list[Row]:
    blank = Row("kernels", "tiny", 64, "o", OURS)
    ours = timed(Row("kernels", "tiny", 64, "o", OURS, error=1e-3, peak=2**31), TIMINGS, "cuBLAS", {"clocks.sm": 1.0})
    base = timed(Row("kernels", "tiny", 64, "o", "cuBLAS"), TIMINGS, "cuBLAS", {})
    absent = [Row("kernels", "tiny", 64, c, "Liger", note="no liger-kernel [here]") for c in ("o", "down")]
    assert blank.bandwidth is None
    return [ours, base, *absent]


def test_a_row_holds_the_paired_ratio():
    ours, base, *_ = rows()
    assert (ours.median, ours.ratio, ours.rounds, ours.base) == (3.0, 1.5, 3, "cuBLAS")
    assert base.ratio == 1.0
    assert Row("k", "s", 1, "c", OURS, median=2.0, bytes=8000).bandwidth == 4.0  # 8 kB in 2 us are 4 GB/s


def test_rows_are_on_disk_after_each_case(tmp_path: Path):
    report = Report("kernels", tmp_path)
    for i, row in enumerate(rows()):
        report.add(row)
        found = json.loads((tmp_path / "kernels.json").read_text())
        assert len(found["rows"]) == i + 1
    assert found["ok"]
    assert found["environment"]["torch"]
    assert found["rows"][0]["ratio"] == 1.5


def test_the_table_says_what_is_absent_once():
    report = Report("kernels")
    report.add(*rows())
    console = Console(width=150, file=io.StringIO())
    with console.capture() as captured:
        console.print(report)
    text = captured.get()
    assert "1.500" in text
    assert "2.00" in text
    assert text.count("no Liger: no liger-kernel [here] (tiny o and 1 more)") == 1
    assert report.ok
    report.add(Row("kernels", "tiny", 64, "up", OURS, note="off"))
    assert not report.ok


def test_no_case_begins_when_time_is_over():
    report = Report("kernels", seconds=0.0)
    assert not report.has_time("8b o")
    assert report.to_json()["skipped"] == ["8b o"]
    assert Report("kernels").has_time("8b o")


def test_a_shape_that_there_is_not():
    with pytest.raises(SettingsError, match="no shape '3b'"):
        chosen(["3b"])
    assert [s.tokens for s in chosen(["1b", "70b"])] == [16_384, 8192]


def test_what_nvidia_smi_says():
    said = "1500, 690.5, 60\n1400, 700.1, 61\nN/A, 1, 2\n1450, 69"
    assert medians(said) == dict(zip(QUERY, (1450.0, 695.3, 60.5), strict=True))
    assert medians("") == {}
    assert environment()["packages"].keys() >= {"liger-kernel", "quack-kernels"}


def test_charts(tmp_path: Path):
    report = Report("kernels")
    report.add(*rows())
    files = draw(report.to_json(), tmp_path)
    assert [f.name for f in files] == ["kernels-tiny-over-cuBLAS.png", "memory-tiny.png"]
    assert all(f.read_bytes()[:4] == b"\x89PNG" for f in files)
    groups = {"dx": {"eager": 4e-3, "inductor": 3e-3, "codetta": 2e-3}, "loss": dict.fromkeys(("eager",), 0.0)}
    groups["loss"] |= {"inductor": 0.0, "codetta": 0.0}
    errors = {"device": "cpu", "results": [{"part": "segment", "layer": "1B", "tokens": 64, "groups": groups}]}
    assert [f.name for f in draw_errors(errors, tmp_path)] == ["errors-segment.png"]


def test_one_picture_of_all_sizes(tmp_path: Path):
    """Those that are shown and were measured, over the base in per cent, with labels that nothing hides."""
    found = json.loads((RESULTS / "layer-run1.json").read_text(encoding="utf-8"))
    (file,) = draw_overview(found, tmp_path / "new" / "layer.png")
    assert file.read_bytes()[:4] == b"\x89PNG"
    assert OVERVIEW in {f.name for f in draw(found, tmp_path)}
    assert draw_overview({**found, "rows": []}, tmp_path / "none.png") == []
    given = ["bench", "chart", str(RESULTS / "layer-run1.json"), "--out", str(tmp_path / "again.png")]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "again.png").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["paper-4096", "errors-8b-2048"])
def test_one_picture_of_a_run_with_one_chart(name, tmp_path):
    """It is the folder's, under the name that was asked for."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    (drawn,) = (draw_errors if "results" in found else draw)(found, tmp_path / "folder")
    assert draw_one(found, tmp_path / "new" / "one.png") == [tmp_path / "new" / "one.png"]
    assert (tmp_path / "new" / "one.png").read_bytes() == drawn.read_bytes()


def test_one_picture_of_several_charts_is_refused(tmp_path):
    found = json.loads((RESULTS / "kernels-8b.json").read_text(encoding="utf-8"))
    with pytest.raises(SettingsError, match="kernels-8b-over-cuBLAS"):
        draw_one(found, tmp_path / "one.png")
    assert not list(tmp_path.iterdir())


def model_rows(**milliseconds: tuple[float, ...]) -> list[dict[str, Any]]:
    """Rows of a whole model that nobody measured: the parts of a step by variant, and half a millisecond less."""
    base = next(iter(milliseconds))
    return [
        {
            "shape": "1b",
            "tokens": 16_384,
            "case": "full step",
            "variant": variant,
            "base": base,
            "profile": {kind: 1e3 * t for kind, t in zip(SHARES, parts, strict=True)},
            "median": 1e3 * sum(parts) - 500,
            "ratio": (sum(parts) - 0.5) / (sum(milliseconds[base]) - 0.5),
        }
        for variant, parts in milliseconds.items()
    ]


def test_the_parts_of_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Stacked bars in milliseconds from left to right, those named in their order, and at their ends the time of a step
    that is not profiled, with the speed-up."""
    bars: list[tuple[list[float], list[float]]] = []
    texts: list[str] = []
    barh, text = Axes.barh, Axes.text

    def drawn(self: Any, at: Any, width: Any, **given: Any) -> Any:
        bars.append((list(given["left"]), list(width)))
        return barh(self, at, width, **given)

    monkeypatch.setattr(Axes, "barh", drawn)
    monkeypatch.setattr(Axes, "text", lambda s, x, y, t, **k: texts.append(t.strip()) or text(s, x, y, t, **k))
    rows = model_rows(compile=(0, 60, 20, 5, 14, 1.5), ours=(40, 20, 10, 5, 5, 0.5), eager=(0, 60, 20, 5, 30, 10.5))
    found = {"level": "model", "rows": rows, "environment": {"gpu": None}}
    (tmp_path / "model.json").write_text(json.dumps(found))
    file = tmp_path / "profile.png"
    given = ["bench", "chart", str(tmp_path / "model.json"), "--out", str(file), "--variants", "eager,ours"]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert file.read_bytes()[:4] == b"\x89PNG"
    assert [width for _, width in bars] == [[0, 40], [60, 20], [20, 10], [5, 5], [30, 5], [10.5, 0.5]]
    assert bars[-1][0] == [115, 80]
    assert texts == ["125.0 ms, 0.80x", "80.0 ms, 1.25x"]
    assert [f.name for f in draw(found, tmp_path)] == ["model-1b.png"]
    with pytest.raises(SettingsError, match="one picture for 2 cases"):
        draw_shares({**found, "rows": [*rows, {**rows[0], "shape": "8b"}]}, file)


def test_the_overview_draws_the_ratios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = json.loads((RESULTS / "layer-run1.json").read_text(encoding="utf-8"))
    drawn: list[float] = []
    real = Axes.bar
    monkeypatch.setattr(
        Axes, "bar", lambda self, at, heights, *a, **k: drawn.extend(heights) or real(self, at, heights, *a, **k)
    )
    draw_overview(found, tmp_path / "layer.png")
    want = [100 * (r["ratio"] - 1) for r in found["rows"] if r["variant"] in SHOWN and r["ratio"]]
    assert sorted(drawn) == pytest.approx(sorted(want))
    assert len(drawn) == 3 * 2 * 3


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_measures_prints_and_draws(tmp_path: Path):
    given = ["bench", "kernels", "--shapes", "tiny", "--rounds", "1", "--only", "o: residual", "--variants", "compile"]
    done = CliRunner().invoke(app, [*given, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "o: residual, partial RMS" in done.output
    assert {f.name for f in tmp_path.iterdir()} == {"kernels.json", "kernels-tiny-over-cuBLAS.png"}
    drawn = CliRunner().invoke(
        app, ["bench", "chart", str(tmp_path / "kernels.json"), "--out", str(tmp_path / "again")]
    )
    assert drawn.exit_code == 0, drawn.output
    assert len(list((tmp_path / "again").iterdir())) == 1


def test_json_is_all_that_is_printed():
    given = [
        "bench",
        "paper",
        "--shapes",
        "tiny",
        "--rounds",
        "1",
        "--only",
        "RMS scale",
        "--variants",
        "none",
        "--json",
    ]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {(r["case"], r["variant"]) for r in found["rows"]} == {("GEMM + RMS scale", v) for v in (OURS, "cuBLAS")}


@pytest.mark.parametrize("given", [["bench", "models"], ["bench", "chart"], ["bench", "layer", "--memory", "tiny"]])
def test_what_means_nothing_is_said(given: list[str]):
    assert CliRunner().invoke(app, given).exit_code == 2
