"""SpecReason (arXiv 2504.07891): a small model writes reasoning steps, the base model judges them.

Lossy: an accepted step is not what the base model would have written. It costs the base model one
forward; so does reading a step that is rejected, and that forward selects the base model's own
tokens as far as they agree with the step. Caches with recurrent layers cannot drop the score
prompt: they go back to before the step, which is fed again beside the next forward's tokens. The
scorer `"logprob"` reads no prompt and needs none of that.

With self-speculation in the same call, answers are drafted from the accepted chain of thought. Lane
`"lockstep"` needs rounds of one token, so its drafts ride while the base model writes; when a step
is read they are put aside, and taken up again, bootstrapped, when the base model writes again.
Other lanes draft as always. Neither they nor candidates of the small model change a token.

To add a way of judging, see `scoring.py`.
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
