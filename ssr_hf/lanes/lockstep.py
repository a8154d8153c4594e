"""Drafts as a second batch row of the parent's own forward.

Where a decode step is bound by reading the weights, which both rows share, the draft is nearly
free. Both rows speculate, each at its own pace, if the cache can mask what one row keeps and the
other does not; else both go one token at a time, which is exact on every layer kind. A bootstrapped
draft is ahead of the parent and is joined by left padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..records import NO_CANDIDATES, Candidates, Draft, ForwardShape
from ..rows import TwoRows, row_support
from .base import DraftWriter, Guesser, Lane, inherit

if TYPE_CHECKING:
    from ..target import Target


class LockstepLane(Lane):
    """Feeds the tokens of the child beside those of the parent, in one forward."""

    name = "lockstep"
    shares_forwards = True

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._shared: TwoRows | None = None
        self._guess: Guesser | None = None
        self._n_fed = 0  # tokens of the child's text that are in its row
        self._n_drafted = 0

    def _begin(self, writer: DraftWriter, previous: Draft | None) -> None:
        support = row_support(self.target)
        if previous is None or not support.padding:
            self._n_fed = len(self.target.sequence) - self.target.n_pending
            self._shared = TwoRows(self.target)
        else:
            child = self.target.fork(writer.sequence)
            inherit(child, writer, previous)
            if writer.finished:
                return
            # Rows that go one token at a time must have exactly one to feed.
            writer.forwards += child.settle() + self.target.settle()
            self._n_fed = len(writer.sequence) - 1
            self._shared = TwoRows(self.target, child)
        if support.holes:
            self._guess = writer.guesser(previous)

    @property
    def rows(self) -> int:
        return 1 if self._shared is None else 2

    @property
    def n_drafted(self) -> int:
        return self._n_drafted

    @property
    def takes_candidates(self) -> bool:
        return self._shared is None or self._guess is not None

    def forward(self, candidates: Candidates) -> torch.Tensor:
        writer, shared = self.writer, self._shared
        self._n_drafted = 0
        if writer is None or shared is None:
            return super().forward(candidates)
        known = writer.sequence.token_ids[self._n_fed :]
        guessed = NO_CANDIDATES
        if self._guess is not None:
            # What the parent feeds anyway costs the child nothing.
            width = self.target.n_pending + len(candidates.token_ids)
            text, room = writer.sequence.token_ids, writer.room - 1
            guessed = self._guess(text, room, ForwardShape(len(known), rows=2, width=width))
        elif len(known) > self.target.n_pending:
            # Until the marker is read to its end, the child's next token is already known.
            known = known[: self.target.n_pending]
        child_ids = (*known, *guessed.token_ids)
        logits = None
        try:
            logits = shared.forward(candidates.token_ids, child_ids, child_position=self._n_fed)
        except torch.OutOfMemoryError:
            self.exhausted = True
        if logits is None:
            # Not in the handler: the exception holds the tensors of the forward that failed.
            self._part()
            return super().forward(candidates)
        target_logits, child_logits = logits
        n_kept = len(known)
        if self._n_fed + n_kept == len(writer.sequence):
            try:
                self._n_drafted = writer.write(child_logits[:, n_kept - 1 :], guessed)
                n_kept += self._n_drafted - 1
            except torch.OutOfMemoryError:
                self.exhausted = True
        shared.keep_of_child(n_kept)
        self._n_fed += n_kept
        return target_logits[:, self.target.n_pending - 1 :]

    def close(self) -> None:
        self._part()
        super().close()

    def _part(self) -> None:
        """Gives the parent its cache back."""
        if self._shared is not None:
            self._shared.retire()
            self._shared = None
        self._guess = None
        self._n_drafted = 0
