"""Two texts in one cache that go at different paces: each row computes what it would alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from families import build_model, random_prompt
from helpers import TOLERANCE, assert_same, assert_same_cache, run_both
from transformers import (
    BartConfig,
    BartForCausalLM,
    GenerationConfig,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
)

from ssr_hf import SelfSpeculationConfig, compat
from ssr_hf.rows import RowSupport, TwoRows, row_support
from ssr_hf.target import Target
from ssr_hf.tokens import TokenSequence

PROMPT = 9
SETTINGS = {"lane": "lockstep", "adaptive": False, "max_draft_tokens": 8}
WITH_HOLES = ("llama", "qwen3", "gpt2", "deepseek_v3")
IN_STEP = ("mistral", "gemma3", "lfm2", "qwen3_next", "mamba2", "falcon_h1")


def _target(
    model: PreTrainedModel, prompt: torch.Tensor, next_id: int, masked: bool = True
) -> Target:
    """A target that has read the prompt, with one committed token to feed."""
    config = GenerationConfig(max_new_tokens=80)
    kwargs = compat.fresh_kwargs(model, prompt, config)
    if masked:
        kwargs["attention_mask"] = torch.ones_like(prompt)
    target = Target(model, TokenSequence(prompt), kwargs)
    with torch.no_grad():
        target.prefill(config)
    target.sequence.append((next_id,))
    target.keep(1)
    return target


def _assert_judges(model: PreTrainedModel, text: list[int], logits: torch.Tensor) -> None:
    """The logits are those of a forward of the whole text, at its last tokens."""
    with torch.no_grad():
        alone = model(torch.tensor([text])).logits[:, -logits.shape[1] :]
    scale = max(1.0, alone.abs().max().item())
    assert (logits - alone).abs().max().item() <= TOLERANCE * scale


def _ids(rng: random.Random, at_most: int) -> list[int]:
    return [rng.randrange(3, 200) for _ in range(rng.randint(0, at_most))]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("family", WITH_HOLES)
@torch.no_grad()
def test_rows_at_their_own_pace_compute_what_they_would_alone(family: str, ahead: int) -> None:
    """Holes that are seen, or that shift positions; slots of one row given to the other."""
    rng = random.Random(f"{family} {ahead}")
    model = build_model(family)
    prompt = random_prompt(model, PROMPT, seed=1)
    target = _target(model, prompt, 7, masked=ahead > 0)
    child_text = [*target.sequence.token_ids]
    child: Target | None = None
    n_in_row = len(child_text) - 1
    if ahead:
        sequence = TokenSequence(target.sequence.ids)
        sequence.append(tuple(range(11, 11 + ahead)))
        child = target.fork(sequence)
        child.settle()
        child_text = [*sequence.token_ids]
        n_in_row += ahead
    assert row_support(target) == RowSupport(holes=True, padding=True)
    rows = TwoRows(target, child)
    for _ in range(12):
        text = [*target.sequence.token_ids]
        candidates, new = _ids(rng, 4), _ids(rng, 4)
        logits, child_logits = rows.forward(candidates, [*child_text[n_in_row:], *new], n_in_row)
        _assert_judges(model, [*text, *candidates], logits)
        _assert_judges(model, [*child_text, *new], child_logits)
        n_accepted, n_accepted_of_child = rng.randint(0, len(candidates)), rng.randint(0, len(new))
        rows.keep_of_child(len(child_text) - n_in_row + n_accepted_of_child)
        n_in_row = len(child_text) + n_accepted_of_child
        child_text += [*new[:n_accepted_of_child], rng.randrange(3, 200)]
        target.sequence.append((*candidates[:n_accepted], rng.randrange(3, 200)))
        target.keep(n_accepted + 1)
    rows.retire()
    target.close(keeps_cache=True)
    fed = target.sequence.ids[:, :-1]
    assert_same_cache(model(fed, use_cache=True).cache, target.cache)


@pytest.mark.parametrize("family", IN_STEP)
@torch.no_grad()
def test_windows_and_states_keep_rows_in_step(family: str) -> None:
    """Holes in a window that counts slots, or in a state that has no slots."""
    model = build_model(family)
    target = _target(model, random_prompt(model, PROMPT, seed=1), 7)
    assert not row_support(target).holes


@torch.no_grad()
def test_a_failed_forward_leaves_the_parent_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with candidates, or with the draft's row, after an error."""
    model = build_model("llama")
    target = _target(model, random_prompt(model, PROMPT, seed=1), 7)
    rows = TwoRows(target)
    rows.forward((5, 6), (7, 8), PROMPT)
    rows.keep_of_child(2)
    target.sequence.append((9,))
    target.keep(1)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(MemoryError):
        rows.forward((5, 6), (8,), PROMPT + 2)
    monkeypatch.undo()
    rows.retire()
    target.close(keeps_cache=True)
    assert_same_cache(model(target.sequence.ids[:, :-1], use_cache=True).cache, target.cache)


def _unused(text: list[int]) -> int:
    """A marker that never comes, so that drafts are taken to the end of the text."""
    return next(token for token in range(3, 256) if token not in text)


def _counting_slots() -> dict[str, PreTrainedModel]:
    """Models that count slots of the cache where others count text positions."""
    sizes = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    neo = GPTNeoConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        initializer_range=0.3,
        **sizes,
    )
    bart = BartConfig(
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        init_std=0.3,
        is_encoder_decoder=False,
        is_decoder=True,
        forced_eos_token_id=None,
        **sizes,
    )
    return {"gpt_neo": GPTNeoForCausalLM(neo).eval(), "bart": BartForCausalLM(bart).eval()}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["gpt_neo", "bart"])
def test_models_that_count_slots_stay_exact(name: str, seed: int) -> None:
    """A window over slots, or positions that are the length of the cache."""
    model = _counting_slots()[name]
    prompt = random_prompt(model, PROMPT, seed)
    text = model.generate(prompt, max_new_tokens=60, do_sample=False)[0].tolist()
    config = SelfSpeculationConfig(
        end_of_thinking=[_unused(text)], draft_budget=(5, 20, 35), **SETTINGS
    )
    assert_same(run_both(model, prompt, config, max_new_tokens=60))


def test_scales_by_slots_that_no_short_probe_sees() -> None:
    """Llama 4 scales queries by the slots before them, in steps longer than the probe: padding on
    the left would change them."""
    config = Llama4TextConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=1,
        moe_layers=[],
        attention_chunk_size=64,
        attn_temperature_tuning=True,
        no_rope_layers=[1, 0],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Llama4ForCausalLM(config).eval()
    target = _target(model, random_prompt(model, PROMPT, seed=1), 7)
    assert row_support(target) == RowSupport(holes=False, padding=False)


@pytest.mark.parametrize("length", [40, 48, 64])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_end_of_the_positions(family: str, length: int) -> None:
    """Positions behind the last one for tokens that only fill a row up."""
    changes = {"max_position_embeddings": length}
    if family == "llama":
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        changes["rope_parameters"] = rope
    model = build_model(family)
    config = copy.deepcopy(model.config)
    config.update(changes)
    torch.manual_seed(1)
    short = type(model)(config).eval()
    prompt = random_prompt(short, PROMPT, seed=1)
    n_new = length - PROMPT
    text = short.generate(prompt, max_new_tokens=n_new, do_sample=False)[0].tolist()
    for budget in range(n_new - 12, n_new - 3):
        settings = SelfSpeculationConfig(
            end_of_thinking=[_unused(text)], draft_budget=budget, **SETTINGS
        )
        assert_same(run_both(short, prompt, settings, max_new_tokens=n_new))
