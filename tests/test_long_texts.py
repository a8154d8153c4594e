"""Texts that cross the length at which rotary positions change for all tokens at once."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, run_both
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from ssr_hf import SelfSpeculationConfig

CROSSING = 64
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [6.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": CROSSING,
}
SHAPE = {
    "vocab_size": 24,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": ROPE,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def _model(kind: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if kind == "phi3":
        config = Phi3Config(**SHAPE, original_max_position_embeddings=CROSSING)
        model: PreTrainedModel = Phi3ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    # Far from uniform, so that texts repeat themselves and positions matter.
    for parameter in model.parameters():
        parameter.data *= 3
    return model.eval()


@pytest.mark.parametrize("lane", ["lockstep", "sequential"])
@pytest.mark.parametrize("n_prompt", [45, CROSSING, CROSSING + 1, CROSSING + 10])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_rotary_positions_that_change_with_the_length(kind: str, n_prompt: int, lane: str) -> None:
    """Candidates or drafts beyond the crossing change the positions of the tokens before it."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 24, (1, 30), generator=generator).repeat(1, 3)[:, :n_prompt]
        config = SelfSpeculationConfig(
            end_of_thinking=[1], draft_budget=4, lane=lane, adaptive=False
        )
        pair = run_both(_model(kind, seed), ids, config, max_new_tokens=50)
        assert_same(pair)
        said = any(f"behind {CROSSING} tokens" in note for note in pair.stats.notes)
        assert said is (n_prompt <= CROSSING)
        if n_prompt > CROSSING:
            assert len(pair.stats.rounds) < pair.stats.new_tokens
