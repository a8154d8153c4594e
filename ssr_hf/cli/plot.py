"""The timeline of one generation as a picture; needs the extra `plot` (matplotlib)."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ssr_hf

from .console import InputError
from .timeline import KINDS, answer_start, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
_COLOURS = {
    "prompt": "#b8bec6",
    "thinking": "#8a94a3",
    "draft": "#8fc9a3",
    "verification": "#2f9e5b",
    "suffix": "#2a9fb0",
    "decoding": "#d9a441",
}


def require_matplotlib(path: Path) -> None:
    """Refuses a picture that could not be drawn.

    Raises:
        `InputError`: matplotlib is not installed, or the file's format is unknown.
    """
    if find_spec("matplotlib") is None:
        raise InputError(
            "--plot needs matplotlib, which is not installed. Run pip install matplotlib, or "
            "leave --plot out for the chart in the terminal."
        )
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--plot is {str(path)!r}. A name in {', '.join(FORMATS)} is accepted.")


def save_picture(stats: ssr_hf.SpeculationStats, subtitle: str, path: Path) -> None:
    """Draws the timeline into a file.

    Raises:
        `InputError`: The file cannot be written.
    """
    try:
        draw(stats, subtitle).savefig(path, dpi=160)
    except OSError as error:
        raise InputError(f"--plot {path} cannot be written: {error}") from error


def draw(stats: ssr_hf.SpeculationStats, subtitle: str) -> Figure:
    """The timeline above, the number of tokens over time below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), layout="constrained")
    rows, curve = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    rows.set_title("Self-speculation, one generation\n", loc="left", fontsize=12, fontweight="bold")
    rows.text(0, 1.03, subtitle, transform=rows.transAxes, fontsize=9, color="#555b63")
    _draw_rows(rows, stats)
    _draw_curve(curve, stats)
    answer = answer_start(stats)
    if answer is not None:
        curve.annotate(
            "answer",
            (answer, 0),
            textcoords="offset points",
            xytext=(4, 4),
            fontsize=8,
            color="#555b63",
        )
    for axes in (rows, curve):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="x", color="#e6e8eb")
        if answer is not None:
            axes.axvline(answer, color="#555b63", linewidth=0.8, linestyle=":")
    return figure


def _draw_rows(axes: Any, stats: ssr_hf.SpeculationStats) -> None:
    for span in timeline(stats):
        at = KINDS.index(span.kind)
        axes.barh(at, span.seconds, left=span.start, height=0.62, color=_COLOURS[span.kind])
    axes.set_yticks(range(len(KINDS)), KINDS)
    axes.set_ylim(len(KINDS) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _draw_curve(axes: Any, stats: ssr_hf.SpeculationStats) -> None:
    ends = [0.0, *(entry.start + entry.seconds for entry in stats.rounds)]
    tokens = [0, *accumulate(entry.n_committed for entry in stats.rounds)]
    axes.step(ends, tokens, where="post", color="#33383f", linewidth=1.4)
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens")
    axes.set_ylim(bottom=0)
