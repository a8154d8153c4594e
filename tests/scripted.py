"""Models that say what a script says, on every cache kind.

The next token is a function of the text that the model can see, and it sees its text only through
its cache: a token that was not rolled back, or not fed again, changes what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

SURE = 30.0  # logit of the scripted token; all others have 0
LONGEST_TEXT = 2048
WINDOW = 64

LAYERS = {
    "full": ["full_attention"],
    "sliding": ["sliding_attention"],
    "recurrent": ["linear_attention", "full_attention"],
}

Script = Callable[[str], str]


class ScriptedConfig(PretrainedConfig):
    """What the cache is made from."""

    model_type = "scripted"

    def __init__(self, kind: str = "full", vocab_size: int = 300, **kwargs: Any) -> None:
        self.layer_types = LAYERS[kind]
        self.num_hidden_layers = len(self.layer_types)
        self.sliding_window = WINDOW
        self.num_attention_heads = 1
        self.num_key_value_heads = 1
        self.hidden_size = 1
        self.head_dim = 1
        self.vocab_size = vocab_size
        self.max_position_embeddings = LONGEST_TEXT
        super().__init__(**kwargs)


@dataclass
class ScriptedOutput(CausalLMOutputWithPast):
    """With the cache under its present name."""

    cache: Any = None


class ScriptedModel(PreTrainedModel, GenerationMixin):
    """Says `script(text)`: the continuation of the text that it sees, `""` for anything else.

    Args:
        script (`Callable[[str], str]`): From the visible text to what follows; its first token is
            the next one.
        tokenizer (`PreTrainedTokenizerFast`): Turns ids into text and back.
        kind (`str`): A key of `LAYERS`.
        padding (`int`): Rows of the vocabulary beyond the tokenizer's.
    """

    config_class = ScriptedConfig
    main_input_name = "input_ids"

    def __init__(
        self,
        script: Script,
        tokenizer: PreTrainedTokenizerFast,
        kind: str = "full",
        padding: int = 0,
        size: int = 1,
    ) -> None:
        super().__init__(ScriptedConfig(kind, len(tokenizer) + padding))
        self.script = script
        self.tokenizer = tokenizer
        self.kind = kind
        self.fed: list[int] = []
        self.lm_head = torch.nn.Linear(size, self.config.vocab_size, bias=False)
        self.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
        self.eval()

    @property
    def n_forwards(self) -> int:
        """Forwards since `fed`, the tokens of each, was cleared."""
        return len(self.fed)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: Tensor, cache: Any = None, logits_to_keep: int = 0, **kwargs: Any
    ) -> ScriptedOutput:
        """Logits `[B, n, V]`, or of the last `logits_to_keep` positions."""
        n_new = input_ids.shape[1]
        self.fed.append(n_new)
        seen = self._read(input_ids, cache)
        n_kept = logits_to_keep or n_new
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)[:, -n_kept:]
        for row, ids in enumerate(seen):
            for position in range(n_kept):
                end = len(ids) - n_kept + position + 1
                start = max(0, end - WINDOW) if self.kind == "sliding" else 0
                logits[row, position, self._next_token(ids[start:end])] = SURE
        return ScriptedOutput(logits=logits, cache=cache)

    def _next_token(self, ids: list[int]) -> int:
        known = [token_id for token_id in ids if token_id < len(self.tokenizer)]
        n_begun = 0  # tokens of a character that is not complete
        while n_begun < 3 and self.tokenizer.decode(known).endswith("\ufffd"):
            known.pop()
            n_begun += 1
        said = self.script(self.tokenizer.decode(known))
        said_ids = self.tokenizer.encode(said or "?", add_special_tokens=False)
        return (said_ids[n_begun:] or said_ids)[0]

    def _read(self, input_ids: Tensor, cache: Any) -> list[list[int]]:
        """Puts the tokens into the cache; returns the tokens that each row sees."""
        keys = input_ids.float()[:, None, :, None]  # [B, 1, n, 1]
        if self.kind != "recurrent":
            seen, _ = cache.update(keys, keys, 0)
            return [ids.int().tolist() for ids in seen[:, 0, :, 0]]
        cache.update(keys, keys, 1)
        return [self._append(row, input_ids, cache) for row in range(len(input_ids))]

    def _append(self, row: int, input_ids: Tensor, cache: Any) -> list[int]:
        """The recurrent state of a row is its length, followed by its tokens."""
        layer = cache.layers[0]
        state = torch.zeros(len(input_ids), LONGEST_TEXT + 1)
        if layer.is_recurrent_states_initialized[0]:
            state = layer.recurrent_states[0].clone()
        length, n_new = int(state[row, 0]), input_ids.shape[1]
        state[row, 1 + length : 1 + length + n_new] = input_ids[row].float()
        state[row, 0] = length + n_new
        state = cache.update_recurrent_state(state, 0)
        return state[row, 1 : 1 + length + n_new].int().tolist()
