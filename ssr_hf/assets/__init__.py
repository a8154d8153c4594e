"""The tiny reasoning model that ships with the package, and the problems it solves.

It lets tests, examples and first experiments run on a laptop without a download.
"""

from __future__ import annotations

from .loading import TINY_REASONER_DIR, fit_threads, load_tiny_reasoner
from .problems import TinyReasonerProblem, tiny_reasoner_prompts

__all__ = [
    "TINY_REASONER_DIR",
    "TinyReasonerProblem",
    "fit_threads",
    "load_tiny_reasoner",
    "tiny_reasoner_prompts",
]
