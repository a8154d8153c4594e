"""What step speculation did: the steps, who wrote them, and what they cost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..stats import Round

AUTHORS = ("assistant", "base", "forced")


class StepReport(NamedTuple):
    """One step of the chain of thought.

    `author` is `"assistant"` (the small model's step was accepted), `"base"` or `"forced"` (the
    end marker that closes a loop). `n_tokens` are its tokens. `score` and `threshold` are those of
    the small model's proposal for this place, None where it made none; `n_proposed` its tokens,
    `n_reused` those of a rejected proposal that the base model wrote itself and got from the same
    forward.

    Example:

    ```python
    >>> from ssr_hf import StepReport
    >>> step = StepReport("base", n_tokens=40, score=3.0, threshold=7.0, n_proposed=32, n_reused=8)
    >>> step.score >= step.threshold
    False

    ```
    """

    author: str
    n_tokens: int
    score: float | None = None
    threshold: float | None = None
    n_proposed: int = 0
    n_reused: int = 0


@dataclass(frozen=True, slots=True)
class StepSpeculationStats:
    """What step speculation did in one call of `generate`.

    Args:
        steps (`tuple[StepReport, ...]`): Every step, in order; the one that generation ended in
            included.
        assistant_forwards (`int`): Forwards of the small model, its prompt's included.
        seconds (`dict[str, float]`): Wall-clock seconds of `"proposing"` (the small model writes
            steps), `"scoring"` (the base model reads and judges them), `"base_steps"` (the base
            model writes steps) and `"answer"`.
        notes (`tuple[str, ...]`): Decisions worth knowing.

    Example:

    ```python
    >>> from ssr_hf import StepReport, StepSpeculationStats
    >>> steps = (StepReport("assistant", 30, 8.0, 7.0, 30), StepReport("base", 40, 3.0, 7.0, 32))
    >>> stats = StepSpeculationStats(steps=steps)
    >>> stats.acceptance_rate, stats.tokens("assistant")
    (0.5, 30)

    ```
    """

    steps: tuple[StepReport, ...] = ()
    assistant_forwards: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def scores(self) -> tuple[float, ...]:
        """The score of every proposal, in order."""
        return tuple(step.score for step in self.steps if step.score is not None)

    @property
    def acceptance_rate(self) -> float:
        """Accepted proposals per proposal; 0 where none was made."""
        return self.count("assistant") / max(1, len(self.scores))

    def count(self, author: str) -> int:
        """Steps of one author.

        Args:
            author (`str`): `"assistant"`, `"base"` or `"forced"`.

        Returns:
            `int`: The steps.
        """
        return sum(step.author == author for step in self.steps)

    def tokens(self, author: str) -> int:
        """Tokens in the steps of one author.

        Args:
            author (`str`): `"assistant"`, `"base"` or `"forced"`.

        Returns:
            `int`: The tokens.
        """
        return sum(step.n_tokens for step in self.steps if step.author == author)

    def to_dict(self) -> dict[str, Any]:
        """The figures, as a dict that `json.dumps` takes."""
        return {
            "steps": {author: self.count(author) for author in AUTHORS},
            "tokens": {author: self.tokens(author) for author in AUTHORS},
            "acceptance_rate": round(self.acceptance_rate, 4),
            "scores": [round(score, 4) for score in self.scores],
            "assistant_forwards": self.assistant_forwards,
            "seconds": {part: round(seconds, 4) for part, seconds in self.seconds.items()},
            "notes": list(self.notes),
        }


class StepRecorder:
    """Collects what `StepSpeculationStats` reports; it never synchronises a device."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self._seconds = {"proposing": 0.0, "scoring": 0.0}
        self._notes: list[str] = []

    @contextlib.contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Adds the time of a block to one part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - start

    def note(self, text: str) -> None:
        """Records a decision, once."""
        if text not in self._notes:
            self._notes.append(text)

    def stats(self, rounds: Iterable[Round], assistant_forwards: int) -> StepSpeculationStats:
        """The figures of the finished generation, whose rounds tell what the base model spent."""
        by_base = [r for r in rounds if r.source != "step"]
        thinking = sum(r.seconds for r in by_base if r.phase in ("thinking", "closing"))
        answering = sum(r.seconds for r in by_base if r.phase == "answering")
        return StepSpeculationStats(
            steps=tuple(self.steps),
            assistant_forwards=assistant_forwards,
            seconds={**self._seconds, "base_steps": thinking, "answer": answering},
            notes=tuple(self._notes),
        )
