"""Never slower: how many candidates to offer, and whether to draft, from what was measured.

Cost is counted in single-token rounds, so an accepted candidate saves 1. The pacer offers the
number of candidates whose expected saving exceeds their added cost by most, offers nothing where
none does, and then probes rarely. What was learnt lives in a `Profile` that outlives the call. No
choice made here can change a token; it changes only which tokens are offered.
"""

from __future__ import annotations

from typing import Protocol

from .profile import Calibration, Chain, Profile, Rate, average
from .records import Candidates, ForwardShape
from .stats import Round, SpeculationStats

# Estimates err, so candidates have to promise this many times what they cost.
MARGIN = 1.05
PROBE_TOKENS = 4
FIRST_PROBE_AFTER = 16
LAST_PROBE_AFTER = 512
# What a token of an answer costs that was drafted well.
DRAFTED_COST = 0.15
# Looking for candidates takes a few hundredths of a step that is faster than this. There, after so
# many rounds without any, only every few rounds look for some.
FAST_STEP_SECONDS = 0.005
RESTS_AFTER = 32
ROUNDS_PER_LOOK = 4
# Every so many calls, the drafting choice that looks worse is tried again. Half-way between, the
# price of riding is forgotten: where it looks bad, no draft rides, and nothing would correct it.
RETRY_CALLS = 16
# The first draft branches so early that this many times the usual answer fits beside the thinking
# that is left, but not before EARLIEST_BRANCH thinking tokens.
DRAFT_ROOM = 1.25
EARLIEST_BRANCH = 16

DRAFTING = "drafting"
KINDS_OF_TEXT = ("thinking", DRAFTING)

BLOCK_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class Pacer(Protocol):
    """Decides how much to speculate. It never sees tokens' logits and never changes a token."""

    def looks(self, phase: str) -> bool:
        """Counts a round, and says whether to look for candidates in it."""

    def trim(self, candidates: Candidates, phase: str, shape: ForwardShape) -> Candidates:
        """The leading candidates that are worth offering in a forward of that shape."""

    def observe(self, entry: Round, candidates: Candidates) -> None:
        """Follows a round."""

    def observe_candidates(self, candidates: Candidates, phase: str, n_accepted: int) -> None:
        """Follows candidates that were judged, of a round or of a draft."""

    @property
    def lane(self) -> str:
        """The lane of this call."""

    def first_budget(self, budget: int) -> int:
        """Where to branch first, in thinking tokens, if the user left it open."""

    def objection(self) -> str | None:
        """Why to open no draft now; None where one promises to pay."""

    def lane_pays(self) -> bool:
        """Whether to keep the open draft."""

    def finish(self, stats: SpeculationStats) -> None:
        """Follows the end of a call."""


class FixedPacer:
    """Offers everything, drafts always: every choice is a function of settings and tokens.

    Args:
        lane (`str`): A lane, or `"auto"` for `"lockstep"`.
    """

    def __init__(self, lane: str = "auto") -> None:
        self.lane = "lockstep" if lane == "auto" else lane

    def looks(self, phase: str) -> bool:
        return True

    def trim(self, candidates: Candidates, phase: str, shape: ForwardShape) -> Candidates:
        return candidates

    def observe(self, entry: Round, candidates: Candidates) -> None:
        pass

    def observe_candidates(self, candidates: Candidates, phase: str, n_accepted: int) -> None:
        pass

    def first_budget(self, budget: int) -> int:
        return budget

    def objection(self) -> str | None:
        return None

    def lane_pays(self) -> bool:
        return True

    def finish(self, stats: SpeculationStats) -> None:
        pass


