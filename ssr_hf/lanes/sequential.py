"""Drafts in the foreground: the parent waits. The semantic reference of the other lanes."""

from __future__ import annotations

from ..records import Draft
from .base import DraftWriter, Lane, write_draft


class SequentialLane(Lane):
    """Writes the whole draft when it is opened."""

    name = "sequential"

    def _begin(self, writer: DraftWriter, previous: Draft | None) -> None:
        child = self.target.fork(writer.sequence)
        write_draft(child, writer, previous, cancelled=lambda: False)
