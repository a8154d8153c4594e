"""Loops of the small model: the base model takes over, and if it loops as well, thinking ends."""

from __future__ import annotations

from collections import Counter


class RepeatGuard:
    """Counts equal steps, white space aside.

    Only a step of the small model can start the escape, so that a chain of thought which the base
    model writes alone is never touched.

    Args:
        max_repeats (`int`): A step that stands in the chain of thought so often is a loop.
    """

    def __init__(self, max_repeats: int) -> None:
        self._max_repeats = max_repeats
        self._seen: Counter[str] = Counter()
        self.takes_over = False
        self.must_close = False

    def push(self, text: str, *, by_assistant: bool) -> None:
        """Takes the next step."""
        said = text.strip()
        self._seen[said] += 1
        loops = bool(said) and self._seen[said] >= self._max_repeats
        self.must_close = loops and self.takes_over and not by_assistant
        self.takes_over = loops and by_assistant

    def reset(self) -> None:
        """Forgets all steps: a new block of thinking begins."""
        self._seen.clear()
        self.takes_over = self.must_close = False
