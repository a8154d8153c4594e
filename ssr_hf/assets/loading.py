"""Loading the tiny reasoning model from the installed package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .problems import TinyReasonerProblem, tiny_reasoner_prompts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

__all__ = [
    "TINY_REASONER_DIR",
    "TinyReasonerProblem",
    "load_tiny_reasoner",
    "tiny_reasoner_prompts",
]

TINY_REASONER_DIR = Path(__file__).resolve().parent / "tiny_reasoner"
"""Directory of the model and tokenizer files, usable wherever a model name or path is expected."""


def load_tiny_reasoner(
    dtype: torch.dtype | None = None,
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Load the tiny reasoning model and its tokenizer, without touching the network.

    Args:
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Type of the weights in memory. The files hold half precision to keep the package
            small; the default is single precision because a CPU computes it fastest and because
            greedy decoding is then reproducible across batch sizes in practice.

    Returns:
        `tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]`: the model in evaluation mode, on the
        CPU, and its tokenizer, whose chat template opens `<think>`.

    Example:

    ```python
    >>> from ssr_hf.assets import load_tiny_reasoner, tiny_reasoner_prompts

    >>> model, tokenizer = load_tiny_reasoner()
    >>> problem = tiny_reasoner_prompts(1, seed=0)[0]
    >>> inputs = tokenizer.apply_chat_template(
    ...     problem.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ... )
    >>> output = model.generate(**inputs, max_new_tokens=32, do_sample=False)

    ```
    """
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY_REASONER_DIR, local_files_only=True)
    model = Qwen3ForCausalLM.from_pretrained(
        TINY_REASONER_DIR,
        dtype=torch.float32 if dtype is None else dtype,
        local_files_only=True,
    )
    model.eval()
    return model, tokenizer