class MeasuredPacer:
    """Follows measured cost and acceptance.

    Args:
        profile (`Profile`): What earlier calls learnt; it is updated.
        lane (`str`): A lane, or `"auto"` for the one that is cheaper.
    """

    def __init__(self, profile: Profile, lane: str = "auto") -> None:
        self.profile = profile
        self.lane = self._choose_lane() if lane == "auto" else lane
        self._skipped: dict[str, int] = {}
        self._probe_after: dict[str, int] = {}
        self._idle: dict[str, int] = {}
        self._objection = self._object_to_drafts()

    def looks(self, phase: str) -> bool:
        idle = self._idle.get(phase, 0)
        self._idle[phase] = idle + 1
        is_fast = 0.0 < self.profile.step_seconds < FAST_STEP_SECONDS
        return not is_fast or idle <= RESTS_AFTER or idle % ROUNDS_PER_LOOK == 0

    def trim(self, candidates: Candidates, phase: str, shape: ForwardShape) -> Candidates:
        # How much of a sampled draft is judged must not depend on where it ends: see `acceptance`.
        if not candidates.token_ids or candidates.source == "marker" or candidates.proposals:
            return candidates
        key = _key(candidates, phase)
        size = self._best_size(key, candidates, shape)
        if size > 0:
            self._idle[phase] = 0
        else:
            size = self._probe(key, len(candidates.token_ids))
        return candidates.first(size)

    def _best_size(self, key: str, candidates: Candidates, shape: ForwardShape) -> int:
        cost_without = self.profile.cost.at(shape.n_fed(0))
        intercept, slope = self.profile.cost.fit()
        available = len(candidates.token_ids)
        sizes = [*(size for size in BLOCK_SIZES if size < available), available]
        best, best_gain = 0, 0.0
        for size, saved in zip(sizes, self._expected(key, candidates, sizes), strict=True):
            cost_with = intercept + slope * shape.n_fed(size)
            gain = saved - MARGIN * (max(1.0, cost_with) - cost_without)
            if gain > best_gain:
                best, best_gain = size, gain
        return best

    def _expected(self, key: str, candidates: Candidates, sizes: list[int]) -> list[float]:
        if candidates.chances:
            calibration = self.profile.calibrations.setdefault(key, Calibration())
            return calibration.expected(candidates.chances, sizes)
        return self.profile.chains.setdefault(key, Chain()).expected(sizes)

    def _probe(self, key: str, available: int) -> int:
        """Offers a few candidates now and then, ever more rarely while they fail."""
        self._skipped[key] = self._skipped.get(key, 0) + 1
        if self._skipped[key] < self._probe_after.get(key, FIRST_PROBE_AFTER):
            return 0
        self._skipped[key] = 0
        longer = 2 * self._probe_after.get(key, FIRST_PROBE_AFTER)
        self._probe_after[key] = min(longer, LAST_PROBE_AFTER)
        return min(PROBE_TOKENS, available)

    def observe(self, entry: Round, candidates: Candidates) -> None:
        # The time of a round in which a small model wrote tells nothing about this model.
        if entry.phase == "prefill" or entry.source in ("step", "assistant"):
            return
        profile = self.profile
        profile.observe_cost(entry.n_fed * entry.rows, entry.seconds)
        if entry.rows == 2:
            profile.riding.observe(self._added_cost(entry), entry.n_drafted)
        elif entry.phase == "thinking":
            profile.thinking.observe(profile.round_cost(entry), entry.n_committed)
        self.observe_candidates(candidates, entry.phase, entry.n_accepted)

    def observe_candidates(self, candidates: Candidates, phase: str, n_accepted: int) -> None:
        n_offered = len(candidates.token_ids)
        if not n_offered or candidates.source == "marker":
            return
        key = _key(candidates, phase)
        if candidates.chances:
            calibration = self.profile.calibrations.setdefault(key, Calibration())
            calibration.observe(candidates.chances, n_accepted)
        else:
            self.profile.chains.setdefault(key, Chain()).observe(n_offered, n_accepted)
        if n_accepted == n_offered:
            self._probe_after.pop(key, None)

    def first_budget(self, budget: int) -> int:
        profile = self.profile
        if not profile.thinking_tokens:
            return budget
        room = profile.thinking_tokens - DRAFT_ROOM * profile.answer_tokens
        return min(budget, max(EARLIEST_BRANCH, int(room)))

    def objection(self) -> str | None:
        if self._objection is None and not self.lane_pays():
            return "riding along would cost more than a draft can save"
        return self._objection

    def lane_pays(self) -> bool:
        # A draft that does not ride is judged by whole calls alone.
        return self.lane != "lockstep" or self._riding_pays()

    def _choose_lane(self) -> str:
        """Lets drafts ride, unless they are cheaper in the foreground, written like any answer."""
        alone = self.profile.answer_cost.get("plain")
        return "lockstep" if alone is None or alone >= self._riding_price() else "sequential"

    def _riding_pays(self) -> bool:
        return self._riding_price() < self._undrafted_cost() - DRAFTED_COST

    def _undrafted_cost(self) -> float:
        """What an answer token costs without a draft; till it was seen, what thinking costs."""
        return self.profile.answer_cost.get("plain", self.profile.thinking.value(prior=1.0))

    def _riding_price(self) -> float:
        """What a draft token costs that rides along."""
        return self.profile.riding.value(prior=self.profile.cost.at(2) - 1)

    def _added_cost(self, entry: Round) -> float:
        """What a round with a draft costs more than the tokens it committed would without one."""
        without = entry.n_committed * self.profile.thinking.value(prior=1.0)
        return self.profile.round_cost(entry) - without

    def _object_to_drafts(self) -> str | None:
        """Drafts pay if answers become cheaper by more than they cost, and until that is known."""
        profile = self.profile
        known = profile.answer_cost
        if "drafts" in known:
            saved = (self._undrafted_cost() - known["drafts"]) * profile.answer_tokens
            pays = saved > profile.draft_cost
        else:
            # A draft was in vain where thinking never ended.
            pays = profile.draft_cost == 0.0
        retries = profile.calls % RETRY_CALLS == RETRY_CALLS - 1
        if pays and retries and "drafts" in known:
            return "this call measures what answers cost without one"
        return None if pays or retries else "drafts have cost more than they saved"

    def finish(self, stats: SpeculationStats) -> None:
        profile = self.profile
        profile.calls += 1
        if profile.calls % RETRY_CALLS == RETRY_CALLS // 2:
            profile.riding = Rate()
        answer = [entry for entry in stats.rounds if entry.phase == "answering"]
        n_tokens = sum(entry.n_committed for entry in answer)
        if not profile.step_seconds:
            return
        if stats.drafts:
            profile.draft_cost = average(profile.draft_cost, self._draft_cost(stats))
        if not n_tokens:
            return
        arm = "drafts" if stats.drafts else "plain"
        cost = sum(profile.round_cost(entry) for entry in answer) / n_tokens
        profile.answer_cost[arm] = average(profile.answer_cost.get(arm, 0.0), cost)
        profile.thinking_tokens = average(profile.thinking_tokens, stats.thinking_tokens)
        profile.answer_tokens = average(profile.answer_tokens, n_tokens)

    def _draft_cost(self, stats: SpeculationStats) -> float:
        """What the drafts of a call cost, in single-token rounds."""
        step = self.profile.step_seconds
        cost = 0.0
        for draft in stats.drafts:
            end = draft.start + draft.seconds
            beside = [entry for entry in stats.rounds if draft.start <= entry.start < end]
            # Between rounds a draft is opened, and written where it has the foreground.
            cost += (draft.seconds - sum(entry.seconds for entry in beside)) / step
            cost += sum(self._slowdown(entry) for entry in beside)
        return max(0.0, cost)

    def _slowdown(self, entry: Round) -> float:
        """What a round costs more because of the draft in it or beside it."""
        if entry.rows == 2:
            return self._added_cost(entry)
        return entry.seconds / self.profile.step_seconds - self.profile.round_cost(entry)


def _key(candidates: Candidates, phase: str) -> str:
    """What acceptance depends on: who proposed, and in which kind of text."""
    return f"{candidates.source} while {phase if phase in KINDS_OF_TEXT else 'answering'}"
