"""The schedule of drafts where thinking is opened again."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList

from ssr_hf import SelfSpeculationConfig, ThinkingMarkers
from ssr_hf.candidates import Proposer
from ssr_hf.drafting import DraftSchedule
from ssr_hf.lanes import DraftRules, DraftWriter, Lane
from ssr_hf.markers import PhaseTracker
from ssr_hf.pacing import FixedPacer
from ssr_hf.records import BranchPoint, Draft, DraftStatus, ForwardShape, Verdict
from ssr_hf.stats import Recorder
from ssr_hf.tokens import TokenSequence


class _WaitingLane(Lane):
    """Holds a draft that is never finished."""

    name = "waiting"

    def _begin(self, writer: DraftWriter, previous: Draft | None) -> None:
        pass


MARKERS = ThinkingMarkers(start=((1,),), end=((2,),))
REOPENED = SelfSpeculationConfig(
    end_of_thinking=[2], start_of_thinking=[1], draft_budget=2, reuse="prefix"
)


def test_a_draft_does_not_outlive_its_block_of_thinking() -> None:
    """A round closes thinking, answers and opens it again: the draft answered what was before."""
    sequence = TokenSequence(torch.tensor([[9, 1]]))
    tracker = PhaseTracker(MARKERS, sequence.token_ids)
    rules = DraftRules((2,), frozenset(), LogitsProcessorList())
    lane = _WaitingLane(None)
    schedule = DraftSchedule(
        REOPENED, lane, tracker, sequence, rules, 500, FixedPacer(), Recorder()
    )

    def follow(*token_ids: int) -> Draft | None:
        sequence.append(token_ids)
        for token_id in token_ids:
            tracker.push(token_id)
        return schedule.advance(finished=False)

    assert follow(20, 21) is None
    assert lane.is_open
    lane.writer.sequence.append((50, 51))
    assert follow(2, 50, 51, 1, 30) is None
    assert not lane.is_open
    assert schedule.newest is None
    assert follow(31) is None
    assert lane.writer.branch_point.position == len(sequence)


def test_a_draft_is_not_offered_for_the_next_answer() -> None:
    """Under rejection sampling, tokens that are in the text already would be judged again."""
    sequence = TokenSequence(torch.tensor([[9, 1]]))
    tracker = PhaseTracker(MARKERS, sequence.token_ids)
    proposer = Proposer(REOPENED, tracker, sequence, 1000, FixedPacer())

    def follow(*token_ids: int) -> None:
        sequence.append(token_ids)
        proposer.observe(Verdict(token_ids, 0, finished=False))

    follow(20, 21)
    proposer.add_draft(Draft(BranchPoint(2, 4, 0), (50, 51, 52), DraftStatus.FULL))
    follow(2)
    assert proposer.propose(ForwardShape(1)).token_ids == (50, 51, 52)
    follow(50, 51, 1)
    follow(30, 2)
    assert proposer.propose(ForwardShape(1)).token_ids == ()
