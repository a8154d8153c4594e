"""SpecReason (arXiv 2504.07891): a small model writes reasoning steps, the base model judges them.

Lossy: an accepted step is not what the base model would have written. To add a way of judging, see
`scoring.py`.
"""

from __future__ import annotations

from .binding import bind_steps
from .config import StepSpeculationConfig
from .controller import StepSpeculation
from .request import StepRequest, refuse_steps
from .scoring import ProposedStep
from .stats import StepReport, StepSpeculationStats

__all__ = [
    "ProposedStep",
    "StepReport",
    "StepRequest",
    "StepSpeculation",
    "StepSpeculationConfig",
    "StepSpeculationStats",
    "bind_steps",
    "refuse_steps",
]
