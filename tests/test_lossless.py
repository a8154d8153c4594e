"""The heart of the suite: on every kind of model the result is that of plain `generate`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from families import FAMILIES, build_model
from helpers import (
    LANES,
    STEADY_LANES,
    Output,
    Pair,
    assert_same,
    collected_drafts,
    declare,
    generate,
    run_both,
    run_fast,
    scripted_drafts,
    true_up_to,
)

SCHEDULES: dict[str, dict[str, Any]] = {
    "single": {"draft_budget": 5, "max_draft_tokens": 16},
    # Each draft is over before the next one is due, which starts with what still holds of it.
    "repeated": {"draft_budget": 3, "draft_interval": 5, "max_draft_tokens": 3},
}
N_DRAFTS = {"single": 1, "repeated": 3}
# One family for each way in which a cache is rolled back.
ROLLBACKS = ("llama", "gpt2", "mistral", "gemma3", "lfm2", "qwen3_next", "mamba2", "falcon_h1")

every_family = pytest.mark.parametrize("family", FAMILIES)
every_lane = pytest.mark.parametrize("lane", LANES)
every_steady_lane = pytest.mark.parametrize("lane", STEADY_LANES)
every_rollback = pytest.mark.parametrize("family", ROLLBACKS)


@functools.cache
def _plain(family: str, do_sample: bool) -> Output:
    torch.manual_seed(0)
    prompt = declare(family, do_sample=do_sample).prompt
    output: Output = generate(build_model(family), prompt, do_sample=do_sample, output_scores=True)
    return output


@pytest.mark.parametrize(
    ("schedule", "do_sample"),
    [("single", False), ("repeated", False), ("repeated", True)],
    ids=["single-greedy", "repeated-greedy", "repeated-sampled"],
)
@every_lane
@every_family
def test_everything_equals_plain_generate(
    family: str, lane: str, schedule: str, do_sample: bool
) -> None:
    """Any token, score or cache entry that speculation changes; sampling: any draw out of order."""
    declared = declare(family, do_sample=do_sample)
    config = declared.config(lane=lane, **SCHEDULES[schedule])
    fast = run_fast(
        build_model(family), declared.prompt, config, do_sample=do_sample, output_scores=True
    )
    pair = Pair(_plain(family, do_sample), fast)
    assert_same(pair)
    if FAMILIES[family].multi_token_exact:
        assert len(pair.stats.drafts) >= (N_DRAFTS[schedule] if lane in STEADY_LANES else 1)
    else:
        assert not pair.stats.drafts
        assert pair.stats.forwards == pair.stats.new_tokens
        assert "without candidates" in pair.stats.notes[0]


@pytest.mark.small_caches
@pytest.mark.parametrize("adaptive", [False, True])
@every_rollback
def test_greedy_without_outputs_commits_blocks(family: str, adaptive: bool) -> None:
    """The path that commits a block at once; a pacer that offers less and loses count of it."""
    declared = declare(family)
    config = declared.config(adaptive=adaptive, draft_interval=4)
    pair = run_both(build_model(family), declared.prompt, config)
    assert_same(pair)


@every_lane
@every_rollback
def test_rows_of_unequal_length_are_joined_and_parted(family: str, lane: str) -> None:
    """A bootstrapped draft is ahead of the parent: padding, masks or positions left behind."""
    declared = declare(family)
    config = declared.config(lane=lane, draft_budget=(3, 12), max_draft_tokens=7)
    with scripted_drafts(true_up_to(declared.answer, 4)), collected_drafts() as drafts:
        pair = run_both(build_model(family), declared.prompt, config)
    assert_same(pair)
    if lane in STEADY_LANES:
        assert [draft.inherited for draft in drafts] == [0, 4]
        assert len(drafts[1].token_ids) > 5


@pytest.mark.parametrize("n_true", [0, 1, 2, 5, 11, 12, 30])
@every_rollback
def test_drafts_that_are_true_up_to_a_point(family: str, n_true: int) -> None:
    """Positions, masks or states advanced wrongly after a partly accepted draft."""
    declared = declare(family)
    config = declared.config(max_draft_tokens=12, reuse="prefix", lane="sequential")
    with scripted_drafts(true_up_to(declared.answer, n_true)):
        pair = run_both(build_model(family), declared.prompt, config)
    assert_same(pair)
    assert pair.stats.accepted_prefix == min(n_true, 12)


@every_steady_lane
@every_rollback
def test_accepted_rejected_and_empty_rounds_alternate(family: str, lane: str) -> None:
    """A step without candidates that reads the state left by a partly accepted one."""
    declared = declare(family)
    config = declared.config(
        lane=lane, draft_budget=3, draft_interval=6, max_draft_tokens=4, suffix={"max_tokens": 5}
    )
    with scripted_drafts(true_up_to(declared.answer, 3)):
        pair = run_both(build_model(family), declared.prompt, config)
    assert_same(pair)
    kinds = {(r.n_proposed > 0, r.n_accepted == r.n_proposed) for r in pair.stats.rounds}
    assert {(False, True), (True, False)} <= kinds


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_sliding_window_through_fork_reject_and_continue(family: str, attention: str) -> None:
    """Window layers that drop, on rejection, tokens which they have to see again."""
    model = build_model(family)
    declared = declare(family)
    before = model.config._attn_implementation
    if family == "gpt_oss" and attention == "sdpa":
        pytest.skip("gpt-oss has attention sinks, which sdpa does not know")
    model.set_attn_implementation(attention)
    try:
        config = declared.config(max_draft_tokens=12, reuse="prefix")
        with scripted_drafts(true_up_to(declared.answer, 5)):
            pair = run_both(model, declared.prompt, config, max_new_tokens=declared.n_thinking + 40)
    finally:
        model.set_attn_implementation(before)
    assert_same(pair)
    assert pair.stats.accepted_prefix == 5


@every_rollback
def test_repeated_calls_decide_the_same(family: str) -> None:
    """State of one call that leaks into the next, or a choice that depends on the clock."""
    declared = declare(family)
    model = build_model(family)
    config = declared.config(adaptive=False)
    pairs = [run_both(model, declared.prompt, config) for _ in range(2)]
    first, second = (
        [(r.phase, r.source, r.n_proposed, r.n_accepted) for r in pair.stats.rounds]
        for pair in pairs
    )
    assert first == second


def test_drafts_leave_the_global_generator_alone() -> None:
    """A draft that draws from the generator of the text: the same seed would give another text."""
    declared = declare("llama", do_sample=True)
    config = declared.config(reuse="prefix")
    with scripted_drafts(true_up_to(declared.answer, 0)):
        pair = run_both(build_model("llama"), declared.prompt, config, do_sample=True)
    after_fast = torch.get_rng_state()
    assert_same(pair)
    assert pair.stats.accepted_prefix == 0
    torch.manual_seed(0)
    run = build_model("llama").generate(
        declared.prompt,
        attention_mask=torch.ones_like(declared.prompt),
        do_sample=True,
        max_new_tokens=len(declared.new_ids),
    )
    assert run[0, declared.prompt.shape[1] :].tolist() == list(declared.new_ids)
    assert torch.equal(torch.get_rng_state(), after_fast)
