"""The phase of a running generation: before, in or behind its thinking."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from enum import StrEnum

from .discovery import ThinkingMarkers
from .matching import NOTHING, MatchState, marker_automaton, text_matcher


class Phase(StrEnum):
    """Where a generation stands."""

    NONE = "none"
    THINKING = "thinking"
    CLOSING = "closing"
    ANSWERING = "answering"


class PhaseTracker:
    """Follows one sequence through thinking, closing and answering, one token at a time.

    The prompt decides the first phase. Only what follows its last turn boundary counts, so markers
    in earlier turns and in user messages are ignored:

    - the last marker there opens thinking: `THINKING`;
    - the last marker there closes it (thinking switched off, or a prefilled answer): `ANSWERING`;
    - no marker there: `NONE`, as the model may open thinking itself; `THINKING` if there is no
      opening marker.

    Where no turn boundaries are known, the whole prompt counts, and a closing marker followed by
    anything but white space (by more than two tokens, without a tokenizer) is an earlier turn's.

    Args:
        markers ([`ThinkingMarkers`]): The markers of the model.
        prompt_ids (`Sequence[int]`): The prompt, left padding allowed.

    Attributes:
        markers ([`ThinkingMarkers`]): The markers given.
        blocks (`int`): Thinking blocks so far: one opened by the prompt, each one opened since.
        n_answer (`int`): Generated tokens since thinking was closed last, the marker excluded.
        n_answered (`int`): Generated tokens of all answers.
        n_closed (`int`): How often thinking was closed since the prompt.
    """

    __slots__ = (
        "_automaton",
        "_base",
        "_block",
        "_match",
        "_paused",
        "_state",
        "_text",
        "blocks",
        "markers",
        "n_answer",
        "n_answered",
        "n_closed",
    )

    def __init__(self, markers: ThinkingMarkers, prompt_ids: Sequence[int]) -> None:
        self.markers = markers
        self._automaton = marker_automaton(markers.start, markers.end)
        self._text = text_matcher(markers)
        self._state = 0
        self._match = NOTHING
        self._base = self._unopened
        self._paused = False
        self._block = self.blocks = self.n_answer = self.n_answered = self.n_closed = 0
        self._read_prompt(prompt_ids)

    @property
    def phase(self) -> Phase:
        """The phase after the last token; `CLOSING` while an end marker is incomplete."""
        return Phase.CLOSING if self.closing_progress else self._base

    @property
    def n_thinking(self) -> int:
        """Generated tokens of the current (or last) thinking block, markers excluded."""
        return max(0, self._block - (0 if self._paused else self.closing_progress))

    @property
    def n_open(self) -> int:
        """Like `n_thinking`, but an incomplete end marker counts too: what a budget compares."""
        return self._block

    @property
    def is_open(self) -> bool:
        """Whether a thinking block is open (`THINKING` or `CLOSING`)."""
        return self._base is Phase.THINKING

    @property
    def is_paused(self) -> bool:
        """Whether the model has left the open block for the answer or something else."""
        return self.is_open and self._paused

    @property
    def closing_progress(self) -> int:
        """How many of the last tokens are the beginning of an end marker."""
        return self._match.progress if self.is_open else 0

    def remaining_closing(self) -> tuple[int, ...]:
        """The ids that complete the end marker in progress, or else write the canonical one.

        Empty outside a thinking block.
        """
        if not self.is_open:
            return ()
        return self._match.rest if self._match.progress else self.markers.closing

    def push(self, token_id: int) -> Phase:
        """Takes the next token of the sequence and returns the phase after it."""
        progress = 0 if self._paused else self.closing_progress
        match = self._match = self._recognise(token_id)
        if self._base is Phase.THINKING:
            self._push_inside(token_id, match, progress)
        elif match.starts:
            self._open()
        elif self._base is Phase.ANSWERING:
            self.n_answer += 1
            self.n_answered += 1
            if token_id in self.markers.pause:
                self._base = self._unopened
        elif match.ends:
            self._answer()
        return self.phase

    def copy(self) -> PhaseTracker:
        """An independent tracker in the same state."""
        twin = copy(self)
        twin._text = self._text.copy() if self._text else None
        return twin

    @property
    def _unopened(self) -> Phase:
        return Phase.NONE if self.markers.start else Phase.THINKING

    def _push_inside(self, token_id: int, match: MatchState, progress: int) -> None:
        """One token of an open block; `progress` is how much of it was an end marker so far."""
        if match.ends:
            self._block = max(0, self._block - progress)
            self._answer()
            return
        if token_id in self.markers.pause:
            self._paused = True
        elif not self._paused:
            self._block += 1
        if self._paused and not match.progress:
            self._base = self._unopened
            self._paused = False
            if match.starts:
                self._open()

    def _open(self) -> None:
        self._base = Phase.THINKING
        self._block = 0
        self._paused = False
        self.blocks += 1

    def _answer(self) -> None:
        self._base = Phase.ANSWERING
        self._paused = False
        self.n_answer = 0
        self.n_closed += 1

    def _recognise(self, token_id: int) -> MatchState:
        self._state = self._automaton.moves[self._state].get(token_id, 0)
        match = self._automaton.states[self._state]
        text = self._text.push(token_id) if self._text else NOTHING
        if match.ends or (match.starts and not self.is_open):
            # The tokens of one marker are never the beginning of another.
            self._state = 0
            return match._replace(progress=0, rest=())
        is_further = text.starts or text.ends or text.progress > match.progress
        return text if is_further else match

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        boundaries = self.markers.boundaries
        places = range(len(prompt_ids) - 1, -1, -1)
        first = next((at for at in places if prompt_ids[at] in boundaries), -1) + 1
        closed_at = first
        for at in range(first, len(prompt_ids)):
            self.push(prompt_ids[at])
            if self._match.ends:
                closed_at = at
        is_closed = self._base is Phase.ANSWERING
        if is_closed and not boundaries and self._is_old_turn(prompt_ids[closed_at + 1 :]):
            self._base = self._unopened
        self._block = self.n_answer = self.n_answered = self.n_closed = 0
        self.blocks = int(self.is_open)

    def _is_old_turn(self, after: Sequence[int]) -> bool:
        """Whether more follows a closed block than a template writes where thinking is off."""
        codec = self.markers.codec
        return len(after) > 2 if codec is None else bool(codec.decode(after).strip())
