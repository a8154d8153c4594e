"""What a lane is: a way to run drafts. Lanes differ in how they draft, never in what they draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from ..acceptance import Proposal, draft_generator
from ..cache.support import Support, Supported
from ..records import (
    NO_CANDIDATES,
    BranchPoint,
    Candidates,
    Draft,
    DraftStatus,
    ForwardShape,
)
from ..tokens import TokenSequence

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedModel

    from ..target import Target


class Guesser(Protocol):
    """Guesses how a text goes on."""

    def __call__(self, token_ids: Sequence[int], room: int, shape: ForwardShape) -> Candidates:
        """At most `room` candidates behind `token_ids`, for a forward of that shape."""


@dataclass(frozen=True, slots=True)
class DraftRules:
    """What holds for every draft of one generation.

    Args:
        closing_ids (`tuple[int, ...]`): The end-of-thinking marker that a draft appends.
        eos_token_ids (`frozenset[int]`): Tokens that end a draft.
        logits_processor (`LogitsProcessorList`): Only processors without side effects.
        seed (`int`, *optional*): Drafts are sampled with this seed; they are greedy when None.
        make_guesser (`Callable`, *optional*): Makes, from the text at the fork and the previous
            draft, a function that guesses what an independent draft writes next.
    """

    closing_ids: tuple[int, ...]
    eos_token_ids: frozenset[int]
    logits_processor: LogitsProcessorList
    seed: int | None = None
    make_guesser: Callable[[Sequence[int], Draft | None], Guesser] | None = None

    @property
    def samples(self) -> bool:
        """Whether drafts are sampled and say what each token was drawn from."""
        return self.seed is not None


class DraftWriter:
    """The text of one draft while it is written, on its own copy of the text so far.

    Args:
        branch_point (`BranchPoint`): Where thinking was forked.
        text (`TokenSequence`): The parent's text at the fork; it is copied.
        rules (`DraftRules`): Marker, ends and processors.
        max_tokens (`int`): Longest draft, in tokens.
    """

    def __init__(
        self, branch_point: BranchPoint, text: TokenSequence, rules: DraftRules, max_tokens: int
    ) -> None:
        self.branch_point = branch_point
        self.sequence = TokenSequence(text.ids)
        self.sequence.append(rules.closing_ids)
        self.inherited = 0
        self.forwards = 0
        self._rules = rules
        self._start = len(self.sequence)
        self._end = self._start + max_tokens
        self.status: DraftStatus | None = None
        self._proposals: list[Proposal] = []
        self._generator: torch.Generator | None = None
        if rules.seed is not None:
            device = self.sequence.device
            self._generator = draft_generator(rules.seed, branch_point.stage, device)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The draft so far, without the marker."""
        return tuple(self.sequence.token_ids[self._start :])

    @property
    def room(self) -> int:
        """Tokens that the draft may still write."""
        return self._end - len(self.sequence)

    @property
    def finished(self) -> bool:
        """Whether the draft ended by itself."""
        return self.status is not None

    def write(self, logits: torch.Tensor, candidates: Candidates = NO_CANDIDATES) -> int:
        """Appends the tokens that `logits` select, up to the first that differs from a candidate.

        Args:
            logits (`torch.Tensor` of shape `(1, m + 1, V)`): Judging `m` candidates.
            candidates (`Candidates`): What was offered.

        Returns:
            `int`: Tokens written, at least one.
        """
        offered = candidates.token_ids
        best = self._best(logits)
        for position in range(len(offered) + 1):
            if best is not None:
                token_id = best[position]
            elif self._generator is None:
                token_id = self._select(logits[:, position])
            else:
                token_id = self._draw(logits[:, position], candidates.proposal(position))
            self.sequence.append((token_id,))
            self._update_status(token_id)
            if self.finished or position == len(offered) or token_id != offered[position]:
                return position + 1
        raise AssertionError("the loop returns at the last position")

    def guesser(self, previous: Draft | None) -> Guesser:
        """What guesses this draft's next tokens; it guesses nothing where nothing was set."""
        make = self._rules.make_guesser
        if make is None:
            return lambda token_ids, room, shape: NO_CANDIDATES
        return make(self.sequence.token_ids[: self._start], previous)

    def _best(self, logits: torch.Tensor) -> list[int] | None:
        """All greedy tokens in one transfer, where none depends on those before it."""
        if self._generator is not None or len(self._rules.logits_processor) > 0:
            return None
        best: list[int] = logits[0].argmax(dim=-1).tolist()
        return best

    def _select(self, position_logits: torch.Tensor) -> int:
        return int(self._process(position_logits).argmax(dim=-1).item())

    def _draw(self, position_logits: torch.Tensor, judged: Proposal | None) -> int:
        assert self._generator is not None, "only called where drafts are sampled"
        proposal = Proposal.draw(self._process(position_logits), self._generator, judged)
        self._proposals.append(proposal)
        return proposal.token_id

    def _process(self, position_logits: torch.Tensor) -> torch.Tensor:
        """Scores `[1, V]` of the next token."""
        scores = position_logits.to(copy=True, dtype=torch.float32, device=self.sequence.device)
        return self._rules.logits_processor(self.sequence.ids, scores)

    def _update_status(self, token_id: int) -> None:
        if token_id in self._rules.eos_token_ids:
            self.status = DraftStatus.COMPLETE
        elif len(self.sequence) >= self._end:
            self.status = DraftStatus.FULL

    def draft(self, fallback: DraftStatus) -> Draft:
        """The draft as it stands; `fallback` is its status if it did not end by itself."""
        return Draft(
            branch_point=self.branch_point,
            token_ids=self.token_ids,
            status=self.status or fallback,
            inherited=self.inherited,
            forwards=self.forwards,
            proposals=tuple(self._proposals),
        )


