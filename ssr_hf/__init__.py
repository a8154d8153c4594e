"""ssr_hf: reasoning models answer faster through `model.generate`, without changing a token."""

from __future__ import annotations

from importlib.metadata import version

from .assets import fit_threads, load_tiny_reasoner, tiny_reasoner_prompts
from .budget import ThinkingBudgetLogitsProcessor
from .candidates import SuffixCandidateGenerator
from .config import SelfSpeculationConfig, SuffixConfig
from .detokenizer import IncrementalDetokenizer
from .errors import ConfigError, MarkerError, SelfSpeculationError, UnsupportedError
from .generation import disable, enable, self_speculative_decoding
from .markers import ThinkingMarkers
from .outputs import SelfSpeculativeOutput
from .profile import Profile
from .specreason import ProposedStep, StepReport, StepSpeculationConfig, StepSpeculationStats
from .stats import DraftReport, Round, SpeculationStats

__version__ = version("ssr-hf")

__all__ = [
    "ConfigError",
    "DraftReport",
    "IncrementalDetokenizer",
    "MarkerError",
    "Profile",
    "ProposedStep",
    "Round",
    "SelfSpeculationConfig",
    "SelfSpeculationError",
    "SelfSpeculativeOutput",
    "SpeculationStats",
    "StepReport",
    "StepSpeculationConfig",
    "StepSpeculationStats",
    "SuffixCandidateGenerator",
    "SuffixConfig",
    "ThinkingBudgetLogitsProcessor",
    "ThinkingMarkers",
    "UnsupportedError",
    "__version__",
    "disable",
    "enable",
    "fit_threads",
    "load_tiny_reasoner",
    "self_speculative_decoding",
    "tiny_reasoner_prompts",
]
