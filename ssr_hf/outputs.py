"""What `generate` returns with `return_dict_in_generate=True` under self-speculation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers.generation import GenerateDecoderOnlyOutput

from .stats import SpeculationStats

if TYPE_CHECKING:
    from .specreason import StepSpeculationStats


@dataclass
class SelfSpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of plain `generate`, plus what speculation did.

    Args:
        speculation (`SpeculationStats`, *optional*):
            Rounds, drafts and the figures derived from them. Everything else is as in
            `GenerateDecoderOnlyOutput`: `sequences`, `scores`, `logits`, `hidden_states`, `cache`.
        step_speculation (`StepSpeculationStats`, *optional*):
            Steps by author, scores and times, where a small model wrote steps.
    """

    speculation: SpeculationStats | None = None
    step_speculation: StepSpeculationStats | None = None
