"""The base model's reading of a step: one forward over the step and the score prompt."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import ConfigError, message
from .scoring import ProposedStep, Scorer

if TYPE_CHECKING:
    from ..target import Target

# Caches that cannot be cropped keep the steps that were read with a score prompt pending, and read
# them again with every step. So many pending tokens get a forward of their own.
MOST_PENDING = 1024


class Reading(NamedTuple):
    """What one forward says about a step of `k` tokens.

    Row `i` of `logits` `[1, k, V]` is what the base model would write where the step has token `i`;
    `n_fed` counts what was fed, pending tokens and score prompt included.
    """

    logits: torch.Tensor
    score: float
    n_fed: int


class StepReader:
    """Reads and scores steps on the base model's cache; the caller keeps what is committed.

    Args:
        target (`Target`): The base model.
        scorer (`Scorer`): Makes a number of what was read.
        prompt_ids (`tuple[int, ...]`): Read after the step to get an answer; may be empty.
    """

    def __init__(self, target: Target, scorer: Scorer, prompt_ids: tuple[int, ...]) -> None:
        self.prompt_ids = prompt_ids
        self._target = target
        self._scorer = scorer
        self._opening: torch.Tensor | None = None

    @property
    def n_pending(self) -> int:
        """Committed tokens that the next reading feeds in front of the step."""
        return self._target.n_pending

    def open(self, prompt_logits: torch.Tensor) -> None:
        """Takes the logits `[1, 1, V]` of the prompt, which judge the first token of all."""
        self._opening = prompt_logits

    def read(
        self, token_ids: tuple[int, ...], text: str, index: int, thinking_tokens: int
    ) -> Reading:
        """Reads a step in one forward and scores it.

        Without a score prompt the last token of the step is not fed: like every token that is
        committed last, it is fed with the next forward, and nothing has to be rolled back.
        """
        n_tokens = len(token_ids)
        fed = (*token_ids, *self.prompt_ids) if self.prompt_ids else token_ids[:-1]
        n_fed = self._target.n_pending + len(fed)
        logits = self.feed(fed)
        step = ProposedStep(
            index=index,
            thinking_tokens=thinking_tokens,
            text=text,
            token_ids=token_ids,
            step_logits=logits[0, :n_tokens],
            answer_logits=logits[0, -1] if self.prompt_ids else None,
        )
        return Reading(logits[:, :n_tokens], self._score(step), n_fed)

    def feed(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """Feeds tokens as candidates; logits `[1, n + 1, V]`."""
        opening, self._opening = self._opening, None
        if opening is not None and not token_ids:
            return opening
        if self._target.n_pending > MOST_PENDING:
            self._target.settle()
        logits = self._target.forward(token_ids)
        return logits if opening is None else torch.cat([opening, logits], dim=1)

    def _score(self, step: ProposedStep) -> float:
        score = float(self._scorer(step))
        if math.isnan(score):
            raise ConfigError(
                message(
                    f"The scorer gave {score!r} for step {step.index}, {step.text!r}",
                    "A number is accepted",
                    "Return the lowest score for steps that cannot be judged",
                )
            )
        return score
