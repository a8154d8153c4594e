"""Pacing: costs and acceptance as they are learnt, backing off, and when a draft pays."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from families import build_model, random_prompt
from helpers import enabled

import ssr_hf
from ssr_hf.candidates import DraftGuesser, SuffixCandidateGenerator
from ssr_hf.config import SuffixConfig
from ssr_hf.pacing import (
    FIRST_PROBE_AFTER,
    LAST_PROBE_AFTER,
    PROBE_TOKENS,
    RETRY_CALLS,
    FixedPacer,
    MeasuredPacer,
)
from ssr_hf.profile import CostLine, Profile, Rate
from ssr_hf.records import Candidates, ForwardShape
from ssr_hf.stats import DraftReport, Round, SpeculationStats

STEP = 0.01
ALONE = ForwardShape(n_pending=1)


def make_round(
    n_fed: int = 1,
    n_proposed: int = 0,
    n_accepted: int = 0,
    *,
    cost: float = 1.0,
    rows: int = 1,
    phase: str = "answering",
    source: str = "none",
) -> Round:
    """A round that took `cost` single-token rounds."""
    committed = n_accepted + 1
    seconds, n_drafted = cost * STEP, rows - 1
    return Round(
        phase, source, n_fed, n_proposed, n_accepted, committed, rows, 0.0, seconds, n_drafted
    )


def span(n_tokens: int, chance: float = 0.9) -> Candidates:
    return Candidates(tuple(range(n_tokens)), "suffix", chances=(chance,) * n_tokens)


def teach_cost(pacer: MeasuredPacer, cost_of: dict[int, float]) -> None:
    """Shows the pacer each cost often enough to be believed."""
    for _ in range(60):
        pacer.observe(make_round(), Candidates())
        for n_fed, cost in cost_of.items():
            pacer.observe(make_round(n_fed, cost=cost), Candidates())


def test_fixed_pacer_offers_everything():
    """Bug: the deterministic mode drops candidates or drafts after all."""
    pacer = FixedPacer()
    assert pacer.trim(span(64), "answering", ALONE) == span(64)
    assert pacer.objection() is None
    assert pacer.lane_pays()


def test_free_forwards_offer_the_whole_span_and_dear_ones_nothing():
    """Bug: the number of candidates does not follow the measured cost."""
    free, dear = MeasuredPacer(Profile()), MeasuredPacer(Profile())
    sizes = (2, 4, 8, 16, 32, 64)
    teach_cost(free, dict.fromkeys(sizes, 1.01))
    teach_cost(dear, {size: 1.5 * size for size in sizes})
    assert len(free.trim(span(63), "answering", ALONE).token_ids) == 63
    assert dear.trim(span(63), "answering", ALONE).token_ids == ()


def test_cost_between_and_beyond_measured_sizes():
    """Bug: an unmeasured size is taken for free, or for impossibly dear."""
    profile = Profile()
    teach_cost(MeasuredPacer(profile), {8: 2.0, 32: 5.0})
    assert profile.cost.at(2) == pytest.approx(1.25, rel=0.1)
    assert profile.cost.at(1) == 1.0
    assert profile.cost.at(8) == pytest.approx(2.0, rel=0.05)
    assert profile.cost.at(20) == pytest.approx(3.5, rel=0.05)
    assert profile.cost.at(64) == pytest.approx(9.0, rel=0.1)


def test_rounds_of_one_size_do_not_open_the_slope():
    """Bug: after a thousand equal rounds other sizes are extrapolated from rounding noise."""
    line = CostLine()
    for _ in range(3000):
        line.observe(2, 1.3)
    assert line.at(2) == pytest.approx(1.3, rel=0.05)
    assert line.at(34) == pytest.approx(2.0, rel=0.2)


def test_a_pause_of_the_machine_is_no_cost():
    """Bug: one slow round makes a size look dear for the rest of the run."""
    profile = Profile()
    pacer = MeasuredPacer(profile)
    teach_cost(pacer, {8: 1.5})
    pacer.observe(make_round(8, cost=500.0), Candidates())
    assert profile.cost.at(8) < 1.7


def test_backs_off_when_nothing_is_accepted_and_probes_ever_more_rarely():
    """Bug: a proposer that is always wrong costs a block in every round."""
    pacer = MeasuredPacer(Profile())
    teach_cost(pacer, {4: 1.4, 8: 1.6, 16: 2.0})
    offered = []
    for _ in range(3000):
        candidates = pacer.trim(span(16), "answering", ALONE)
        n_offered = len(candidates.token_ids)
        offered.append(n_offered)
        if n_offered:
            entry = make_round(1 + n_offered, n_offered, cost=1.5, source="suffix")
            pacer.observe(entry, candidates)
    backed_off = offered.index(0)
    assert backed_off < 40
    probes = [position for position, size in enumerate(offered[backed_off:]) if size]
    assert {offered[backed_off + probe] for probe in probes} == {PROBE_TOKENS}
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert gaps == sorted(gaps)
    assert len(probes) <= 3000 // LAST_PROBE_AFTER + LAST_PROBE_AFTER // FIRST_PROBE_AFTER


@pytest.mark.parametrize(("step_seconds", "looks"), [(0.002, 32 + 68 // 4), (0.05, 100)])
def test_looks_less_often_where_looking_is_dear_and_found_nothing(step_seconds: float, looks: int):
    """Bug: a model of 2 ms a step pays in every round for spans that never pay."""
    pacer = MeasuredPacer(Profile(step_seconds=step_seconds))
    asked = sum(pacer.looks("thinking") for _ in range(100))
    assert abs(asked - looks) <= 2
    teach_cost(pacer, {4: 1.1, 8: 1.2, 16: 1.3})
    assert len(pacer.trim(span(8), "thinking", ALONE).token_ids) == 8
    assert all(pacer.looks("thinking") for _ in range(32))
    assert all(FixedPacer().looks("thinking") for _ in range(100))


def test_acceptance_is_learnt_by_phase():
    """Bug: thinking that repeats nothing stops the answer from being speculated."""
    pacer = MeasuredPacer(Profile())
    teach_cost(pacer, {4: 1.4, 8: 1.6, 16: 2.0})
    for _ in range(60):
        refused = make_round(17, 16, cost=2.0, phase="thinking", source="suffix")
        pacer.observe(refused, span(16))
        pacer.observe(make_round(17, 16, 16, cost=2.0, source="suffix"), span(16))
    assert pacer.trim(span(16), "thinking", ALONE).token_ids == ()
    assert len(pacer.trim(span(16), "answering", ALONE).token_ids) == 16


def test_marker_and_sampled_candidates_are_never_trimmed():
    """Bug: a marker that is known to come is offered in part."""
    pacer = MeasuredPacer(Profile())
    teach_cost(pacer, {size: float(size) for size in (2, 4, 8)})
    marker = Candidates((1, 2, 3), "marker")
    assert pacer.trim(marker, "closing", ALONE) == marker


@pytest.mark.parametrize(("row_cost", "pays"), [(1.1, True), (2.0, False)])
def test_a_second_row_has_to_cost_less_than_it_can_save(row_cost: float, pays: bool):
    """Bug: on a machine where a second row is dear, whole drafts are written in vain."""
    pacer = MeasuredPacer(Profile())
    for _ in range(40):
        pacer.observe(make_round(phase="thinking"), Candidates())
        pacer.observe(make_round(phase="thinking", rows=2, cost=row_cost), Candidates())
    assert pacer.lane_pays() is pays


def test_a_draft_that_does_not_ride_is_not_cut_for_the_price_of_riding():
    """Bug: what lockstep cost in earlier calls ends the drafts of another lane."""
    profile = Profile(step_seconds=STEP, riding=Rate(900.0, 1000.0))
    assert not MeasuredPacer(profile, "lockstep").lane_pays()
    assert MeasuredPacer(profile, "stream").lane_pays()
    assert MeasuredPacer(profile, "stream").objection() is None


def draft_beside(rounds: Sequence[Round], outside: float = 0.0) -> DraftReport:
    """A draft that was open during all of `rounds`, and for some seconds besides."""
    seconds = sum(entry.seconds for entry in rounds) + outside
    return DraftReport(0, 10, 20, 0, "complete", 5, start=0.0, seconds=seconds)


@pytest.mark.parametrize(("lane", "outside", "slower"), [("sequential", 30, 1), ("stream", 0, 1.3)])
def test_a_draft_costs_what_the_parent_loses(lane: str, outside: float, slower: float):
    """Bug: the time in which the parent worked, too, is booked as the price of the draft."""
    profile = Profile(step_seconds=STEP)
    rounds = tuple(make_round(phase="thinking", cost=slower) for _ in range(100))
    drafts = (draft_beside(rounds, outside * STEP),)
    # A disturbed round before the draft, and one after it.
    around = [make_round(phase="thinking", cost=90.0)._replace(start=s) for s in (-1.0, 9.0)]
    pacer = MeasuredPacer(profile, lane)
    pacer.finish(SpeculationStats((*rounds, *around), drafts, thinking_tokens=100))
    assert profile.draft_cost == pytest.approx(30.0)


def test_drafts_that_cost_less_than_nothing_cost_nothing():
    """Bug: an average that went below zero never comes back."""
    profile = Profile(step_seconds=STEP, thinking=Rate(1000.0, 1000.0))
    pacer = MeasuredPacer(profile)
    rounds = (make_round(2, 5, 5, rows=2, phase="thinking", source="suffix"), make_round())
    drafts = (draft_beside(rounds[:1]),)
    pacer.finish(SpeculationStats(rounds, drafts, thinking_tokens=5, answer_tokens=5))
    assert profile.draft_cost == 0.0


def test_drafts_in_vain_are_rarely_taken_again():
    """Bug: where thinking never ends, every call pays for a draft."""
    profile = Profile(step_seconds=STEP)
    taken = []
    for _ in range(33):
        pacer = MeasuredPacer(profile)
        taken.append(pacer.objection() is None)
        rounds = tuple(make_round(phase="thinking", rows=2, cost=1.3) for _ in range(20))
        drafts = (draft_beside(rounds),) if taken[-1] else ()
        pacer.finish(SpeculationStats(rounds, drafts, thinking_tokens=20, answer_tokens=0))
    assert taken[:2] == [True, False]
    assert taken.count(True) == 3


def test_guesses_of_a_draft_are_learnt_apart():
    """Bug: a draft uses up the probes of the answer, or never learns that its guesses fail."""
    profile = Profile()
    pacer = MeasuredPacer(profile)
    text = [*range(3, 30)] * 2
    guess = DraftGuesser(SuffixConfig(), pacer, text, None)
    offered = 0
    for _ in range(200):
        offered += len(guess(text, 50, ALONE).token_ids) > 0
        text = [*text, 99, *range(3, 20)]
    assert offered <= 80
    assert set(profile.calibrations) == {"suffix while drafting"}
    assert len(pacer.trim(span(16), "answering", ALONE).token_ids) == 16


def test_thinking_that_speculates_well_makes_a_rider_dear():
    """Bug: what thinking gains without a draft is left out of the price of the draft."""
    pacer = MeasuredPacer(Profile())
    teach_cost(pacer, {2: 1.1, 5: 1.1})
    for _ in range(40):
        pacer.observe(make_round(5, 4, 4, cost=1.1, phase="thinking", source="suffix"), span(4))
        pacer.observe(make_round(phase="thinking", rows=2, cost=1.1), Candidates())
    assert not pacer.lane_pays()


@pytest.mark.parametrize(
    ("added_cost", "lane"), [(0.2, "lockstep"), (0.6, "lockstep"), (0.9, "sequential")]
)
def test_auto_lane_is_the_cheaper_one(added_cost: float, lane: str):
    """Bug: drafts ride along where writing them in the foreground costs less, or never do."""
    profile = Profile(
        step_seconds=STEP, riding=Rate(1000 * added_cost, 1000.0), answer_cost={"plain": 0.8}
    )
    pacer = MeasuredPacer(profile)
    assert pacer.lane == lane
    assert pacer.objection() is None
    assert MeasuredPacer(profile, "stream").lane == "stream"
    assert FixedPacer().lane == MeasuredPacer(Profile()).lane == "lockstep"
    assert FixedPacer("sequential").lane == "sequential"


def test_a_lane_that_looked_worse_is_tried_again():
    """Bug: a bad minute of the machine keeps drafts from ever riding again."""
    riding, undrafted = Rate(1000.0, 1000.0), {"plain": 0.8}
    for lane in ("auto", "lockstep"):
        profile = Profile(riding=riding, answer_cost=undrafted)
        riding_tried = []
        for _ in range(RETRY_CALLS // 2 + 1):
            pacer = MeasuredPacer(profile, lane)
            riding_tried.append(pacer.lane == "lockstep" and pacer.objection() is None)
            pacer.finish(SpeculationStats())
        assert riding_tried == [False] * (RETRY_CALLS // 2) + [True]


def test_first_draft_branches_early_enough_to_be_finished():
    """Bug: thinking ends in the middle of the draft in call after call."""
    profile = Profile(step_seconds=STEP)
    assert MeasuredPacer(profile).first_budget(128) == 128
    for thinking_tokens, answer_tokens, budget in ((1000, 100, 128), (200, 100, 75), (60, 90, 16)):
        profile.thinking_tokens, profile.answer_tokens = thinking_tokens, answer_tokens
        assert MeasuredPacer(profile).first_budget(128) == budget
    assert FixedPacer().first_budget(128) == 128


@pytest.mark.parametrize(("settings", "budget"), [({}, 20), ({"draft_budget": 25}, 25)])
def test_short_thinking_moves_the_default_branch_point_and_no_other(
    settings: dict[str, int], budget: int
):
    """Bug: what was learnt overrides the user's budget, or never reaches the schedule."""
    model = build_model("qwen3")
    prompt = random_prompt(model, 9, seed=1)
    plain = model.generate(prompt, max_new_tokens=60, do_sample=False)
    unused = next(token for token in range(1, 256) if token not in plain[0])
    ssr_hf.enable(model, profile=Profile(thinking_tokens=100.0, answer_tokens=64.0))
    try:
        output = model.generate(
            prompt,
            max_new_tokens=60,
            do_sample=False,
            return_dict_in_generate=True,
            self_speculation={"end_of_thinking": [unused], **settings},
        )
    finally:
        ssr_hf.disable(model)
    assert [draft.branch_tokens for draft in output.speculation.drafts] == [budget]


