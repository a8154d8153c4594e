"""The timeline of one generation, drawn with characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

import ssr_hf

from .timeline import KINDS, Span, answer_start, timeline

KIND_STYLES = {
    "prompt": "dim",
    "thinking": "dim",
    "draft": "green",
    "verification": "bold green",
    "suffix": "cyan",
    "decoding": "default",
}
_SHADES = " ░▒▓█"
_LABEL = 14
_FACTS = 27
_MARGIN = 2


def print_chart(console: Console, stats: ssr_hf.SpeculationStats) -> None:
    """Draws one row per kind of work, time from left to right, with its figures beside it."""
    spans = timeline(stats)
    end = max((span.start + span.seconds for span in spans), default=0.0)
    n_cells = max(10, console.width - _LABEL - _FACTS - 2 * _MARGIN)
    for kind in KINDS:
        own = [span for span in spans if span.kind == kind]
        row = Text(" " * _MARGIN).append(f"{kind:<{_LABEL}}")
        row.append(_cells(own, end, n_cells), KIND_STYLES[kind])
        row.append(f"{_facts(kind, own):>{_FACTS}}", "dim")
        console.print(row, soft_wrap=True)
    axis = Text(" " * (_MARGIN + _LABEL)).append(_axis(answer_start(stats), end, n_cells), "dim")
    console.print(axis.append(f"{f'total {end:.2f} s':>{_FACTS}}", "dim"), soft_wrap=True)


def _axis(answer: float | None, end: float, n_cells: int) -> str:
    """The time axis, with the moment at which thinking had ended."""
    line = f"{0:<{n_cells}}"
    if answer is None or not end:
        return line
    at = min(int(answer / end * n_cells), n_cells - 1)
    note = "▲ answer"
    if at + len(note) > n_cells:
        note = "answer ▲"
        at -= len(note) - 1
    return line[: max(at, 0)] + note + line[at + len(note) :]


def _cells(spans: Sequence[Span], end: float, n_cells: int) -> str:
    """One character per stretch of time, the darker the more of it the spans cover."""
    width = end / n_cells if end else 1.0
    cells = []
    for at in range(n_cells):
        left, right = at * width, (at + 1) * width
        covered = sum(
            max(0.0, min(right, span.start + span.seconds) - max(left, span.start))
            for span in spans
        )
        shade = min(len(_SHADES) - 1, round(covered / width * (len(_SHADES) - 1)))
        # What is too short for a shade still shows.
        cells.append(_SHADES[max(shade, int(covered > 0))])
    return "".join(cells)


def _facts(kind: str, spans: Sequence[Span]) -> str:
    if not spans:
        return "–"
    seconds = sum(span.seconds for span in spans)
    tokens = sum(span.tokens for span in spans)
    if kind in ("verification", "suffix"):
        accepted, proposed = (
            sum(span.accepted for span in spans),
            sum(span.proposed for span in spans),
        )
        return f"{accepted}/{proposed} accepted {seconds:5.2f} s"
    return f"{tokens} {'token' if tokens == 1 else 'tokens'} {seconds:5.2f} s"
