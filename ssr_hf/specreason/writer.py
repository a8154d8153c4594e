"""The small model: it writes steps, and follows what the base model wrote instead of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import compat
from ..target import Target
from ..tokens import TokenSequence

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

    from .text import StepEnd
    from .translation import Translation

# So many unread tokens ride in the next forward; more are read by one forward of their own, whose
# result stays.
FEW_UNREAD = 16


class Proposal(NamedTuple):
    """A step of the small model.

    `token_ids` are ids of the base model. `written` is the small model after the step, to go on
    from if the step is accepted as a whole; None where it says something else.
    """

    token_ids: tuple[int, ...]
    written: Target | None


@dataclass(frozen=True, slots=True)
class WritingRules:
    """What holds for every step of one generation.

    Args:
        end (`StepEnd`): Where a step of the small model ends.
        stops (`frozenset[int]`): The small model's end-of-sequence and turn tokens; they are not
            part of a step.
        logits_processor (`LogitsProcessorList`): The user's sampling settings, as far as they apply
            to the small model's ids and have no side effects.
        generator (`torch.Generator`, *optional*): The small model's own randomness; greedy if None.
        generation_config (`GenerationConfig`): How the prompt is read.
        max_length (`int`): Positions of the small model.
        vocab_size (`int`): Ids from here on are never selected.
    """

    end: StepEnd
    stops: frozenset[int]
    logits_processor: LogitsProcessorList
    generator: torch.Generator | None
    generation_config: GenerationConfig
    max_length: int
    vocab_size: int


class StepWriter:
    """The small model with a cache of its own, which holds a prefix of what the base model holds.

    Every step is written on a fork. An accepted step makes the fork the model's state; a rejected
    one is dropped with its fork, and the base model's tokens are read in one forward. That is exact
    on every cache kind.

    Args:
        model (`PreTrainedModel`): The small model.
        translation (`Translation`): Between its ids and the base model's.
        base_text (`TokenSequence`): The committed text of the base model; only read.
        prompt_ids (`Sequence[int]`): The prompt in it, without padding.
        rules (`WritingRules`): Ends and sampling.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        translation: Translation,
        base_text: TokenSequence,
        prompt_ids: Sequence[int],
        rules: WritingRules,
    ) -> None:
        self.forwards = 0
        self.is_full = False  # whether the text has outgrown the small model
        self._model = model
        self._translation = translation
        self._base_text = base_text
        self._prompt_ids = prompt_ids
        self._rules = rules
        self._state: Target | None = None
        self._n_followed = base_text.prompt_length

    def propose(self, limit: int) -> Proposal | None:
        """Writes a step of at most `limit` tokens of the small model.

        Returns:
            `Proposal` or `None`: None where it has nothing to say or no room to say it.
        """
        child = self._fork()
        if child is None:
            return None
        start = len(child.sequence)
        room = min(limit, self._rules.max_length - start - 1)
        whole = self._write(child, room)
        step = child.sequence.token_ids[start:]
        token_ids = self._translation.to_base(step)
        is_same = whole and self._translation.is_same(token_ids, step)
        return Proposal(token_ids, child if is_same else None)

    def accept(self, proposal: Proposal) -> None:
        """Follows the acceptance of a whole step, after it was committed."""
        if proposal.written is not None:
            self._state = proposal.written
            self._n_followed = len(self._base_text)

    def guess(self, n_tokens: int) -> tuple[int, ...]:
        """The `n_tokens` most likely next tokens, greedily, as ids of the small model."""
        child = self._fork()
        if child is None:
            return ()
        guessed: list[int] = []
        room = min(n_tokens, self._rules.max_length - len(child.sequence) - 1)
        while len(guessed) < room:
            logits = self._forward(child)[..., : self._rules.vocab_size]
            guessed.append(int(logits.argmax()))
            child.sequence.append(guessed[-1:])
            child.keep(1)
        return tuple(guessed)

    def _write(self, child: Target, room: int) -> bool:
        """Writes a step; whether the state of `child` is that after the step."""
        watcher = self._translation.watcher()
        start = len(child.sequence)
        while len(child.sequence) - start < room:
            token_id = self._select(self._forward(child), child.sequence)
            if token_id in self._rules.stops:
                return False
            child.sequence.append((token_id,))
            child.keep(1)
            watcher.push(token_id)
            step = child.sequence.token_ids[start:]
            if not watcher.is_open or self._rules.end.reached(step):
                return True
        return True

    def _forward(self, child: Target) -> torch.Tensor:
        self.forwards += 1
        return child.forward()[:, -1]

    def _select(self, position_logits: torch.Tensor, text: TokenSequence) -> int:
        """Selects a token from logits `[1, V]` with the user's sampling settings."""
        scores = position_logits.to(copy=True, dtype=torch.float32, device=text.device)
        scores[:, self._rules.vocab_size :] = -torch.inf
        scores = self._rules.logits_processor(text.ids, scores)
        if self._rules.generator is None:
            return int(scores.argmax())
        probabilities = scores.softmax(dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._rules.generator))

    def _fork(self) -> Target | None:
        """A fork that has read everything but a few last tokens; None where there is no room."""
        state = None if self.is_full else self._follow()
        if state is None:
            return None
        if len(state.sequence) + 1 >= self._rules.max_length:
            self.is_full = True
            return None
        return state.fork(TokenSequence(state.sequence.ids))

    def _follow(self) -> Target | None:
        """The small model's state with everything that the base model has committed since."""
        new_ids = self._base_text.token_ids[self._n_followed :]
        added = self._translation.to_assistant(new_ids) if new_ids else ()
        if self._state is None:
            self._state = self._read_prompt((*self._translation.prompt(self._prompt_ids), *added))
        elif added:
            self._state = self._extended(self._state, added)
        if self._state is not None:
            self._n_followed = len(self._base_text)
        return self._state

    def _read_prompt(self, token_ids: Sequence[int]) -> Target | None:
        """Reads all tokens but the last, which is fed with the next forward."""
        self.is_full = len(token_ids) >= self._rules.max_length
        if self.is_full or len(token_ids) < 2:
            return None
        ids = torch.tensor([token_ids], device=self._model.device)
        text = TokenSequence(ids[:, :-1])
        kwargs = compat.fresh_kwargs(self._model, text.ids, self._rules.generation_config)
        state = Target(self._model, text, kwargs)
        state.prefill(self._rules.generation_config)
        self.forwards += 1
        return self._extended(state, token_ids[-1:])

    def _extended(self, state: Target, token_ids: Sequence[int]) -> Target:
        text = TokenSequence(state.sequence.ids)
        text.append(token_ids)
        state = state.fork(text)
        if state.n_pending > FEW_UNREAD:
            state.settle()
            self.forwards += 1
        return state