def finished_call(pacer: MeasuredPacer, *, drafts: bool, tokens_per_round: int) -> None:
    """Ends a call of 100 equal rounds."""
    rounds = (make_round(), *(make_round(1, 0, tokens_per_round - 1) for _ in range(100)))
    report = DraftReport(0, 10, 5, 0, "complete", 5, start=0.0, seconds=0.0)
    pacer.finish(
        SpeculationStats(rounds, (report,) if drafts else (), thinking_tokens=50, answer_tokens=50)
    )


def test_no_draft_is_withheld_before_one_was_seen():
    """Bug: the call that measures answers without drafts comes where there was never one."""
    assert MeasuredPacer(Profile(calls=RETRY_CALLS - 1)).objection() is None


@pytest.mark.parametrize("drafts_are_better", [True, False])
def test_calls_settle_for_the_cheaper_way(drafts_are_better: bool):
    """Bug: a whole draft is risked in every call where drafts never pay, or never again."""
    profile = Profile(step_seconds=STEP)
    chosen = []
    for _ in range(34):
        pacer = MeasuredPacer(profile)
        drafts = pacer.objection() is None
        chosen.append(drafts)
        finished_call(
            pacer, drafts=drafts, tokens_per_round=2 if drafts is drafts_are_better else 1
        )
    assert chosen[:2] == [True, drafts_are_better]
    assert chosen.count(drafts_are_better) >= 31
    assert chosen[2:].count(not drafts_are_better) == 2


