"""What the tiny models of `families.py` promise to every other test, checked family by family."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, SLIDING_WINDOW, build_model, random_prompt
from torch import Tensor
from transformers import Cache, PreTrainedModel

PREFIX_LENGTH = 7
BLOCK_LENGTH = 5
TOLERANCE = 1e-3

every_family = pytest.mark.parametrize("family", FAMILIES)


@torch.no_grad()
def _forward(
    model: PreTrainedModel, input_ids: Tensor, cache: Cache | None = None
) -> tuple[Tensor, Cache]:
    """Return the logits [B, T, V] of `input_ids` [B, T] and the cache that now holds them."""
    outputs = model(input_ids, cache=cache, use_cache=True)
    return outputs.logits, outputs.cache


def _prefill(model: PreTrainedModel, prefix_ids: Tensor) -> Cache:
    return _forward(model, prefix_ids)[1]


def _single_steps(model: PreTrainedModel, input_ids: Tensor, cache: Cache) -> Tensor:
    """Feed `input_ids` [B, T] one position at a time; return the logits [B, T, V]."""
    steps = [_forward(model, token_ids, cache)[0] for token_ids in input_ids.split(1, dim=1)]
    return torch.cat(steps, dim=1)


def _relative_difference(logits: Tensor, expected_logits: Tensor) -> float:
    """Largest difference in units of the spread of the expected logits."""
    return ((logits - expected_logits).abs().max() / expected_logits.std()).item()


@every_family
def test_greedy_generation_fills_the_declared_cache(family: str) -> None:
    model = build_model(family)
    prompt_ids = random_prompt(model, PREFIX_LENGTH, seed=1)
    output = model.generate(
        prompt_ids, max_new_tokens=48, do_sample=False, return_dict_in_generate=True
    )
    assert output.sequences.shape == (1, PREFIX_LENGTH + 48)
    layers = tuple(type(layer).__name__ for layer in output.cache.layers)
    assert layers == FAMILIES[family].cache_layers
    # A family with one constant token would hide every position and cache bug.
    assert len(set(output.sequences[0, PREFIX_LENGTH:].tolist())) >= 4


@every_family
def test_only_recurrent_state_makes_a_cache_uncroppable(family: str) -> None:
    model = build_model(family)
    cache = _prefill(model, random_prompt(model, PREFIX_LENGTH, seed=2))
    assert cache.is_croppable is not FAMILIES[family].is_recurrent


@every_family
def test_block_on_filled_cache_equals_single_steps_where_declared(family: str) -> None:
    model = build_model(family)
    input_ids = random_prompt(model, PREFIX_LENGTH + BLOCK_LENGTH, seed=3)
    assert input_ids.shape[1] > SLIDING_WINDOW
    prefix_ids, block_ids = input_ids.split([PREFIX_LENGTH, BLOCK_LENGTH], dim=1)

    block_logits, _ = _forward(model, block_ids, _prefill(model, prefix_ids))
    step_logits = _single_steps(model, block_ids, _prefill(model, prefix_ids))

    is_exact = _relative_difference(block_logits, step_logits) < TOLERANCE
    assert is_exact is FAMILIES[family].multi_token_exact


@every_family
def test_second_row_leaves_the_first_as_it_was(family: str) -> None:
    """Fork by `reorder_cache([0, 0])`, retire by `reorder_cache([0])`: both exact."""
    model = build_model(family)
    input_ids = random_prompt(model, PREFIX_LENGTH + 2 * BLOCK_LENGTH, seed=4)
    lengths = [PREFIX_LENGTH, BLOCK_LENGTH, BLOCK_LENGTH]
    prefix_ids, forked_ids, retired_ids = input_ids.split(lengths, dim=1)
    child_ids = random_prompt(model, BLOCK_LENGTH, seed=5)

    alone = _prefill(model, prefix_ids)
    parent_logits = _single_steps(model, forked_ids, alone)
    parent_after_logits = _single_steps(model, retired_ids, alone)
    child_logits = _single_steps(model, child_ids, _prefill(model, prefix_ids))

    cache = _prefill(model, prefix_ids)
    cache.reorder_cache(torch.tensor([0, 0]))
    rows_logits = _single_steps(model, torch.cat([forked_ids, child_ids]), cache)
    cache.reorder_cache(torch.tensor([0]))
    after_logits = _single_steps(model, retired_ids, cache)

    assert _relative_difference(rows_logits[:1], parent_logits) < TOLERANCE
    assert _relative_difference(rows_logits[1:], child_logits) < TOLERANCE
    assert _relative_difference(after_logits, parent_after_logits) < TOLERANCE


def test_build_model_is_cached_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    assert build_model("llama", seed=1) is build_model("llama", seed=1)
    assert build_model("llama", seed=1) is not build_model("llama")
    assert torch.equal(torch.get_rng_state(), state)
