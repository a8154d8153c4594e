"""What `generate` returns with `return_dict_in_generate=True` under self-speculation."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.generation import GenerateDecoderOnlyOutput

from .stats import SpeculationStats


@dataclass
class SelfSpeculativeOutput(GenerateDecoderOnlyOutput):
    """The output of plain `generate`, plus what speculation did.

    Args:
        speculation (`SpeculationStats`, *optional*):
            Rounds, drafts and the figures derived from them. Everything else is as in
            `GenerateDecoderOnlyOutput`: `sequences`, `scores`, `logits`, `hidden_states`, `cache`.
    """

    speculation: SpeculationStats | None = None
