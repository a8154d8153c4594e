"""The protocol of SpecReason: the small model proposes a step, the base model judges it in one
forward, and keeps it or writes the step itself.

That forward is never wasted. If the step is accepted, its tokens are in the base model's cache
already and only the score prompt is rolled back. If not, the same logits are committed by the
commit rule, which keeps what the base model would have written itself. Caches with recurrent layers
roll back to before the step; its tokens are then fed again beside those of the next forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..markers import Phase
from ..records import NO_CANDIDATES, Candidates, Verdict
from .repeats import RepeatGuard
from .stats import StepReport, StepSpeculationStats
from .writer import Proposal

if TYPE_CHECKING:
    import torch

    from ..commit import Committer
    from ..markers import PhaseTracker, TokenCodec
    from ..stats import Round
    from .config import StepSpeculationConfig
    from .guessing import GuessLength
    from .reader import StepReader
    from .room import StepRoom
    from .stats import StepRecorder
    from .text import StepEnd
    from .translation import Translation
    from .writer import StepWriter


class StepRound(NamedTuple):
    """A round that read a step: what it offered and committed, and how many tokens it fed."""

    candidates: Candidates
    verdict: Verdict
    n_fed: int


class _Decreed(NamedTuple):
    """Who wrote the tokens that the last round committed without asking the base model."""

    author: str
    proposal: Proposal | None


@dataclass(frozen=True, slots=True)
class StepParts:
    """What one generation with step speculation is made of.

    Args:
        config (`StepSpeculationConfig`): The settings.
        reader (`StepReader`): The base model reads and scores.
        writer (`StepWriter`): The small model writes.
        translation (`Translation`): Between their vocabularies.
        committer (`Committer`): Emits tokens.
        tracker (`PhaseTracker`): The phase of the text.
        codec (`TokenCodec`): The base model's tokenizer.
        end (`StepEnd`): Where a step of the base model ends.
        stops (`frozenset[int]`): Ids of the base model that are not part of a step.
        room (`StepRoom`): How long a step may be.
        guesses (`GuessLength`): Tokens of the small model to offer in rounds of the base model.
        recorder (`StepRecorder`): Counts and times.
    """

    config: StepSpeculationConfig
    reader: StepReader
    writer: StepWriter
    translation: Translation
    committer: Committer
    tracker: PhaseTracker
    codec: TokenCodec
    end: StepEnd
    stops: frozenset[int]
    room: StepRoom
    guesses: GuessLength
    recorder: StepRecorder


class StepSpeculation:
    """Decides round by round who writes, and judges what the small model wrote.

    Args:
        parts (`StepParts`): What it works with.
    """

    def __init__(self, parts: StepParts) -> None:
        self.recorder = parts.recorder
        self._parts = parts
        self._repeats = RepeatGuard(parts.config.max_repeats)
        self._block = parts.tracker.blocks
        self._was_open = parts.tracker.is_open
        self._index = 0
        self._step: list[int] = []  # what the base model has written of the current step
        self._report = StepReport("base", 0)  # what is known about the current step
        self._n_guessed = 0
        self._proposal: Proposal | None = None
        self._decreed: _Decreed | None = None
        self._base_writes = parts.config.first_base_steps > 0

    def stats(self, rounds: Iterable[Round]) -> StepSpeculationStats:
        """What happened; `rounds` are those of the whole generation."""
        if self._parts.writer.is_full:
            self.recorder.note("the text does not fit the small model; the base model writes alone")
        if not self.recorder.steps:
            self.recorder.note("no step was proposed: the text has no thinking")
        return self.recorder.stats(rounds, self._parts.writer.forwards)

    def is_due(self) -> bool:
        """Whether the next round reads a step, rather than writing tokens of the base model."""
        tracker = self._parts.tracker
        if tracker.phase is not Phase.THINKING or tracker.is_paused:
            return False
        if self._repeats.must_close:
            return True
        return not self._base_writes and not self._parts.writer.is_full and self._room() > 0

    def opens(self, prompt_logits: torch.Tensor) -> bool:
        """Whether the small model writes the first tokens of all.

        Args:
            prompt_logits (`torch.Tensor` of shape `(1, 1, V)`): What the base model would write;
                kept until the next round.
        """
        if not self.is_due():
            return False
        self._proposal = self._propose()
        if self._proposal is None:
            return False
        self._parts.reader.open(prompt_logits)
        return True

    def round(self) -> StepRound | None:
        """Has a step written, reads it, and commits it or what the base model makes of it.

        Returns:
            `StepRound` or `None`: None, with nothing done, where the base model has to write.
        """
        if self._repeats.must_close:
            return self._close()
        proposal, self._proposal = self._proposal or self._propose(), None
        if proposal is None:
            return None
        with self.recorder.time("scoring"):
            return self._judge(proposal)

    def refine(self, candidates: Candidates) -> Candidates:
        """Candidates for a round of the base model: the small model's where there are none, and
        none beyond the end of the step."""
        if not candidates.token_ids:
            candidates = self._guess()
        if self._parts.tracker.phase is Phase.THINKING:
            candidates = candidates.first(self._n_inside(candidates.token_ids))
        self._n_guessed = len(candidates.token_ids) if candidates.source == "assistant" else 0
        return candidates

    def _guess(self) -> Candidates:
        parts = self._parts
        room = parts.room.text - len(parts.committer.sequence) - 1
        n_tokens = min(parts.guesses.next(), room)
        guessed = parts.writer.guess(n_tokens) if n_tokens > 0 else ()
        return Candidates(guessed, "assistant") if guessed else NO_CANDIDATES

    def observe(self, verdict: Verdict) -> None:
        """Follows a commit, after the phase did."""
        self._follow_blocks()
        n_guessed, self._n_guessed = self._n_guessed, 0
        if n_guessed:
            self._parts.guesses.observe(n_guessed, verdict.n_accepted)
        decreed, self._decreed = self._decreed, None
        if decreed is not None:
            self._step = list(verdict.token_ids)
            proposal = decreed.proposal
            if proposal is not None and proposal.token_ids == verdict.token_ids:
                self._parts.writer.accept(proposal)
            self._was_open = self._parts.tracker.is_open
            self._end_step(decreed.author)
            return
        self._step += self._thinking_of(verdict.token_ids)
        self._was_open = self._parts.tracker.is_open
        if self._step and (verdict.finished or self._is_complete()):
            self._end_step("base")
        elif self._step:
            self._base_writes = True

    def _propose(self) -> Proposal | None:
        limit = self._room()
        with self.recorder.time("proposing"):
            proposal = self._parts.writer.propose(limit)
        if proposal is not None:
            fitting = self._fitting(proposal.token_ids[:limit])
            written = proposal.written if fitting == proposal.token_ids else None
            proposal = Proposal(fitting, written) if fitting else None
        self._base_writes = proposal is None
        return proposal

    def _fitting(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """A step up to its first end marker; nothing if it says nothing."""
        watcher = self._parts.tracker.copy()
        for index, token_id in enumerate(token_ids):
            if token_id in self._parts.stops:
                token_ids = token_ids[:index]
                break
            watcher.push(token_id)
            if not watcher.is_open:
                return token_ids[: index + 1]
        return token_ids if self._parts.codec.decode(token_ids).strip() else ()

    def _judge(self, proposal: Proposal) -> StepRound:
        parts = self._parts
        token_ids, n_thinking = proposal.token_ids, parts.tracker.n_thinking
        text = parts.codec.decode(token_ids)
        reading = parts.reader.read(token_ids, text, self._index, n_thinking)
        threshold = parts.config.threshold_at(self._index, n_thinking)
        self._report = StepReport("base", 0, reading.score, threshold, len(token_ids))
        if reading.score >= threshold:
            self._decreed = _Decreed("assistant", proposal)
            verdict = parts.committer.adopt(token_ids, reading.logits)
            return StepRound(Candidates(token_ids, "step"), verdict, reading.n_fed)
        self._base_writes = True
        n_offered = min(self._n_inside(token_ids), len(token_ids) - 1)
        offered = Candidates(token_ids[:n_offered], "step")
        verdict = parts.committer.commit(reading.logits[:, : n_offered + 1], offered)
        self._report = self._report._replace(n_reused=verdict.n_accepted)
        return StepRound(offered, verdict, reading.n_fed)

    def _close(self) -> StepRound:
        """Ends thinking where both models go round in circles."""
        parts = self._parts
        closing = parts.tracker.remaining_closing()
        n_fed = parts.reader.n_pending + len(closing) - 1
        self._decreed = _Decreed("forced", None)
        verdict = parts.committer.adopt(closing, parts.reader.feed(closing[:-1]))
        return StepRound(Candidates(closing, "marker"), verdict, n_fed)

    def _n_inside(self, token_ids: tuple[int, ...]) -> int:
        """How many of `token_ids` may be offered so that the base model ends the step itself."""
        room = max(0, self._parts.room.step - len(self._step) - 1)
        ending = self._parts.end.first_in(self._step, token_ids[:room])
        return min(room, len(token_ids)) if ending is None else ending

    def _thinking_of(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The committed tokens that belong to the current step, an end marker included."""
        tracker = self._parts.tracker
        if tracker.is_open:
            # A block that was opened in this round begins behind its marker.
            return token_ids[max(0, len(token_ids) - tracker.n_open) :]
        if self._was_open:
            return token_ids[: max(0, len(token_ids) - tracker.n_answer)]
        return ()

    def _is_complete(self) -> bool:
        """Whether the base model has ended its step."""
        parts = self._parts
        if not parts.tracker.is_open or parts.end.reached(self._step):
            return True
        is_long = len(self._step) >= parts.config.max_step_tokens
        return is_long and not parts.translation.splits_character(self._step)

    def _end_step(self, author: str) -> None:
        step = self._report._replace(author=author, n_tokens=len(self._step))
        self.recorder.steps.append(step)
        text = self._parts.codec.decode(self._step)
        self._repeats.push(text, by_assistant=author == "assistant")
        self._index += 1
        self._step = []
        self._report = StepReport("base", 0)
        is_first = self._index < self._parts.config.first_base_steps
        self._base_writes = is_first or self._repeats.takes_over

    def _follow_blocks(self) -> None:
        if self._block != self._parts.tracker.blocks:
            self._block = self._parts.tracker.blocks
            self._repeats.reset()
            self._step = []

    def _room(self) -> int:
        parts = self._parts
        return parts.room.left(len(parts.committer.sequence), parts.tracker.n_open)
