"""Everything that `return_dict_in_generate` returns is what plain `generate` returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build_model
from helpers import (
    LANES,
    Declared,
    assert_same,
    declare,
    enabled,
    generate,
    run_both,
    scripted_drafts,
    true_up_to,
)

from ssr_hf import SelfSpeculativeOutput
from ssr_hf.errors import UnsupportedError

EVERYTHING = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
# One family for each way in which a cache is rolled back.
ROLLBACKS = ("llama", "gemma3", "lfm2", "qwen3_next", "mamba2")


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("family", ROLLBACKS)
def test_scores_logits_and_hidden_states(family: str, lane: str, do_sample: bool) -> None:
    """Outputs of rejected positions kept, or those of accepted, replayed or joined ones lost."""
    declared = declare(family, do_sample=do_sample)
    config = declared.config(lane=lane, draft_budget=(3, 12), max_draft_tokens=7)
    settings = {"temperature": 0.8, "top_k": 20} if do_sample else {"repetition_penalty": 1.2}
    with scripted_drafts(true_up_to(declared.answer, 4)):
        pair = run_both(
            build_model(family),
            declared.prompt,
            config,
            do_sample=do_sample,
            **EVERYTHING,
            **settings,
        )
    assert_same(pair)
    assert pair.fast.hidden_states is not None
    assert pair.fast.scores is not None
    assert len(pair.fast.scores) == len(pair.fast.hidden_states) == pair.stats.new_tokens


@pytest.mark.parametrize("asked", sorted(EVERYTHING))
def test_only_what_was_asked_for(asked: str) -> None:
    """An output that plain `generate` leaves at None."""
    declared = declare("llama")
    pair = run_both(build_model("llama"), declared.prompt, declared.config(), **{asked: True})
    assert_same(pair)


@pytest.mark.parametrize("position", [0, 1, 5])
def test_records_end_with_an_end_inside_the_verified_draft(position: int) -> None:
    """Scores and states of candidates behind the EOS that was accepted among them."""
    declared = declare("lfm2", n_new=8)
    eos = declared.answer[position]
    with scripted_drafts(true_up_to(declared.answer, 30)):
        pair = run_both(
            build_model("lfm2"), declared.prompt, declared.config(), eos_token_id=eos, **EVERYTHING
        )
    assert_same(pair)
    assert pair.stats.answer_tokens == position + 1


def _without_dict(declared: Declared, **arguments: Any) -> torch.Tensor:
    sequences: torch.Tensor = generate(
        build_model("llama"), declared.prompt, return_dict_in_generate=False, **arguments
    )
    return sequences


def test_without_dict_the_result_is_a_tensor_of_its_own() -> None:
    """A view into the growing buffer of ids, or the dict where a tensor was asked for."""
    declared = declare("llama")
    plain = _without_dict(declared)
    with enabled(build_model("llama")):
        fast = _without_dict(
            declared, self_speculation=declared.config(), output_scores=True, output_attentions=True
        )
    assert torch.equal(fast, plain)
    assert fast.is_contiguous()
    assert fast.untyped_storage().nbytes() == plain.untyped_storage().nbytes()


def test_output_class_is_the_hosts_with_one_more_field() -> None:
    """Code that unpacks, indexes or type-checks the host's output."""
    declared = declare("llama")
    pair = run_both(build_model("llama"), declared.prompt, declared.config(), output_scores=True)
    assert isinstance(pair.fast, SelfSpeculativeOutput)
    assert isinstance(pair.fast, type(pair.plain))
    assert set(pair.fast) - set(pair.plain) == {"speculation"}
    assert pair.fast["sequences"] is pair.fast.sequences


def test_transition_scores_can_be_computed() -> None:
    """`compute_transition_scores` needs scores that belong to the sequences, one by one."""
    declared = declare("llama")
    model = build_model("llama")
    pair = run_both(model, declared.prompt, declared.config(), output_scores=True)
    plain, fast = (
        model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        for output in (pair.plain, pair.fast)
    )
    torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-4)


def test_attention_maps_are_refused_by_name() -> None:
    """Attention maps of another shape than plain's, without a word."""
    declared = declare("llama")
    model = build_model("llama")
    with enabled(model), pytest.raises(UnsupportedError, match="output_attentions"):
        generate(model, declared.prompt, self_speculation=declared.config(), output_attentions=True)
