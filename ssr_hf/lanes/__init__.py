"""Lanes: the ways to run drafts, by name. To add one, write a module and add a row here."""

from __future__ import annotations

from .base import DraftRules, DraftWriter, Lane
from .lockstep import LockstepLane
from .sequential import SequentialLane
from .stream import StreamLane

LANE_TYPES: dict[str, type[Lane]] = {
    lane.name: lane for lane in (LockstepLane, StreamLane, SequentialLane)
}

__all__ = ["LANE_TYPES", "DraftRules", "DraftWriter", "Lane"]
