"""When to branch, which draft wins, when a draft is given up: the multi-stage schedule of SSR."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .lanes import DraftRules, DraftWriter, Lane
from .markers import Phase, PhaseTracker
from .records import BranchPoint, Candidates, Draft, DraftStatus

if TYPE_CHECKING:
    from .config import SelfSpeculationConfig
    from .pacing import Pacer
    from .stats import Recorder
    from .tokens import TokenSequence

# A draft of fewer tokens cannot pay for its fork.
SHORTEST_DRAFT = 2


class DraftSchedule:
    """Opens, collects and cancels drafts between rounds.

    Args:
        config (`SelfSpeculationConfig`): Budgets, interval, longest draft.
        lane (`Lane`): Runs the drafts.
        tracker (`PhaseTracker`): Says how far thinking is.
        sequence (`TokenSequence`): The parent's text.
        rules (`DraftRules`): What holds for every draft.
        max_length (`int`): Most tokens of the whole text, prompt included.
        pacer (`Pacer`): Says whether a draft pays.
        recorder (`Recorder`): Told about every draft that ended.
    """

    def __init__(
        self,
        config: SelfSpeculationConfig,
        lane: Lane,
        tracker: PhaseTracker,
        sequence: TokenSequence,
        rules: DraftRules,
        max_length: int,
        pacer: Pacer,
        recorder: Recorder,
    ) -> None:
        self._config = config
        self._lane = lane
        self._tracker = tracker
        self._sequence = sequence
        self._rules = rules
        self._max_length = max_length
        self._pacer = pacer
        self._recorder = recorder
        self._stage = 0
        self._opened_at = 0.0
        self._block = tracker.blocks
        self._budgets = config.draft_budgets
        if config.draft_budget is None:
            self._budgets = tuple(map(pacer.first_budget, config.draft_budgets))
        self._next_budget: int | None = self._budget_after(0)
        self._is_held = self._was_held = False
        self._was_busy = False  # whether a draft was due while the one before was open
        self._first_objection = pacer.objection()
        self.newest: Draft | None = None

    def hold(self, held: bool) -> Draft | None:
        """Makes way for rounds whose forward is not the lane's, so that no draft can ride in it.

        A draft in such a lane is cut. It is taken up again, bootstrapped, by the first `advance`
        after the schedule is not held any more.

        Args:
            held (`bool`): Whether the next round is such a round.

        Returns:
            `Draft` or `None`: The usable draft that was cut, if one was.
        """
        self._is_held = held and self._lane.shares_forwards
        if not self._is_held or not self._lane.is_open:
            return None
        draft = self._collect(discard=False)
        is_cut = draft is None or draft.status is DraftStatus.CUT
        # Where sampled drafts branch must not depend on how far the one before came.
        if is_cut and not self._rules.samples:
            self._next_budget = self._tracker.n_thinking
        return draft

    def advance(self, finished: bool) -> Draft | None:
        """Follows a commit: collects a draft that ended, cancels a stale one, branches when due.

        Args:
            finished (`bool`): Whether the generation has ended.

        Returns:
            `Draft` or `None`: The usable draft that ended now, if one did.
        """
        if finished and self._next_budget in self._budgets:
            self._give_up(self._why_never_due(self._next_budget))
        # A text that only looked like the end of thinking for a moment is no reason to cut a draft.
        thinking = self._tracker.is_open and not finished
        reopened = self._block != self._tracker.blocks
        # A parent that overtakes the longest text goes on in ways that no row can share.
        overtaken = len(self._sequence) >= self._max_length
        ended = None
        # A sampled draft gives way: the next branch point must not depend on when it ends.
        replaced = self._rules.samples and self._is_due(self._tracker)
        is_over = not thinking or replaced or reopened or overtaken or self._lane.is_done
        if self._lane.is_open and is_over:
            ended = self._collect(discard=finished or reopened)
        elif self._lane.is_open and not self._rules.samples and not self._pacer.lane_pays():
            self._recorder.note("the draft was cut: riding along cost more than it could save")
            ended = self._collect(discard=False)
            self._next_budget = None
        if reopened:
            self._begin_block()
        self._was_busy |= self._lane.is_open and self._is_due(self._tracker)
        between = self._tracker.phase is not Phase.THINKING or finished
        if not between and not self._lane.is_open and self._is_due(self._tracker):
            if self._is_held:
                self._was_held = True
            else:
                self._branch()
        return ended

    def limit(self, candidates: Candidates) -> Candidates:
        """Ends a round before the answer where sampled drafts need it: see `acceptance`.

        Args:
            candidates (`Candidates`): What was chosen for the next round.

        Returns:
            `Candidates`: Those before the next branch point and the beginning or end of thinking.
        """
        phase = self._tracker.phase
        if not self._rules.samples or phase not in (Phase.NONE, Phase.THINKING):
            return candidates
        ahead = self._tracker.copy()
        for n_before, token_id in enumerate(candidates.token_ids):
            moves_on = ahead.push(token_id) is not phase
            if moves_on or (phase is Phase.THINKING and self._is_due(ahead)):
                return candidates.first(n_before)
        return candidates

    def _collect(self, discard: bool) -> Draft | None:
        draft = self._lane.collect(DraftStatus.DISCARDED if discard else DraftStatus.CUT)
        if self._lane.exhausted:
            self._recorder.note("a draft was cut: memory ran out")
        if not draft.token_ids:
            draft = replace(draft, status=DraftStatus.DISCARDED)
        seconds = self._recorder.now() - self._opened_at
        self._recorder.draft(replace(draft, proposals=()), seconds)
        if discard or draft.status is DraftStatus.DISCARDED:
            return None
        self.newest = draft
        return draft

    def _begin_block(self) -> None:
        """Thinking was opened again: drafts of the block before answer another question."""
        self._block = self._tracker.blocks
        self._next_budget = self._budget_after(0)
        self.newest = None

    def _budget_after(self, thinking_tokens: int) -> int | None:
        """The first branch point behind `thinking_tokens`, in thinking tokens."""
        if not self._config.drafts:
            return None
        for budget in self._budgets:
            if budget > thinking_tokens:
                return budget
        interval = self._config.draft_interval
        if interval is None:
            return None
        return thinking_tokens + interval - (thinking_tokens - self._budgets[-1]) % interval

    def _why_never_due(self, budget: int) -> str:
        if self._was_held:
            return "a small model wrote the steps when one was due"
        if self._tracker.n_thinking < budget:
            return f"thinking had fewer than {budget} tokens, the next branch point"
        if self._was_busy:
            return f"at {budget} tokens of thinking, the one before was still being written"
        return f"thinking ended in the round that reached the next branch point, {budget}"

    def _is_due(self, tracker: PhaseTracker) -> bool:
        return self._next_budget is not None and tracker.n_thinking >= self._next_budget

    def _branch(self) -> None:
        n_thinking = self._tracker.n_thinking
        self._next_budget = self._budget_after(n_thinking)
        max_tokens = min(self._config.max_draft_tokens, self._longest_answer())
        if max_tokens < SHORTEST_DRAFT:
            self._give_up("the text has no room for one")
            return
        # Whether a sampled draft is opened must not depend on what the one before it wrote.
        objection = self._first_objection if self._rules.samples else self._pacer.objection()
        if self._lane.exhausted:
            objection = "memory ran out for the one before"
        if objection is not None:
            self._give_up(objection)
            return
        branch_point = BranchPoint(n_thinking, len(self._sequence), self._stage)
        self._stage += 1
        self._opened_at = self._recorder.now()
        writer = DraftWriter(branch_point, self._sequence, self._rules, max_tokens)
        self._lane.open(writer, self.newest)

    def _give_up(self, reason: str) -> None:
        further = "further " if self._stage else ""
        self._recorder.note(f"no {further}draft was taken: {reason}")
        self._next_budget = None

    def _longest_answer(self) -> int:
        """Tokens of the longest answer that can still follow if thinking ended now."""
        return self._max_length - len(self._sequence) - len(self._rules.closing_ids)
