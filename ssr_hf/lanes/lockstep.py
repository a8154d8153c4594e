"""Drafts as a second batch row of the parent's own forward.

Both rows feed the same number of tokens per round, so their caches grow in step and no padding or
mask is needed; it is exact on every layer kind. Where a decode step is bound by reading the
weights, which both rows share, the draft is nearly free. A bootstrapped draft is ahead of the
parent and is joined by left padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..records import Candidates, Draft
from .base import DraftWriter, Lane, inherit

if TYPE_CHECKING:
    from ..target import Target


class LockstepLane(Lane):
    """Feeds one token of the child beside each token of the parent."""

    name = "lockstep"
    holds_rounds = True

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._riding = False
        self._n_fed = 0  # tokens of the child's text that were fed or are in its cache

    def open(self, writer: DraftWriter, previous: Draft | None) -> None:
        self.writer = writer
        if previous is None:
            self._n_fed = len(self.target.sequence) - self.target.n_pending
            self.target.add_child_row()
        else:
            child = self.target.fork(writer.sequence)
            inherit(child, writer, previous)
            if writer.finished:
                return
            # Both rows must have exactly one token to feed.
            child.settle()
            self.target.settle()
            self._n_fed = len(writer.sequence) - 1
            self.target.join(child, lead=len(writer.sequence) - len(self.target.sequence))
        self._riding = True

    @property
    def rows(self) -> int:
        return 2 if self._riding else 1

    def forward(self, candidates: Candidates) -> torch.Tensor:
        writer = self.writer
        if writer is None or not self._riding:
            return super().forward(candidates)
        n_tokens = self.target.n_pending
        child_ids = writer.sequence.token_ids[self._n_fed : self._n_fed + n_tokens]
        target_logits, child_logits = self.target.forward_with_child(child_ids)
        self._n_fed += n_tokens
        # Until the marker is read to its end, the child's next token is already known.
        if self._n_fed == len(writer.sequence):
            writer.write(child_logits)
        else:
            writer.forwards += 1
        return target_logits

    def close(self) -> None:
        if self._riding:
            self.target.retire_child_row()
            self._riding = False
        super().close()
