"""The immutable values that the parts of the decoding loop hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .acceptance import Proposal


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Where thinking was forked.

    Args:
        thinking_tokens (`int`): Tokens of the current thinking block at the fork.
        position (`int`): Tokens of the whole text, prompt included, at the fork.
        stage (`int`): 0 for the first draft of a generation, 1 for the second, ...
    """

    thinking_tokens: int
    position: int
    stage: int


class DraftStatus(StrEnum):
    """How a draft ended."""

    COMPLETE = "complete"  # the child wrote an end-of-sequence token
    FULL = "full"  # `max_draft_tokens` were written
    CUT = "cut"  # stopped from outside, such as by the end of thinking; it is used as far as it got
    DISCARDED = "discarded"  # nothing was written, or there is no answer that it could serve


@dataclass(frozen=True, slots=True)
class Draft:
    """An answer written from a partial chain of thought (SSR, "self-speculation").

    Args:
        branch_point (`BranchPoint`): Where thinking was forked.
        token_ids (`tuple[int, ...]`): The answer so far, without the end-of-thinking marker.
        status (`DraftStatus`): How it ended.
        inherited (`int`): Leading tokens taken over from the previous draft (bootstrapping).
        forwards (`int`): Forwards of its own, those not counted that it shared with the parent.
        proposals (`tuple[Proposal, ...]`): What each token was drawn from; empty unless sampled.
    """

    branch_point: BranchPoint
    token_ids: tuple[int, ...]
    status: DraftStatus
    inherited: int = 0
    forwards: int = 0
    proposals: tuple[Proposal, ...] = ()


class ForwardShape(NamedTuple):
    """What a forward feeds beside candidates.

    `n_pending` committed tokens in front of them; as much in each of its `rows`, and at least
    `width` tokens.
    """

    n_pending: int
    rows: int = 1
    width: int = 0

    def n_fed(self, n_candidates: int) -> int:
        """Tokens of the forward with so many candidates, over all rows."""
        return self.rows * max(self.n_pending + n_candidates, self.width)


class Candidates(NamedTuple):
    """Tokens offered for one verification.

    `source` names who proposed them: `"draft"` (the whole draft, prefix verification), `"suffix"`
    (a span of the suffix index), `"marker"` (the forced end-of-thinking marker), `"step"` (a step
    of a small model), `"assistant"` (a few tokens of it) or `"none"`.
    `proposals` says what each token was drawn from where that is known, else it is empty.
    `chances` are estimated probabilities that the candidates are right up to each one, if known.
    `stage` is that of the draft.
    """

    token_ids: tuple[int, ...] = ()
    source: str = "none"
    proposals: tuple[Proposal, ...] = ()
    chances: tuple[float, ...] = ()
    stage: int = 0

    def proposal(self, position: int) -> Proposal | None:
        """What the token at `position` was drawn from; None where it was not drawn."""
        return self.proposals[position] if position < len(self.proposals) else None

    def first(self, n_tokens: int) -> Candidates:
        """The first `n_tokens` of these candidates."""
        if n_tokens == 0:
            return NO_CANDIDATES
        return self._replace(
            token_ids=self.token_ids[:n_tokens],
            proposals=self.proposals[:n_tokens],
            chances=self.chances[:n_tokens],
        )


class Verdict(NamedTuple):
    """What one round committed.

    `token_ids` are the committed tokens: the accepted candidates, then the model's own next token.
    `n_accepted` counts candidates that were committed, `finished` says that a criterion stopped.
    """

    token_ids: tuple[int, ...]
    n_accepted: int
    finished: bool


NO_CANDIDATES = Candidates()
NOTHING_COMMITTED = Verdict((), 0, False)