def inherit(child: Target, writer: DraftWriter, previous: Draft | None) -> None:
    """First forward of a draft: reads the marker and verifies the previous draft, if there is one.

    The previous draft was written from a shorter chain of thought; the prefix that still holds is
    kept (bootstrapped drafting, SSR appendix C).
    """
    candidates = NO_CANDIDATES
    if previous is not None:
        candidates = Candidates(previous.token_ids, "draft", previous.proposals)
        candidates = candidates.first(writer.room - 1)
    n_written = writer.write(child.forward(candidates.token_ids), candidates)
    child.keep(n_written)
    writer.forwards += 1
    writer.inherited = n_written - 1


def write_draft(
    child: Target,
    writer: DraftWriter,
    previous: Draft | None,
    cancelled: Callable[[], bool],
) -> None:
    """Writes a whole draft on an independent target, speculating on what is known already."""
    inherit(child, writer, previous)
    guess = writer.guesser(previous)
    while not writer.finished and not cancelled():
        shape = ForwardShape(child.n_pending)
        candidates = guess(writer.sequence.token_ids, writer.room - 1, shape)
        child.keep(writer.write(child.forward(candidates.token_ids), candidates))
        writer.forwards += 1


class Lane(ABC):
    """Runs at most one draft at a time beside the parent.

    A lane never changes the parent's text, and leaves the parent's cache holding exactly the
    parent's committed tokens whenever no draft is open. A draft is optional work: where memory runs
    out for it, it ends as far as it got, the lane is `exhausted`, and the parent goes on.

    Args:
        target (`Target`): The parent.
    """

    name: ClassVar[str]
    # Whether drafts ride in the parent's own forwards.
    shares_forwards: ClassVar[bool] = False

    def __init__(self, target: Target) -> None:
        self.target = target
        self.writer: DraftWriter | None = None
        self.exhausted = False

    @classmethod
    def support(cls, model: PreTrainedModel) -> Support:
        """Whether drafts of `model` can run in this way without changing a token."""
        return Supported()

    @property
    def is_open(self) -> bool:
        """Whether a draft is being written or waits to be collected."""
        return self.writer is not None

    @property
    def rows(self) -> int:
        """Batch rows of a forward while the draft is as it is."""
        return 1

    @property
    def n_drafted(self) -> int:
        """Tokens that a riding draft wrote in the last forward."""
        return 0

    @property
    def takes_candidates(self) -> bool:
        """Whether the parent may offer candidates in the next round."""
        return True

    def open(self, writer: DraftWriter, previous: Draft | None) -> None:
        """Starts a draft. The parent's text at this moment is `writer`'s prefix."""
        self.writer = writer
        try:
            self._begin(writer, previous)
        except torch.OutOfMemoryError:
            self.exhausted = True

    @abstractmethod
    def _begin(self, writer: DraftWriter, previous: Draft | None) -> None:
        """Forks, and writes what is written at once."""

    @property
    def is_done(self) -> bool:
        """Whether the open draft will get no further token."""
        return self.writer is not None and (self.writer.finished or self.exhausted)

    def forward(self, candidates: Candidates) -> torch.Tensor:
        """The parent's forward of this round; a draft may ride in it.

        Returns:
            `torch.Tensor` of shape `(1, m + 1, V)`: The parent's logits.
        """
        return self.target.forward(candidates.token_ids)

    def collect(self, fallback: DraftStatus) -> Draft:
        """Ends the open draft and returns it; `fallback` is its status if it had not ended."""
        writer = self.writer
        assert writer is not None, "collect is only called while a draft is open"
        self.close()
        return writer.draft(fallback)

    def close(self) -> None:
        """Stops the open draft, if any, and releases everything it holds. Idempotent."""
        self.writer = None
