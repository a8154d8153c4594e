"""Where thinking begins and ends: marker discovery and the phase of a running generation.

Everything here works on token ids and is cheap enough to run once per token. A wrong guess about
the phase can cost speed, never correctness: no output token depends on it unless a thinking budget
is asked for.
"""

from __future__ import annotations

from .codec import TokenCodec
from .discovery import ThinkingMarkers
from .phases import Phase, PhaseTracker
from .presets import PRESETS

__all__ = ["PRESETS", "Phase", "PhaseTracker", "ThinkingMarkers", "TokenCodec"]
