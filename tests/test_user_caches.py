"""Caches given by the user: read right, and left as plain `generate` leaves them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES, build_model, random_prompt
from helpers import (
    LANES,
    STEADY_LANES,
    Declared,
    Pair,
    assert_same,
    assert_same_cache,
    declare,
    enabled,
    generate,
    run_both,
    scripted_drafts,
    true_up_to,
)
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from ssr_hf import SelfSpeculationConfig

# One family for each way in which a cache is rolled back.
ROLLBACKS = ("llama", "gpt2", "mistral", "lfm2", "qwen3_next", "mamba2", "falcon_h1")
# A cache of recurrent layers alone does not say how long it is: the host reads all ids again.
WITH_LENGTH = tuple(name for name in ROLLBACKS if name != "mamba2")
LENGTH = 24

every_lane = pytest.mark.parametrize("lane", LANES)


def _declare(family: str) -> Declared:
    return declare(family, length=LENGTH)


@torch.no_grad()
def _prefix_cache(model: PreTrainedModel, input_ids: Tensor) -> Cache:
    cache: Cache = model(input_ids, use_cache=True).cache
    return cache


def _run(
    declared: Declared,
    family: str,
    cached: Tensor,
    config: SelfSpeculationConfig,
    input_ids: Tensor,
) -> Pair:
    """Both ways on caches that hold `cached`, with drafts that are true for a while."""
    model = build_model(family)

    def fresh() -> dict[str, Any]:
        return {"cache": _prefix_cache(model, cached)}

    mask = torch.ones_like(declared.prompt)
    with scripted_drafts(true_up_to(declared.answer, 5)):
        pair = run_both(model, input_ids, config, fresh=fresh, attention_mask=mask)
    assert_same(pair)
    return pair


def _schedule(name: str) -> dict[str, Any]:
    return {"draft_budget": (3, 12), "max_draft_tokens": 7} if name == "bootstrapped" else {}


@pytest.mark.parametrize("schedule", ["single", "bootstrapped"])
@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3_next"])
@every_lane
def test_prefix_cache_with_all_ids(lane: str, family: str, schedule: str) -> None:
    """The prompt fed again on top of the cache, or positions counted from its end."""
    declared = _declare(family)
    config = declared.config(lane=lane, **_schedule(schedule))
    pair = _run(declared, family, declared.prompt[:, :10], config, declared.prompt)
    assert pair.fast.sequences[0, LENGTH:].tolist() == list(declared.new_ids)
    assert pair.stats.accepted_prefix > 0 or lane not in STEADY_LANES
    assert pair.fast.cache.get_seq_length() == pair.fast.sequences.shape[1] - 1


@pytest.mark.parametrize("schedule", ["single", "bootstrapped"])
@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3_next"])
@every_lane
def test_prefix_cache_with_the_new_ids_only(lane: str, family: str, schedule: str) -> None:
    """Ids are fewer than positions: masks and positions of a joined draft that count ids."""
    declared = _declare(family)
    config = declared.config(lane=lane, **_schedule(schedule))
    cached, new_ids = declared.prompt.split([10, LENGTH - 10], dim=1)
    pair = _run(declared, family, cached, config, new_ids)
    assert pair.fast.sequences[0, LENGTH - 10 :].tolist() == list(declared.new_ids)
    assert pair.stats.accepted_prefix > 0 or lane not in STEADY_LANES


@pytest.mark.parametrize("family", WITH_LENGTH)
def test_prefix_cache_that_covers_the_whole_prompt(family: str) -> None:
    """An empty input, or another text than plain `generate` writes on such a cache."""
    declared = _declare(family)
    _run(declared, family, declared.prompt, declared.config(), declared.prompt)


@pytest.mark.parametrize("family", ROLLBACKS)
def test_three_chat_turns_on_one_cache(family: str) -> None:
    """A cache handed back with a draft, a child row, rejected tokens or a recording in it."""
    model = build_model(family)
    declared = _declare(family)
    texts: list[list[list[int]]] = []
    for config in (None, declared.config(draft_interval=4, max_draft_tokens=4)):
        ids, cache, turns = declared.prompt, None, []
        for turn in range(3):
            with enabled(model):
                arguments = {} if cache is None else {"cache": cache}
                if family == "mamba2" and cache is not None:
                    # Such a cache has no length: the host feeds whatever it is given.
                    ids = ids[:, -4:]
                output = generate(
                    model, ids, self_speculation=config, max_new_tokens=32, **arguments
                )
            turns.append(output.sequences[0].tolist())
            cache = output.cache
            said = random_prompt(model, 3, seed=turn + 40)
            ids = torch.cat([output.sequences, said], dim=1)
        texts.append(turns)
    assert texts[1] == texts[0]


@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("family", WITH_LENGTH)
def test_users_cache_object_is_left_as_plain_leaves_it(family: str, returned: bool) -> None:
    """A cache the application keeps that grows by a marker, a draft or a row, or not at all."""
    model = build_model(family)
    declared = _declare(family)
    kept = []
    for config in (None, declared.config()):
        cache = _prefix_cache(model, declared.prompt[:, :10])
        layers = list(cache.layers)
        with enabled(model), scripted_drafts(true_up_to(declared.answer, 5)):
            output = generate(
                model,
                declared.prompt,
                self_speculation=config,
                cache=cache,
                return_dict_in_generate=returned,
            )
        assert not returned or output.cache is cache
        assert all(now is before for now, before in zip(cache.layers, layers, strict=True))
        kept.append(cache)
    assert_same_cache(*kept)


@every_lane
def test_cache_made_outside_of_no_grad(lane: str) -> None:
    """A graph that keeps growing, or an error, because the cache still requires gradients."""
    model = build_model("llama")
    declared = _declare("llama")

    def fresh() -> dict[str, Any]:
        cache = model(declared.prompt[:, :10], use_cache=True).cache
        assert cache.layers[0].keys.requires_grad
        return {"cache": cache}

    config = declared.config(lane=lane, draft_budget=(3, 12), max_draft_tokens=7)
    pair = run_both(model, declared.prompt, config, fresh=fresh)
    assert_same(pair)
    assert not pair.fast.cache.layers[0].keys.requires_grad


def test_empty_cache_without_a_config() -> None:
    """A `DynamicCache()` whose layers come into being with the first forward."""
    declared = _declare("mistral")
    pair = run_both(
        build_model("mistral"),
        declared.prompt,
        declared.config(),
        fresh=lambda: {"cache": DynamicCache()},
    )
    assert_same(pair)


def test_a_copied_cache_serves_two_calls() -> None:
    """Tensors of the copy that the first call wrote into."""
    model = build_model("qwen3_next")
    declared = _declare("qwen3_next")
    stored = _prefix_cache(model, declared.prompt[:, :10])
    untouched = copy.deepcopy(stored)
    texts = []
    for _ in range(2):
        with enabled(model):
            output = generate(
                model,
                declared.prompt,
                self_speculation=declared.config(),
                cache=copy.deepcopy(stored),
            )
        texts.append(output.sequences.tolist())
    assert texts[0] == texts[1]
    assert texts[0][0][LENGTH:] == list(declared.new_ids)
    assert_same_cache(untouched, stored)


def test_every_supported_layer_class_is_met_here() -> None:
    """A kind of layer that is handled and never run."""
    from ssr_hf.cache.layers import LAYER_KINDS

    met = {name for family in FAMILIES.values() for name in family.cache_layers}
    known = {layer.__name__ for layer in LAYER_KINDS if layer.__module__.startswith("transformers")}
    # No model of the host builds the last one yet.
    assert known - met <= {"LinearAttentionAndSlidingWindowAttentionLayer"}
