"""What the sub-commands print about results: headings, tables and one-line findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import ssr_hf

from .comparing import Comparison
from .loading import Session
from .options import GenerationOptions

Figures = Mapping[str, Mapping[str, float | None]]

_UNDEFINED = "–"
_COLUMNS = {
    "tokens": ("tokens", "{:,.0f}"),
    "forwards": ("forwards", "{:,.0f}"),
    "seconds": ("total s", "{:.2f}"),
    "thinking_seconds": ("thinking s", "{:.2f}"),
    "answer_seconds": ("answer s", "{:.2f}"),
}
_ROWS = {"plain": "plain generate", "self_speculation": "self-speculation"}


def title(console: Console, session: Session, generation: GenerationOptions) -> None:
    """The model, where it runs and how tokens are selected."""
    console.print(Text(f"{session.describe()} · {generation.describe()}", "bold"), soft_wrap=True)


def heading(console: Console, text: str, beside: Text | None = None) -> None:
    """A blank line, a heading and what stands beside it."""
    line = Text("\n").append(text.upper(), "bold")
    console.print(line if beside is None else line.append("   ").append(beside), soft_wrap=True)


def comparison_table(figures: Figures, n_prompts: int = 1) -> Table:
    """Tokens, forwards and seconds of both ways, and the speed-up.

    The median of the ratios of several prompts is not the ratio of the medians above it.
    """
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=True)
    speed_up = figures["speed_up"]
    label = "speed-up" if n_prompts == 1 else "median of speed-ups"
    table.add_column("", footer=label, footer_style="bold")
    for name, (label, _) in _COLUMNS.items():
        ratio = speed_up.get(name)
        footer = "" if name == "tokens" else _show("{:.2f}x", ratio)
        table.add_column(label, footer=footer, justify="right", footer_style="bold")
    for part, label in _ROWS.items():
        cells = (_show(form, figures[part][name]) for name, (_, form) in _COLUMNS.items())
        table.add_row(label, *cells)
    return table


def _show(form: str, value: float | None) -> str:
    return _UNDEFINED if value is None else form.format(value)


def verdict_line(comparisons: Sequence[Comparison], dtype: torch.dtype) -> Text:
    """Whether the outputs are identical, and if one is not, where it parts."""
    n = len(comparisons)
    different = [comparison for comparison in comparisons if not comparison.identical]
    if not different:
        of = "" if n == 1 else f", {n} of {n}"
        return Text("  identical output: ").append(f"yes{of}", "bold green")
    text = Text("  identical output: ").append(f"no, {n - len(different)} of {n}", "bold red")
    return text.append("; ").append(different_line(different[0], dtype))


def different_line(comparison: Comparison, dtype: torch.dtype) -> Text:
    """Where two outputs part."""
    text = Text(f"the outputs part at token {comparison.first_difference}")
    if dtype != torch.float32:
        text.append(f"; ties may fall either way in {dtype}, compare with --dtype float32")
    return text


def drafts_line(stats: ssr_hf.SpeculationStats, label: str = "") -> Text:
    """What drafts and suffix matches gave, in one line."""
    n_drafts = len(stats.drafts)
    parts = [f"{n_drafts} draft{'' if n_drafts == 1 else 's'}"]
    if n_drafts:
        parts[0] += f", {stats.accepted_prefix}/{stats.draft_tokens} accepted"
    parts.append(f"suffix matches, {stats.suffix_accepted}/{stats.suffix_proposed} accepted")
    if not stats.thinking_ended:
        parts.append("thinking did not end")
    return Text(f"  {label}{' · '.join(parts)}", "dim")
