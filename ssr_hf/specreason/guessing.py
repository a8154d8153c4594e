"""How many tokens of the small model to offer in a round of the base model."""

from __future__ import annotations

FIRST_PAUSE = 8
LONGEST_PAUSE = 256


class GuessLength:
    """Grows while guesses are right and shrinks while they are wrong; then pauses ever longer.

    Args:
        most (`int`): Most tokens of a guess; 0 never guesses.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = most
        self._pause = FIRST_PAUSE
        self._rounds_left = 0

    def next(self) -> int:
        """Tokens to guess for the coming round."""
        if self._rounds_left > 0:
            self._rounds_left -= 1
            return 0
        return self._length

    def observe(self, n_offered: int, n_accepted: int) -> None:
        """Follows a round that offered a guess."""
        if n_accepted == n_offered:
            self._length = min(self._most, self._length + 2)
            self._pause = FIRST_PAUSE
        elif self._length > 1:
            self._length -= 1
        else:
            self._rounds_left = self._pause
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
