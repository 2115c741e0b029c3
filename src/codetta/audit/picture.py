"""The demo's picture: loss curves, and the bytes that a layer moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codetta.errors import UnsupportedError

COLORS = {"eager operators": "#b8bec8", "ideal fusion between GEMMs": "#7fa3c7", "codetta": "#d1495b"}
INK = "#333333"


@dataclass(frozen=True, slots=True)
class Bars:
    """Bytes by way, forward and backward."""

    title: str
    forward: dict[str, float]
    backward: dict[str, float]


def require() -> None:
    """Raise at once, and not after minutes of training, if there is nothing to draw with."""
    _figure()


def draw(path: Path, losses: Mapping[str, Sequence[float]], bars: Bars) -> None:
    """Write the picture; its folder is made."""
    figure = _figure()(figsize=(9.6, 3.6), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2)
    _curves(left, losses)
    _bars(right, bars)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _curves(axes: Any, losses: Mapping[str, Sequence[float]]) -> None:
    styles = (
        {"color": "#b8bec8", "linewidth": 5.0},
        {"color": "#d1495b", "linewidth": 1.4},
        {"color": "#7fa3c7", "linewidth": 1.0, "linestyle": ":"},
    )
    for (name, values), style in zip(losses.items(), styles, strict=True):
        axes.plot(range(1, len(values) + 1), values, label=name, **style)
    axes.set_title("measured: the same training run", fontsize=10, color=INK, loc="left")
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss (nats per byte)", color=INK)
    axes.legend(frameon=False)


def _bars(axes: Any, bars: Bars) -> None:
    width = 0.26
    for k, (name, color) in enumerate(COLORS.items()):
        heights = [bars.forward[name] / 1e9, bars.backward[name] / 1e9]
        drawn = axes.bar([i + (k - 1) * width for i in range(2)], heights, width * 0.94, label=name, color=color)
        axes.bar_label(drawn, fmt="%.1f", fontsize=8, color=INK, padding=1)
    axes.set_xticks([0, 1], ["forward", "backward"])
    axes.set_title(bars.title, fontsize=10, color=INK, loc="left")
    axes.set_ylabel("GB moved outside of GEMM operands", color=INK)
    axes.margins(y=0.12)
    axes.legend(frameon=False, loc="upper left", fontsize=9)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError(
            "the demo draws with matplotlib, which is not installed", hint="pip install 'codetta[bench]'"
        ) from None
    return Figure