def test_profile_survives_json_and_says_what_is_wrong():
    """Bug: a saved profile comes back different, or a broken one half-loaded."""
    profile = Profile()
    pacer = MeasuredPacer(profile)
    teach_cost(pacer, {8: 2.0})
    pacer.observe(make_round(9, 8, 3, source="suffix"), span(8))
    pacer.observe(make_round(9, 8, 3, source="draft"), Candidates((1,) * 8, "draft"))
    assert Profile.from_json(profile.to_json()) == profile
    saved = json.loads(profile.to_json())
    for key, value in {
        "cost": {"sums": [1.0]},
        "calls": "3",
        "answer_cost": {"other": 1.0},
        "thinking_tokens": math.inf,
        "step_seconds": -1.0,
        "thinking": {"cost": None, "units": 0},
        "calibrations": {"suffix while thinking": {"hits": [1.0], "trials": [1.0]}},
        "chains": {"draft while answering": {"first_trials": 0}},
    }.items():
        with pytest.raises(ssr_hf.ConfigError, match=r"no profile.*Profile\.to_json"):
            Profile.from_json(json.dumps({**saved, key: value}))


@pytest.mark.parametrize(
    ("settings", "proposes"),
    [({}, True), ({"adaptive": False}, False), ({"suffix": {"sources": ("draft",)}}, False)],
)
def test_later_calls_propose_what_earlier_ones_wrote(settings: dict[str, Any], proposes: bool):
    """Bug: the history is never used, or is used where the user wants none of it."""
    model = build_model("qwen3")
    prompt = random_prompt(model, 9, seed=1)
    plain = model.generate(prompt, max_new_tokens=60, do_sample=False)
    unused = next(token for token in range(1, 256) if token not in plain[0])
    forwards = []
    with enabled(model):
        for _ in range(2):
            output = model.generate(
                prompt,
                max_new_tokens=60,
                do_sample=False,
                return_dict_in_generate=True,
                self_speculation={"end_of_thinking": [unused], "draft_budget": 1000, **settings},
            )
            assert output.sequences.equal(plain)
            forwards.append(output.speculation.forwards)
    assert (forwards[1] < forwards[0] / 2) is proposes


