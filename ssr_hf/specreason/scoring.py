"""How the base model judges a step: one row of `SCORERS` per way.

To add one, write a function of a `ProposedStep` (or a class that needs the tokenizer to make one)
and add a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError, message

if TYPE_CHECKING:
    from ..markers import TokenCodec

DIGITS = "0123456789"
# A digit that is not among so many most likely tokens does not count as an answer.
TOP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class ProposedStep:
    """A step of the small model as a scorer sees it. The logits are only valid during the call.

    Args:
        index (`int`): Which step of the generation it is, from 0.
        thinking_tokens (`int`): Thinking tokens before it.
        text (`str`): What it says.
        token_ids (`tuple[int, ...]`): Its `k` tokens, as ids of the base model.
        step_logits (`torch.Tensor` of shape `(k, V)`): Row `i` is what the base model would write
            instead of token `i`.
        answer_logits (`torch.Tensor` of shape `(V,)`, *optional*): The base model's answer to the
            score prompt; None for scorers that read none.

    Example:

    ```python
    >>> from ssr_hf import ProposedStep, StepSpeculationConfig
    >>> def prefer_short_steps(step: ProposedStep) -> float:
    ...     return 9.0 if len(step.token_ids) < 50 else 0.0
    >>> config = StepSpeculationConfig(scorer=prefer_short_steps, threshold=5)

    ```
    """

    index: int
    thinking_tokens: int
    text: str
    token_ids: tuple[int, ...]
    step_logits: torch.Tensor
    answer_logits: torch.Tensor | None


Scorer = Callable[[ProposedStep], float]


class _DigitAnswer:
    """The tokens that write a digit, with and without a space before it.

    Args:
        codec (`TokenCodec`): The base model's tokenizer.

    Raises:
        ConfigError: Some digit is not one token.
    """

    def __init__(self, codec: TokenCodec) -> None:
        self._forms = [_single_tokens(codec, digit) for digit in DIGITS]
        missing = [digit for digit, forms in zip(DIGITS, self._forms, strict=True) if not forms]
        if missing:
            raise ConfigError(
                message(
                    f"The tokenizer writes {', '.join(missing)} with several tokens",
                    "Scorers 'digit' and 'expected' need every digit as one token",
                    "Set scorer='logprob' or pass a function",
                )
            )

    def log_weights(self, step: ProposedStep) -> torch.Tensor:
        """Unnormalised log-probability `[10]` of each digit."""
        logits = _answer_of(step)
        return torch.stack([logits[list(forms)].logsumexp(0) for forms in self._forms])

    def is_answered(self, step: ProposedStep) -> bool:
        """Whether the model is about to write a digit at all."""
        logits = _answer_of(step)
        likely = set(logits.topk(min(TOP_TOKENS, len(logits))).indices.tolist())
        return any(likely.intersection(forms) for forms in self._forms)


class MostLikelyDigit(_DigitAnswer):
    """The most likely digit; 0 where no digit is among the most likely tokens."""

    def __call__(self, step: ProposedStep) -> float:
        """The score, 0 to 9."""
        if not self.is_answered(step):
            return 0.0
        return float(self.log_weights(step).argmax())


class ExpectedDigit(_DigitAnswer):
    """The mean of the ten digits, weighted by their probabilities among themselves."""

    def __call__(self, step: ProposedStep) -> float:
        """The score, 0 to 9; defined however unlikely all digits are."""
        weights = self.log_weights(step).softmax(0)
        return float((weights * torch.arange(10, device=weights.device)).sum())


def mean_log_probability(step: ProposedStep) -> float:
    """Mean log-probability of the step's tokens under the base model, at most 0."""
    logits = step.step_logits.float()  # [k, V]
    ids = torch.tensor(step.token_ids, device=logits.device)[:, None]
    return float((logits.gather(1, ids)[:, 0] - logits.logsumexp(1)).mean())


def _answer_of(step: ProposedStep) -> torch.Tensor:
    assert step.answer_logits is not None, "digit scorers are given an answer"
    return step.answer_logits.float()


def _single_tokens(codec: TokenCodec, digit: str) -> tuple[int, ...]:
    """Ids that write `digit` with one token, alone or after a space."""
    written = {codec.encode(digit), codec.encode(f" {digit}")}
    return tuple(ids[0] for ids in written if len(ids) == 1)


@dataclass(frozen=True, slots=True)
class ScorerKind:
    """One way of judging.

    Args:
        build (`Callable[[TokenCodec], Scorer]`): Makes the scorer for a tokenizer.
        reads_prompt (`bool`): Whether it needs the answer to the score prompt.
        lowest (`float`): Least threshold that makes sense; it accepts every step.
        highest (`float`): Greatest one; it accepts none.
        example (`float`): A threshold for error messages.
    """

    build: Callable[[TokenCodec], Scorer]
    reads_prompt: bool
    lowest: float
    highest: float
    example: float


SCORERS: dict[str, ScorerKind] = {
    "digit": ScorerKind(MostLikelyDigit, True, 0.0, 10.0, 7.0),
    "expected": ScorerKind(ExpectedDigit, True, 0.0, 10.0, 7.0),
    "logprob": ScorerKind(lambda codec: mean_log_probability, False, -math.inf, 0.0, -0.5),
}
