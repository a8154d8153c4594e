"""How long the next step may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRoom:
    """The limits of one generation, in tokens of the base model.

    Args:
        step (`int`): Longest step.
        text (`int`): Longest text, prompt included.
        positions (`int`): Most tokens the base model reads, score prompt included.
        score_prompt (`int`): Tokens of the score prompt.
        thinking (`int`, *optional*): Longest block of thinking.
    """

    step: int
    text: int
    positions: int
    score_prompt: int
    thinking: int | None

    def left(self, n_text: int, n_thinking: int) -> int:
        """Room for a step after `n_text` tokens, `n_thinking` of them in the open block."""
        room = [self.step, self.text - n_text, self.positions - n_text - self.score_prompt]
        if self.thinking is not None:
            room.append(self.thinking - n_thinking)
        return min(room)
