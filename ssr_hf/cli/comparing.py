"""Plain and self-speculative generation of the same request, and what the difference is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import ssr_hf

from .running import Run


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both runs of one request."""

    plain: Run
    speculative: Run

    @property
    def identical(self) -> bool:
        """Whether both gave the same tokens."""
        return self.plain.token_ids == self.speculative.token_ids

    @property
    def first_difference(self) -> int:
        """Number of leading tokens that are the same."""
        pairs = zip(self.plain.token_ids, self.speculative.token_ids, strict=False)
        shortest = min(len(self.plain.token_ids), len(self.speculative.token_ids))
        return next((at for at, (one, other) in enumerate(pairs) if one != other), shortest)

    @property
    def stats(self) -> ssr_hf.SpeculationStats:
        """What self-speculation did."""
        return self.speculative.stats

    def figures(self) -> dict[str, dict[str, float | None]]:
        """Tokens, forwards and seconds of both runs, and the speed-up; None where undefined."""
        plain, speculative = self._figures_of(self.plain), self._figures_of(self.speculative)
        speed_up = {
            name: _ratio(plain[name], speculative[name]) for name in plain if name != "tokens"
        }
        return {"plain": plain, "self_speculation": speculative, "speed_up": speed_up}

    def _figures_of(self, run: Run) -> dict[str, float | None]:
        stats = self.stats
        answered = stats.answer_tokens > 0 and len(run.times) > stats.thinking_tokens
        answer = run.answer_seconds(stats.thinking_tokens) if answered else None
        return {
            "tokens": len(run.token_ids),
            "forwards": run.forwards,
            "seconds": run.seconds,
            "thinking_seconds": run.seconds - (answer or 0.0),
            "answer_seconds": answer,
        }


def medians(comparisons: Sequence[Comparison]) -> dict[str, dict[str, float | None]]:
    """The median of each figure; of speed-ups the median of the prompts' own ratios."""
    every = [comparison.figures() for comparison in comparisons]
    return {
        part: {name: _median(figures[part][name] for figures in every) for name in values}
        for part, values in every[0].items()
    }


def as_record(comparison: Comparison, prompt: str) -> dict[str, Any]:
    """One prompt's figures, for machines."""
    return {
        "prompt": prompt,
        "identical": comparison.identical,
        **comparison.figures(),
        "speculation": comparison.stats.to_dict(),
    }


def _ratio(plain: float | None, speculative: float | None) -> float | None:
    return plain / speculative if plain and speculative else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
