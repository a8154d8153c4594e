"""Never slower: how many candidates to offer, and whether to draft, from what was measured.

Cost is counted in single-token rounds, so an accepted candidate saves 1. The pacer offers the
number of candidates whose expected saving exceeds their added cost by most, offers nothing where
none does, and then probes rarely. What was learnt lives in a `Profile` that outlives the call. No
choice made here can change a token; it changes only which tokens are offered.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Protocol

from .errors import ConfigError, message
from .records import Candidates
from .stats import Round, SpeculationStats

# Weight of the newest measurement in a moving average.
COST_WEIGHT = 0.15
# A measurement may leave the average by this factor at most: a pause of the machine is no cost.
OUTLIER = 1.5
# Cost of one more token of a round before anything was measured, in single-token rounds; it counts
# as much as PRIOR_ROUNDS measured rounds of few and as many of PRIOR_LONG tokens.
PRIOR_SLOPE = 0.03
PRIOR_ROUNDS = 2.0
PRIOR_SHORT, PRIOR_LONG = 2, 34
# A measured cost counts less by this factor with every round after it.
COST_FADING = 0.97
# Every acceptance count fades by this factor when it is added to, so that old text counts less.
FADING = 0.98
N_BINS = 10
PRIOR_TRIALS = 4.0
# Estimates err, so candidates have to promise this many times what they cost.
MARGIN = 1.05
PROBE_TOKENS = 4
FIRST_PROBE_AFTER = 16
LAST_PROBE_AFTER = 512
# Rounds with a second row before its cost is believed.
ROWS_BELIEVED_AFTER = 8
# Largest share of a draft's tokens that can be hoped to save a round each.
HOPED_DRAFT_VALUE = 0.5
# Every so many calls, the drafting choice that looks worse is tried again.
RETRY_CALLS = 16
# The first draft branches so early that this many times the usual answer fits beside the thinking
# that is left, but not before EARLIEST_BRANCH thinking tokens.
DRAFT_ROOM = 1.25
EARLIEST_BRANCH = 16

BLOCK_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def _prior_sum(power: int, slope: float = 0.0) -> Callable[[], float]:
    """A sum over the prior rounds of `n ** power`, times their cost where there is a slope."""
    sizes = (PRIOR_SHORT, PRIOR_LONG)
    costs = [1 + slope * (n - 1) for n in sizes]
    total = sum(PRIOR_ROUNDS * n**power * cost for n, cost in zip(sizes, costs, strict=True))
    return lambda: total


@dataclass(slots=True)
class CostLine:
    """Cost of a round of several tokens: a line over their number, by fading least squares.

    On CPUs the first extra token costs a jump (a product with a matrix instead of a vector) and
    each further one the same again; on GPUs the line is flat over the sizes in question. A line has
    two unknowns, so that each round says something about all sizes.
    """

    weight: float = field(default_factory=_prior_sum(0))
    tokens: float = field(default_factory=_prior_sum(1))
    tokens_squared: float = field(default_factory=_prior_sum(2))
    cost: float = field(default_factory=_prior_sum(0, PRIOR_SLOPE))
    tokens_cost: float = field(default_factory=_prior_sum(1, PRIOR_SLOPE))

    def at(self, n_tokens: int) -> float:
        """Cost of feeding `n_tokens`, in single-token rounds."""
        if n_tokens <= 1:
            return 1.0
        spread = self.weight * self.tokens_squared - self.tokens**2
        slope = (self.weight * self.tokens_cost - self.tokens * self.cost) / spread
        slope = max(0.0, slope)
        return max(1.0, (self.cost + slope * (self.weight * n_tokens - self.tokens)) / self.weight)

    def observe(self, n_tokens: int, cost: float) -> None:
        """Takes the cost of one round."""
        expected = self.at(n_tokens)
        # No block is cheaper than a step: where it looks so, the steps were disturbed.
        cost = min(max(1.0, cost, expected / OUTLIER), expected * OUTLIER)
        self.weight = self.weight * COST_FADING + 1
        self.tokens = self.tokens * COST_FADING + n_tokens
        self.tokens_squared = self.tokens_squared * COST_FADING + n_tokens**2
        self.cost = self.cost * COST_FADING + cost
        self.tokens_cost = self.tokens_cost * COST_FADING + n_tokens * cost


@dataclass(slots=True)
class Chain:
    """Chances that the first candidate, and each after an accepted one, is accepted.

    For candidates that come without an estimate, such as drafts. Fading counts from a prior.
    """

    first_hits: float = 3.2
    first_trials: float = 4.0
    next_hits: float = 3.6
    next_trials: float = 4.0

    def expected(self, sizes: list[int]) -> list[float]:
        """Expected number of accepted candidates for each number of candidates."""
        first = self.first_hits / self.first_trials
        following = min(0.995, self.next_hits / self.next_trials)
        return [first * (1 - following**size) / (1 - following) for size in sizes]

    def observe(self, n_proposed: int, n_accepted: int) -> None:
        """Counts one round."""
        self.first_hits = self.first_hits * FADING + (n_accepted > 0)
        self.first_trials = self.first_trials * FADING + 1
        if n_accepted > 0 and n_proposed > 1:
            self.next_hits = self.next_hits * FADING + n_accepted - 1
            self.next_trials = self.next_trials * FADING + min(n_accepted, n_proposed - 1)


def _prior_hits() -> list[float]:
    return [PRIOR_TRIALS * (bin_index + 0.5) / N_BINS for bin_index in range(N_BINS)]


def _prior_trials() -> list[float]:
    return [PRIOR_TRIALS] * N_BINS


@dataclass(slots=True)
class Calibration:
    """How often candidates were right, by the chance that was estimated for them.

    Bin `b` holds fading counts of the candidates whose estimate lay in `[b, b + 1) / N_BINS`; they
    start as if the estimates were true.
    """

    hits: list[float] = field(default_factory=_prior_hits)
    trials: list[float] = field(default_factory=_prior_trials)

    def expected(self, chances: tuple[float, ...], sizes: list[int]) -> list[float]:
        """Expected number of accepted candidates for each number of candidates."""
        hits, trials = self.hits, self.trials
        sums = [0.0]
        for chance in chances:
            index = int(chance * N_BINS) if chance < 1 else N_BINS - 1
            sums.append(sums[-1] + hits[index] / trials[index])
        return [sums[size] for size in sizes]

    def observe(self, chances: tuple[float, ...], n_accepted: int) -> None:
        """Counts one round."""
        for position, chance in enumerate(chances):
            index = int(chance * N_BINS) if chance < 1 else N_BINS - 1
            self.hits[index] = self.hits[index] * FADING + (position < n_accepted)
            self.trials[index] = self.trials[index] * FADING + 1


@dataclass(slots=True)
class Profile:
    """What was learnt about a model on a machine: cost by token count, acceptance by source.

    `enable` holds one per model; pass one to share, save or load it.

    Args:
        step_seconds (`float`): Seconds of a single-token round; 0 before the first.
        cost (`CostLine`): Cost of a round by tokens fed, in single-token rounds.
        row_cost (`float`): Cost of a single-token round that carries a draft; 0 if unknown.
        chains (`dict[str, Chain]`): Acceptance of candidates without estimates, by source and
            phase.
        calibrations (`dict[str, Calibration]`): Acceptance of spans, by source and phase.
        thinking_cost (`float`): Cost per token of thinking beside which no draft rode.
        thinking_tokens (`float`): Tokens of thinking.
        answer_cost (`dict[str, float]`): Cost per token of answers, with and without drafts.
        answer_tokens (`float`): Tokens of an answer.
        draft_cost (`float`): Cost of the drafts of one call, in single-token rounds.
        calls (`int`): Calls seen.

    Example:

    ```python
    >>> from ssr_hf import Profile
    >>> Profile.from_json(Profile().to_json()) == Profile()
    True

    ```
    """

    step_seconds: float = 0.0
    cost: CostLine = field(default_factory=CostLine)
    row_cost: float = 0.0
    chains: dict[str, Chain] = field(default_factory=dict)
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    thinking_cost: float = 0.0
    thinking_tokens: float = 0.0
    answer_cost: dict[str, float] = field(default_factory=dict)
    answer_tokens: float = 0.0
    draft_cost: float = 0.0
    calls: int = 0

    def to_json(self) -> str:
        """The profile as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads what `to_json` wrote.

        Args:
            text (`str`): A JSON object.

        Returns:
            `Profile`: The profile.

        Raises:
            `ConfigError`: The text is no saved profile.
        """
        try:
            values = json.loads(text)
            values["cost"] = CostLine(**values["cost"])
            for name, kind in (("chains", Chain), ("calibrations", Calibration)):
                values[name] = {key: kind(**counts) for key, counts in values[name].items()}
            return cls(**values)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            accepted = "A JSON object written by Profile.to_json() is accepted"
            raise ConfigError(
                message(f"The text is no profile ({error})", accepted, "Start with Profile()")
            ) from error

    def round_cost(self, entry: Round) -> float:
        """Cost of a round as it is learnt by now, in single-token rounds.

        Calls are compared by this rather than by their seconds: it does not move with the machine.
        """
        if entry.rows == 2:
            return self.row_cost or 1.0
        return self.cost.at(entry.n_fed)

    def observe_cost(self, n_tokens: int, rows: int, seconds: float) -> None:
        """Takes the time of one round."""
        if n_tokens == 1 and rows == 1:
            self.step_seconds = _average(self.step_seconds, seconds)
        if self.step_seconds == 0.0:
            return
        relative = seconds / self.step_seconds
        if rows == 2 and n_tokens == 1:
            self.row_cost = _average(self.row_cost, relative)
        elif rows == 1 and n_tokens > 1:
            self.cost.observe(n_tokens, relative)


def _average(old: float, new: float) -> float:
    if old == 0.0:
        return new
    return old + COST_WEIGHT * (min(max(new, old / OUTLIER), old * OUTLIER) - old)


class Pacer(Protocol):
    """Decides how much to speculate. It never sees tokens' logits and never changes a token."""

    def trim(self, candidates: Candidates, phase: str, n_pending: int) -> Candidates:
        """The leading candidates that are worth offering."""

    def observe(self, entry: Round, candidates: Candidates) -> None:
        """Follows a round."""

    @property
    def lane(self) -> str:
        """The lane of this call."""

    def first_budget(self, budget: int) -> int:
        """Where to branch first, in thinking tokens, if the user left it open."""

    def drafts_pay(self) -> bool:
        """Whether to open a draft now."""

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

    def trim(self, candidates: Candidates, phase: str, n_pending: int) -> Candidates:
        return candidates

    def observe(self, entry: Round, candidates: Candidates) -> None:
        pass

    def first_budget(self, budget: int) -> int:
        return budget

    def drafts_pay(self) -> bool:
        return True

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
        self._row_rounds = 0
        self._drafting = self._choose_drafting()

    def trim(self, candidates: Candidates, phase: str, n_pending: int) -> Candidates:
        # How much of a sampled draft is judged must not depend on where it ends: see `acceptance`.
        if not candidates.token_ids or candidates.source == "marker" or candidates.proposals:
            return candidates
        key = _key(candidates, phase)
        size = self._best_size(key, candidates, n_pending)
        if size == 0:
            size = self._probe(key, len(candidates.token_ids))
        return candidates.first(size)

    def _best_size(self, key: str, candidates: Candidates, n_pending: int) -> int:
        cost = self.profile.cost.at
        available = len(candidates.token_ids)
        sizes = [*(size for size in BLOCK_SIZES if size < available), available]
        best, best_gain = 0, 0.0
        for size, saved in zip(sizes, self._expected(key, candidates, sizes), strict=True):
            gain = saved - MARGIN * (cost(n_pending + size) - cost(n_pending))
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
        self.profile.observe_cost(entry.n_fed, entry.rows, entry.seconds)
        self._row_rounds += entry.rows == 2
        if entry.phase == "thinking" and entry.rows == 1 and self.profile.step_seconds:
            cost = entry.seconds / self.profile.step_seconds / entry.n_committed
            self.profile.thinking_cost = _average(self.profile.thinking_cost, cost)
        if entry.n_proposed and entry.source != "marker":
            key = _key(candidates, entry.phase)
            if candidates.chances:
                calibration = self.profile.calibrations.setdefault(key, Calibration())
                calibration.observe(candidates.chances, entry.n_accepted)
            else:
                chain = self.profile.chains.setdefault(key, Chain())
                chain.observe(entry.n_proposed, entry.n_accepted)
            if entry.n_accepted == entry.n_proposed:
                self._probe_after.pop(key, None)

    def first_budget(self, budget: int) -> int:
        profile = self.profile
        if not profile.thinking_tokens:
            return budget
        room = profile.thinking_tokens - DRAFT_ROOM * profile.answer_tokens
        return min(budget, max(EARLIEST_BRANCH, int(room)))

    def drafts_pay(self) -> bool:
        # A draft that does not ride is judged by whole calls alone.
        return self._drafting and (self.lane != "lockstep" or self._riding_pays())

    def lane_pays(self) -> bool:
        return self._row_rounds < ROWS_BELIEVED_AFTER or self._riding_pays()

    def _choose_lane(self) -> str:
        """Lets drafts ride, unless they are cheaper in the foreground, written like any answer."""
        alone = self.profile.answer_cost.get("plain")
        return "lockstep" if alone is None or alone >= self._riding_price() else "sequential"

    def _riding_pays(self) -> bool:
        return self._riding_price() < HOPED_DRAFT_VALUE

    def _riding_price(self) -> float:
        """What a draft token costs that rides along, as far as that is known.

        A round with a draft costs `row_cost` instead of what a thinking token costs without one.
        """
        profile = self.profile
        return max(0.0, profile.row_cost - (profile.thinking_cost or 1.0))

    def _choose_drafting(self) -> bool:
        """Drafts if answers become cheaper by more than drafts cost; tries each way once."""
        profile = self.profile
        known = profile.answer_cost
        if "drafts" not in known or "plain" not in known:
            return "drafts" not in known
        saved = (known["plain"] - known["drafts"]) * profile.answer_tokens
        retry = profile.calls % RETRY_CALLS == RETRY_CALLS - 1
        return (saved > profile.draft_cost) != retry

    def finish(self, stats: SpeculationStats) -> None:
        profile = self.profile
        profile.calls += 1
        answer = [entry for entry in stats.rounds if entry.phase == "answering"]
        n_tokens = sum(entry.n_committed for entry in answer)
        if not n_tokens or not profile.step_seconds:
            return
        arm = "drafts" if stats.drafts else "plain"
        cost = sum(profile.round_cost(entry) for entry in answer) / n_tokens
        profile.answer_cost[arm] = _average(profile.answer_cost.get(arm, 0.0), cost)
        profile.thinking_tokens = _average(profile.thinking_tokens, stats.thinking_tokens)
        profile.answer_tokens = _average(profile.answer_tokens, n_tokens)
        if stats.drafts:
            profile.draft_cost = _average(profile.draft_cost, self._draft_cost(stats))

    def _draft_cost(self, stats: SpeculationStats) -> float:
        """What the drafts of a call cost, in single-token rounds."""
        riding = sum(entry.rows == 2 for entry in stats.rounds)
        if riding:
            return riding * self._riding_price()
        return sum(draft.seconds for draft in stats.drafts) / self.profile.step_seconds


def _key(candidates: Candidates, phase: str) -> str:
    """What acceptance depends on: who proposed, and whether the model is thinking."""
    return f"{candidates.source} while {'thinking' if phase == 'thinking' else 'answering'}"
