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

    Example:

    ```python
    >>> import ssr_hf
    >>> model, tokenizer = ssr_hf.load_tiny_reasoner()
    >>> inputs = tokenizer("Keep any colour but red.", return_tensors="pt")
    >>> settings = {"max_new_tokens": 8, "return_dict_in_generate": True, "tokenizer": tokenizer}
    >>> output = ssr_hf.enable(model).generate(**inputs, **settings, self_speculation=True)
    >>> output.speculation.new_tokens == output.sequences.shape[1] - inputs["input_ids"].shape[1]
    True

    ```
    """

    speculation: SpeculationStats | None = None
    step_speculation: StepSpeculationStats | None = None