def test_an_anti_oracle_costs_few_rounds_and_no_token(monkeypatch: pytest.MonkeyPatch):
    """Bug: wrong candidates are offered for ever, or change what is generated."""
    model = build_model("qwen3")
    prompt = random_prompt(model, 9, seed=1)
    plain = model.generate(prompt, max_new_tokens=200, do_sample=False)
    unused = next(token for token in range(1, 256) if token not in plain[0])

    def propose(self: object, context: object, room: int) -> Candidates:
        n_tokens = min(room, 16)
        return Candidates((unused,) * n_tokens, "suffix", chances=(0.9,) * n_tokens)

    monkeypatch.setattr(SuffixCandidateGenerator, "propose", propose)
    ssr_hf.enable(model)
    try:
        output = model.generate(
            prompt,
            max_new_tokens=200,
            do_sample=False,
            return_dict_in_generate=True,
            self_speculation={"end_of_thinking": [unused], "draft_budget": 1000},
        )
    finally:
        ssr_hf.disable(model)
    assert output.sequences.equal(plain)
    stats = output.speculation
    assert stats.forwards == 200
    assert stats.suffix_accepted == 0
    assert sum(r.n_proposed > 0 for r in stats.rounds) <= 60


def test_deterministic_mode_repeats_every_choice():
    """Bug: with `adaptive=False` a choice still follows the clock."""
    model = build_model("qwen3")
    prompt = random_prompt(model, 9, seed=1)
    shapes = []
    with enabled(model):
        for _ in range(2):
            output = model.generate(
                prompt,
                max_new_tokens=60,
                do_sample=False,
                return_dict_in_generate=True,
                self_speculation={"end_of_thinking": [3], "draft_budget": 8, "adaptive": False},
            )
            shapes.append([entry[:7] for entry in output.speculation.rounds])
    assert shapes[0] == shapes[1]
