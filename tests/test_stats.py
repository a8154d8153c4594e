"""Statistics: what each figure counts, on cases counted by hand."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from families import build_model
from helpers import (
    LANES,
    assert_same,
    declare,
    run_both,
    run_fast,
    scripted_drafts,
    true_up_to,
)
from torch import Tensor

import ssr_hf
from ssr_hf import SpeculationStats, ThinkingMarkers
from ssr_hf.markers import PhaseTracker
from ssr_hf.records import BranchPoint, Candidates, Draft, DraftStatus, Verdict
from ssr_hf.stats import Recorder

FAMILY = "lfm2"


def test_hand_counted_generation() -> None:
    """Acceptance that counts the model's own token, or forwards that miss one.

    Twenty tokens of thinking and the marker, one a forward; the draft rides in ten of them, from
    the fifth token on: the marker, then nine tokens. Its first six are true. The answer begins with
    one forward over nine candidates, six accepted and one of the model's own; then one a forward.
    """
    declared = declare(FAMILY, first=20, last=20, n_new=9)
    config = declared.config(draft_budget=5, max_draft_tokens=9, reuse="prefix")
    with scripted_drafts(true_up_to(declared.answer, 6)):
        pair = run_both(build_model(FAMILY), declared.prompt, config, max_new_tokens=21 + 7 + 4)
    assert_same(pair)
    stats = pair.stats
    assert (stats.new_tokens, stats.thinking_tokens, stats.answer_tokens) == (32, 21, 11)
    assert stats.thinking_ended
    assert stats.forwards == 21 + 1 + 4
    assert stats.tokens_per_forward == pytest.approx(32 / 26)
    assert stats.accepted_prefix == 6
    assert (stats.suffix_proposed, stats.suffix_accepted) == (0, 0)
    (draft,) = stats.drafts
    assert (draft.stage, draft.branch_tokens, draft.n_tokens) == (0, 5, 9)
    assert (draft.n_inherited, draft.status, draft.accepted_prefix) == (0, "full", 6)
    assert stats.draft_tokens == 9
    # The prompt's forward gives the first token; the marker is known when its row is fed.
    assert [r.rows for r in stats.rounds] == [1] * 5 + [2] * 10 + [1] * 11
    verified = stats.rounds[21]
    assert (verified.phase, verified.source) == ("answering", "draft")
    assert (verified.n_proposed, verified.n_accepted, verified.n_committed) == (9, 6, 7)
    assert verified.n_fed == 10
    assert [r.phase for r in stats.rounds[:21]] == ["prefill"] + ["thinking"] * 20


def test_anti_oracle_costs_one_round_per_draft() -> None:
    """More forwards than plain decoding where nothing is accepted."""
    declared = declare("gpt_oss")
    config = declared.config(reuse="prefix", max_draft_tokens=8)
    with scripted_drafts(true_up_to(declared.answer, 0)):
        pair = run_both(build_model("gpt_oss"), declared.prompt, config)
    assert_same(pair)
    assert pair.stats.accepted_prefix == 0
    assert pair.stats.forwards == pair.stats.new_tokens
    assert [r.n_proposed for r in pair.stats.rounds if r.n_proposed] == [8]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("lane", LANES)
def test_every_forward_is_counted(lane: str, family: str) -> None:
    """Drafts that seem to cost nothing because their own forwards are left out."""
    model, declared = build_model(family), declare(family)
    config = declared.config(lane=lane, draft_budget=3, draft_interval=5, max_draft_tokens=4)
    run_fast(model, declared.prompt, config)  # the probes of the model
    calls: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with scripted_drafts(true_up_to(declared.answer, 2)):
            stats = run_fast(model, declared.prompt, config).speculation
    finally:
        hook.remove()
    assert stats is not None and len(stats.drafts) > 1
    # Recurrent layers may take one more at the end, for the cache that is handed back.
    assert len(calls) - stats.forwards in ((0,) if family == "llama" else (0, 1))
    assert (sum(d.forwards for d in stats.drafts) > 0) or lane == "lockstep"


@pytest.mark.parametrize("lane", LANES)
def test_every_figure_adds_up(lane: str) -> None:
    """Figures that contradict each other."""
    declared = declare(FAMILY)
    config = declared.config(lane=lane, draft_budget=3, draft_interval=5, max_draft_tokens=4)
    with scripted_drafts(true_up_to(declared.answer, 2)):
        pair = run_both(build_model(FAMILY), declared.prompt, config)
    stats = pair.stats
    assert stats.new_tokens == len(pair.fast.sequences[0]) - 9
    assert stats.thinking_tokens + stats.answer_tokens == stats.new_tokens
    assert len(stats.token_sources) == stats.new_tokens
    for entry in stats.rounds:
        assert 0 <= entry.n_accepted <= entry.n_proposed
        assert entry.n_committed in (entry.n_accepted, entry.n_accepted + 1)
    starts = [entry.start for entry in stats.rounds]
    assert starts == sorted(starts)
    by_phase = [stats.phase_seconds(phase) for phase in {r.phase for r in stats.rounds}]
    assert 0 < sum(by_phase) < stats.seconds
    assert [draft.stage for draft in stats.drafts] == list(range(len(stats.drafts)))
    assert sum(draft.accepted_prefix for draft in stats.drafts) == stats.accepted_prefix
    assert json.loads(json.dumps(stats.to_dict()))["new_tokens"] == stats.new_tokens


def test_nothing_thought() -> None:
    """A prompt that closes thinking: no fork, no marker, and everything counts as answer."""
    declared = declare(FAMILY)
    prompt = declared.prompt.clone()
    prompt[0, -1] = declared.marker[0]
    pair = run_both(build_model(FAMILY), prompt, declared.config(reuse="prefix"))
    assert_same(pair)
    assert pair.stats.drafts == ()
    assert pair.stats.thinking_tokens == 0
    assert pair.stats.answer_tokens == pair.stats.new_tokens == pair.stats.forwards
    assert {r.phase for r in pair.stats.rounds} == {"prefill", "answering"}


def test_empty_statistics() -> None:
    """A division by zero where nothing was generated."""
    stats = SpeculationStats()
    assert stats.tokens_per_forward == 0
    assert stats.to_dict()["forwards"] == 0


def test_recorder_keeps_the_order_and_one_note_of_a_kind() -> None:
    """Rounds that are merged, or the same note once per round."""
    told = []
    recorder = Recorder(on_round=told.append)
    for n_accepted in (2, 0):
        recorder.begin_round()
        candidates = Candidates((5, 6, 7), "suffix")
        verdict = Verdict(tuple(range(n_accepted + 1)), n_accepted, False)
        recorder.end_round("answering", 4, candidates, verdict, 1)
        recorder.note("once")
    draft = Draft(BranchPoint(3, 12, 0), (1, 2), DraftStatus.CUT, inherited=1)
    recorder.draft(draft, 0.5)
    recorder.prefix_verified(0, 1)
    tracker = type("Tracker", (), {"blocks": 1, "n_answered": 4, "n_closed": 1, "is_open": False})()
    stats = recorder.stats(tracker)
    assert list(stats.rounds) == told
    assert [r.n_accepted for r in stats.rounds] == [2, 0]
    assert stats.suffix_proposed == 6
    assert stats.suffix_accepted == 2
    assert stats.token_sources == ("suffix", "suffix", "model", "model")
    assert stats.notes == ("once",)
    assert stats.draft_tokens == 1
    assert stats.drafts[0].accepted_prefix == 1
    assert stats.drafts[0].status == "cut"


@pytest.mark.parametrize(
    ("start", "token_ids", "counts"),
    [
        ([[7]], [7, 3, 8, 4, 4], (3, 2, True)),
        ([[7]], [3, 4], (0, 2, False)),
        # The prompt opened it in a way that nobody knows.
        ([[7]], [3, 3, 8, 4, 4, 4], (3, 3, True)),
        # Two blocks: both answers count, and the second block may stay open.
        ([[7]], [7, 3, 8, 4, 4, 7, 3, 3, 8, 4], (7, 3, True)),
        ([[7]], [7, 3, 8, 4, 4, 7, 3], (5, 2, False)),
        ([], [3, 3], (2, 0, False)),
    ],
)
def test_tokens_of_thinking_and_answer(
    start: list[list[int]], token_ids: list[int], counts: tuple[int, int, bool]
) -> None:
    """An answer that counts as thinking because more thinking follows, or the other way round."""
    markers = ThinkingMarkers(start=tuple(map(tuple, start)), end=((8,),))
    tracker = PhaseTracker(markers, [1, 2])
    for token_id in token_ids:
        tracker.push(token_id)
    recorder = Recorder()
    recorder.begin_round()
    recorder.end_round("none", 1, Candidates(), Verdict(tuple(token_ids), 0, False), 1)
    stats = recorder.stats(tracker)
    assert (stats.thinking_tokens, stats.answer_tokens, stats.thinking_ended) == counts


def test_time_of_the_callback_is_nobodys() -> None:
    """A page that draws after each round makes drafts look dear."""
    recorder = Recorder(on_round=lambda entry: time.sleep(0.2))
    recorder.begin_round()
    recorder.end_round("none", 1, Candidates(), Verdict((1,), 0, False), 1)
    assert recorder.now() < 0.1


def test_thinking_too_short_for_a_draft_says_so() -> None:
    """Zero drafts and no word: the user cannot tell a setting from a fault."""
    declared = declare(FAMILY, first=20, last=20, n_new=9)
    for budget, notes in ((5, 0), (21, 1)):
        pair = run_both(build_model(FAMILY), declared.prompt, declared.config(draft_budget=budget))
        assert len(pair.stats.notes) == notes
    assert "thinking had fewer than 21 tokens" in pair.stats.notes[0]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_one_transfer_per_round_and_row(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device and host that wait for each other more than once per forward."""
    counts = {"package": 0}

    def count(name: str) -> None:
        original = getattr(Tensor, name)

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            counts["package"] += str(Path(ssr_hf.__file__).parent) in caller
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, counted)

    declared = declare(family)
    run_fast(build_model(family), declared.prompt, declared.config())  # the probe of the model
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        count(name)
    fast = run_fast(build_model(family), declared.prompt, declared.config())
    assert fast.speculation is not None
    n_rows = sum(r.rows for r in fast.speculation.rounds)
    # Besides: the ids of the prompt and of the draft's own text, and the largest position, twice.
    assert fast.speculation.forwards <= counts["package"] <= n_rows + 4
