"""The settings of step speculation: one frozen, keyword-only object, validated when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..config import _require, _require_choice, _require_int, _require_known_keys
from ..errors import ConfigError, message
from .scoring import SCORERS, Scorer

ASKED_SCORERS = tuple(name for name, kind in SCORERS.items() if kind.reads_prompt)
UNASKED_SCORERS = tuple(name for name in SCORERS if name not in ASKED_SCORERS)
Threshold = float | Callable[[int, int], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpeculationConfig:
    """Settings of SpecReason (arXiv 2504.07891): a small model writes the easy reasoning steps.

    This is lossy: an accepted step is not what the base model would have written. The answer, and
    every step that was not accepted, is always the base model's own.

    Args:
        threshold (`float` or `Callable[[int, int], float]`, *optional*, defaults to 7.0):
            Lowest score that accepts a step. A function gets the index of the step and the thinking
            tokens so far. Scores of `"digit"` and `"expected"` go from 0 to 9, so 0 accepts every
            step and 10 none; those of `"logprob"` are at most 0, `-math.inf` accepts every step.
        scorer (`str` or `Callable[[ProposedStep], float]`, *optional*, defaults to `"digit"`):
            How the base model judges: the most likely digit of its answer to the score prompt
            (`"digit"`), the mean digit (`"expected"`), or the mean log-probability of the step's
            own tokens (`"logprob"`: needs no prompt). A function gets a `ProposedStep`.
        delimiter (`str` or `Sequence[str]`, *optional*, defaults to a blank line):
            Text that ends a step; it counts after the first character that is not white space.
        max_step_tokens (`int`, *optional*, defaults to 512):
            Longest step, in tokens.
        first_base_steps (`int`, *optional*, defaults to 0):
            Steps at the beginning that the base model writes.
        max_repeats (`int`, *optional*, defaults to 2):
            Occurrences of a step of the small model in the chain of thought after which the base
            model writes the next one; if this, too, stands there so often, thinking is closed.
        score_prompt (`str`, *optional*):
            Text that asks for the score, read right after the step. When None, it is built with the
            chat template for `"digit"` and `"expected"`, and a function gets no answer to it.
        assistant_prompt (`str` or `Sequence[int]`, *optional*):
            The prompt of the small model where its tokenizer is another one, as text or ids, up to
            where thinking begins. When None, the text of the base model's prompt is handed over.
        candidate_tokens (`int`, *optional*):
            Most greedy tokens of the small model that are offered in a round of the base model for
            which nothing else was proposed (lossless); fewer while they are not accepted. 0 offers
            none. None means 0 where the tokenizers differ, and 4 elsewhere.

    Raises:
        `ConfigError`: A value is out of range; the message names it.

    Example:

    ```python
    >>> from ssr_hf import StepSpeculationConfig
    >>> StepSpeculationConfig(threshold=5, scorer="expected").threshold_at(index=0, tokens=0)
    5.0

    ```
    """

    threshold: Threshold = 7.0
    scorer: str | Scorer = "digit"
    delimiter: str | Sequence[str] = "\n\n"
    max_step_tokens: int = 512
    first_base_steps: int = 0
    max_repeats: int = 2
    score_prompt: str | None = None
    assistant_prompt: str | Sequence[int] | None = None
    candidate_tokens: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.scorer):
            _require_choice("scorer", self.scorer, tuple(SCORERS))
        if not callable(self.threshold):
            self._check_threshold(self.threshold)
        self._check_delimiter()
        _require_int("max_step_tokens", self.max_step_tokens, minimum=1, hint="Set it to 512")
        _require_int("first_base_steps", self.first_base_steps, minimum=0, hint="Set it to 0")
        _require_int("max_repeats", self.max_repeats, minimum=2, hint="Set it to 2")
        if self.candidate_tokens is not None:
            _require_int("candidate_tokens", self.candidate_tokens, minimum=0, hint="Set it to 0")
        is_text = isinstance(self.score_prompt, str) and self.score_prompt != ""
        _require(
            self.score_prompt is None or is_text,
            f"score_prompt is {self.score_prompt!r}",
            "Text is accepted",
            "Leave it out to build it with the chat template",
        )
        _require(
            self.score_prompt is None or self.scorer not in UNASKED_SCORERS,
            f"score_prompt is set for scorer {self.scorer!r}, which reads none",
            f"A score prompt is accepted for a function and for {', '.join(ASKED_SCORERS)}",
            "Leave score_prompt out",
        )
        self._check_assistant_prompt()

    def _check_threshold(self, threshold: object) -> None:
        number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        lowest, highest, example = -math.inf, math.inf, 7.0
        if isinstance(self.scorer, str):
            kind = SCORERS[self.scorer]
            lowest, highest, example = kind.lowest, kind.highest, kind.example
        _require(
            number and lowest <= threshold <= highest,  # type: ignore[operator]
            f"threshold is {threshold!r} for scorer {self.scorer!r}",
            f"A number from {lowest:g} to {highest:g} or a function is accepted",
            f"Set for instance threshold={example:g}",
        )

    def _check_delimiter(self) -> None:
        delimiters = [self.delimiter] if isinstance(self.delimiter, str) else self.delimiter
        valid = isinstance(delimiters, Sequence) and len(delimiters) > 0
        _require(
            valid and all(isinstance(text, str) and text for text in delimiters),
            f"delimiter is {self.delimiter!r}",
            "A text or several are accepted",
            r'Set delimiter="\n\n"',
        )
        object.__setattr__(self, "delimiter", tuple(delimiters))

    def _check_assistant_prompt(self) -> None:
        prompt = self.assistant_prompt
        if prompt is None:
            return
        is_filled = isinstance(prompt, Sequence) and len(prompt) > 0
        _require(
            is_filled and (isinstance(prompt, str) or all(type(token) is int for token in prompt)),
            f"assistant_prompt is {prompt!r}",
            "Text or token ids are accepted",
            "Leave it out to hand over the text of the prompt",
        )
        if not isinstance(prompt, str):
            object.__setattr__(self, "assistant_prompt", tuple(prompt))

    @property
    def delimiters(self) -> tuple[str, ...]:
        """`delimiter` as a tuple."""
        return tuple(self.delimiter)

    @property
    def reads_score_prompt(self) -> bool:
        """Whether the base model is asked for a score."""
        return self.score_prompt is not None or self.scorer in ASKED_SCORERS

    def threshold_at(self, index: int, tokens: int) -> float:
        """The threshold for one step.

        Args:
            index (`int`): Which step it is, from 0.
            tokens (`int`): Thinking tokens before it.

        Returns:
            `float`: The lowest score that accepts it.

        Raises:
            `ConfigError`: The function gave no number.
        """
        given = self.threshold(index, tokens) if callable(self.threshold) else self.threshold
        try:
            threshold = float(given)
        except (TypeError, ValueError):
            threshold = math.nan
        _require(
            not math.isnan(threshold),
            f"The threshold function gave {given!r} for step {index}",
            "A number is accepted",
            "Return for instance math.inf to reject a step",
        )
        return threshold

    @classmethod
    def coerce(cls, value: object) -> StepSpeculationConfig | None:
        """Makes a config of what `generate(step_speculation=...)` was given.

        Args:
            value (`bool`, `dict`, `StepSpeculationConfig` or `None`): What the user passed.

        Returns:
            `StepSpeculationConfig` or `None`: The config; None where it is absent or `False`.

        Raises:
            `ConfigError`: The type is another one, or the dict has an unknown setting.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            _require_known_keys(cls, value)
            return cls(**value)
        raise ConfigError(
            message(
                f"step_speculation is {value!r}",
                "True, False, a dict of settings or a StepSpeculationConfig is accepted",
                "Pass step_speculation=StepSpeculationConfig(threshold=7)",
            )
        )
