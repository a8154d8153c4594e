"""A cap on thinking that works in plain `generate`: half of the baseline, and part of the method.

When the budget is spent the end marker is forced token by token through the scores, so the model
itself reads the marker and the cache stays consistent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LogitsProcessor

from .errors import ConfigError, MarkerError, message
from .markers import PhaseTracker, ThinkingMarkers


@dataclass(slots=True)
class _Known:
    """What the last call saw, and where each row stood after it."""

    input_ids: torch.Tensor  # [B, T]
    prompt_length: int
    trackers: list[PhaseTracker]

    def may_precede(self, input_ids: torch.Tensor) -> bool:
        """Whether the shape of `input_ids` allows it to continue this text, or to go back in it."""
        rows, length = self.input_ids.shape
        return input_ids.shape[0] == rows and self.prompt_length < input_ids.shape[1] <= length + 1

    def step(self, input_ids: torch.Tensor, sources: list[int], tokens: list[int]) -> _Known:
        """The state one token later, row `i` continuing what was row `sources[i]`."""
        is_moved = sources != list(range(len(sources)))
        trackers = [
            self.trackers[row].copy() if is_moved else self.trackers[row] for row in sources
        ]
        for tracker, token_id in zip(trackers, tokens, strict=True):
            tracker.push(token_id)
        return _Known(input_ids.clone(), self.prompt_length, trackers)


class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """Forces the end of thinking once `thinking_budget` tokens of thinking were written.

    Every thinking block has the whole budget. A block the prompt opens is counted from the end of
    the prompt, one the model opens from its start marker. An end marker that the model has begun
    when the budget runs out is completed, not repeated, and its tokens count towards the budget.

    The result depends on the ids of a row alone, not on earlier calls: rows may be reordered, and
    the same object may serve one `generate` call after the other. Only where the prompt ends is
    remembered, unless `prompt_length` says it. What continues the text of the last call, token by
    token, continues its generation; anything else is a new prompt.

    Args:
        markers ([`ThinkingMarkers`]): The markers of the model.
        thinking_budget (`int`): Thinking tokens per block, start and end marker excluded; 0 closes
            a block at once.
        prompt_length (`int`, *optional*): Tokens of the prompt, left padding included. By default
            the ids of the first call of a generation are its prompt.

    Raises:
        ConfigError: If `thinking_budget` or `prompt_length` is negative or not an integer.
        MarkerError: When called, if the end marker lies outside of the model's vocabulary.

    Example:

    ```python
    >>> import torch
    >>> from ssr_hf.budget import ThinkingBudgetLogitsProcessor
    >>> from ssr_hf.markers import ThinkingMarkers

    >>> markers = ThinkingMarkers(start=((7,),), end=((8,),))
    >>> budget = ThinkingBudgetLogitsProcessor(markers, thinking_budget=1)
    >>> budget(torch.tensor([[5, 7]]), torch.zeros(1, 10)).isinf().any().item()
    False
    >>> budget(torch.tensor([[5, 7, 3]]), torch.zeros(1, 10)).argmax().item()
    8

    ```
    """

    def __init__(
        self, markers: ThinkingMarkers, thinking_budget: int, prompt_length: int | None = None
    ) -> None:
        _check_count("thinking_budget", thinking_budget)
        if prompt_length is not None:
            _check_count("prompt_length", prompt_length)
        self.markers = markers
        self.thinking_budget = thinking_budget
        self.prompt_length = prompt_length
        self._known: _Known | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """Leaves only the forced token in the rows whose budget is spent.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`): Prompt and generated tokens.
            scores (`torch.FloatTensor` of shape `(batch, vocabulary)`): Scores of the next token;
                never changed in place.

        Returns:
            `torch.FloatTensor` of shape `(batch, vocabulary)`: `scores` itself if no row is forced.
        """
        self._known = self._advance(input_ids)
        forced = [self._forced_ids(tracker)[:1] for tracker in self._known.trackers]
        rows = [row for row, ids in enumerate(forced) if ids]
        if not rows:
            return scores
        return _force(scores, rows, [forced[row][0] for row in rows])

    def _forced_ids(self, tracker: PhaseTracker) -> tuple[int, ...]:
        """What remains of the end marker if the budget is spent, else nothing."""
        is_spent = tracker.is_open and tracker.n_open >= self.thinking_budget
        return tracker.remaining_closing() if is_spent else ()

    def _advance(self, input_ids: torch.Tensor) -> _Known:
        """The state after `input_ids`: one step from that of the last call where possible."""
        known, length = self._known, input_ids.shape[1]
        if known is None or not known.may_precede(input_ids):
            return self._read(input_ids, length)
        before = known.input_ids[:, : length - 1]
        kept = (input_ids[:, :-1] == before).all(dim=-1)
        # [B, 2]: the one transfer of a step.
        steps = torch.stack((kept, input_ids[:, -1]), dim=-1).tolist()
        sources = list(range(len(steps)))
        if not all(is_kept for is_kept, _ in steps):
            sources = _find_sources(input_ids, before)
        if min(sources) < 0:
            return self._read(input_ids, length)
        if length <= known.input_ids.shape[1]:
            return self._read(input_ids, known.prompt_length)
        return known.step(input_ids, sources, [token for _, token in steps])

    def _read(self, input_ids: torch.Tensor, prompt_length: int) -> _Known:
        """The state after `input_ids` from their first token on."""
        if self.prompt_length is not None:
            prompt_length = self.prompt_length
        trackers = []
        for ids in input_ids.tolist():
            tracker = PhaseTracker(self.markers, ids[:prompt_length])
            for token_id in ids[prompt_length:]:
                tracker.push(token_id)
            trackers.append(tracker)
        return _Known(input_ids.clone(), prompt_length, trackers)


def _find_sources(input_ids: torch.Tensor, before: torch.Tensor) -> list[int]:
    """For each row the row of the last call that it continues (beams change places), -1 if none."""
    same = torch.stack([(row == before).all(dim=-1) for row in input_ids[:, :-1]])  # [B, B]
    return torch.where(same.any(dim=-1), same.int().argmax(dim=-1), -1).tolist()


def _force(scores: torch.Tensor, rows: list[int], ids: list[int]) -> torch.Tensor:
    """Leaves one token in each of `rows`."""
    if max(ids) >= scores.shape[-1]:
        raise MarkerError(
            message(
                f"The end marker holds the token id {max(ids)}",
                f"The model scores ids below {scores.shape[-1]}",
                "Use the markers of this model's own tokenizer",
            )
        )
    at = torch.tensor(rows, device=scores.device)
    forced = scores.clone()
    forced[at] = -torch.inf
    # Whatever was masked before, a row needs one finite score to be sampled from.
    forced[at, torch.tensor(ids, device=scores.device)] = 0.0
    return forced


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            message(
                f"{name} is {value!r}",
                "An integer >= 0 is accepted",
                f"Set for instance {name}=500",
            )
        )
