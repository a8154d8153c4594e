"""Loading the tiny reasoning model from the installed package."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from .problems import TinyReasonerProblem, tiny_reasoner_prompts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

__all__ = [
    "TINY_REASONER_DIR",
    "TinyReasonerProblem",
    "fit_threads",
    "load_tiny_reasoner",
    "tiny_reasoner_prompts",
]

TINY_REASONER_DIR = Path(__file__).resolve().parent / "tiny_reasoner"
"""Directory of the model and tokenizer files, usable wherever a model name or path is expected."""

# Tokens of the forwards that are timed: plain decoding, a round with spans, one with a draft.
_ROUND_TOKENS = (1, 8, 32)
_ROUNDS = 12
# Two threads that are this many times slower after so many rounds are not measured further: where
# other programs use the cores, a forward on them can take a hundred times as long.
_HOPELESS = 3.0
_FEW_ROUNDS = 3


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


def fit_threads(model: Qwen3ForCausalLM) -> int:
    """Set the number of CPU threads with which the tiny reasoner is fastest here, and return it.

    At this size a second thread shortens forwards over several tokens where cores are idle, and
    multiplies the time of every forward where other programs use them. So one and two are measured,
    in turns, in about a fifth of a second.

    Args:
        model (`Qwen3ForCausalLM`): The model that `load_tiny_reasoner` returned.

    Returns:
        `int`: 1 or 2; what `torch.get_num_threads()` says from now on.

    Example:

    ```python
    >>> import ssr_hf
    >>> model, tokenizer = ssr_hf.load_tiny_reasoner()
    >>> ssr_hf.fit_threads(model) in (1, 2)
    True

    ```
    """
    import torch

    seconds: dict[tuple[int, int], list[float]] = {}
    ids = torch.zeros(1, max(_ROUND_TOKENS), dtype=torch.long, device=model.device)
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            for n_rounds in range(1, _ROUNDS + 1):
                for threads, n_tokens in itertools.product((1, 2), _ROUND_TOKENS):
                    torch.set_num_threads(threads)
                    start = time.perf_counter()
                    model(ids[:, :n_tokens])
                    taken = time.perf_counter() - start
                    seconds.setdefault((threads, n_tokens), []).append(taken)
                is_slow = _total(seconds, 2) > _HOPELESS * _total(seconds, 1)
                if is_slow and n_rounds >= _FEW_ROUNDS:
                    break
    except BaseException:
        torch.set_num_threads(before)
        raise
    fastest = min((1, 2), key=lambda threads: _total(seconds, threads))
    torch.set_num_threads(fastest)
    return fastest


def _total(seconds: dict[tuple[int, int], list[float]], threads: int) -> float:
    """Seconds of one forward of each size."""
    return sum(median(seconds[threads, size]) for size in _ROUND_TOKENS)
