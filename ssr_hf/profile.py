"""What was learnt about a model on a machine: cost of rounds, acceptance of candidates.

Cost is counted in single-token rounds: it then says the same on a busy machine as on an idle one.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import ConfigError, message
from .stats import Round

# Weight of the newest measurement in a moving average: of single-token rounds, and of calls.
STEP_WEIGHT = 0.08
CALL_WEIGHT = 0.15
# A measurement may leave what is expected by this factor at most: a pause of the machine is no
# cost.
OUTLIER = 1.5
# Cost of one more token of a round before anything was measured; it counts as much as one round of
# each of these sizes.
PRIOR_SLOPE = 0.03
PRIOR_SIZES = (2, 34)
# A measured cost counts less by this factor with every round after it.
COST_FADING = 0.98
# Every acceptance count fades by this factor when it is added to, so that old text counts less.
FADING = 0.98
# Rates outlast a draft: its first tokens cost more than the others.
RATE_FADING = 0.995
PRIOR_UNITS = 8.0
N_BINS = 10
PRIOR_TRIALS = 4.0


def _terms(n_tokens: int, cost: float) -> tuple[float, ...]:
    """What a round adds to the sums of least squares: 1, n, n ** 2, cost and n * cost."""
    return 1.0, n_tokens, n_tokens**2, cost, n_tokens * cost


# The prior does not fade: without it, many rounds of one size would leave the slope open.
PRIOR_ROUNDS = [_terms(n, 1 + PRIOR_SLOPE * (n - 1)) for n in PRIOR_SIZES]
PRIOR_SUMS = [sum(column) for column in zip(*PRIOR_ROUNDS, strict=True)]


@dataclass(slots=True)
class CostLine:
    """Cost of a round of several tokens: a line over their number, by fading least squares.

    On CPUs the first extra token costs a jump (a product with a matrix instead of a vector) and
    each further one the same again; on GPUs the line is flat over the sizes in question. A line has
    two unknowns, so that each round says something about all sizes.

    Args:
        sums (`list[float]`): The five sums over the rounds that were observed.
    """

    sums: list[float] = field(default_factory=lambda: [0.0] * len(PRIOR_SUMS))

    def fit(self) -> tuple[float, float]:
        """Intercept and slope of the line."""
        sums = map(operator.add, self.sums, PRIOR_SUMS)
        weight, tokens, tokens_squared, cost, tokens_cost = sums
        slope = (weight * tokens_cost - tokens * cost) / (weight * tokens_squared - tokens**2)
        slope = max(0.0, slope)
        return (cost - slope * tokens) / weight, slope

    def at(self, n_tokens: int) -> float:
        """Cost of feeding `n_tokens`, in single-token rounds."""
        if n_tokens <= 1:
            return 1.0
        intercept, slope = self.fit()
        return max(1.0, intercept + slope * n_tokens)

    def observe(self, n_tokens: int, cost: float) -> None:
        """Takes the cost of one round."""
        expected = self.at(n_tokens)
        # No block is cheaper than a step: where it looks so, the steps were disturbed.
        cost = min(max(1.0, cost, expected / OUTLIER), expected * OUTLIER)
        terms = _terms(n_tokens, cost)
        self.sums = [COST_FADING * old + new for old, new in zip(self.sums, terms, strict=True)]


@dataclass(slots=True)
class Rate:
    """Cost per unit, as a ratio of fading sums, which a prior joins as `PRIOR_UNITS` units."""

    cost: float = 0.0
    units: float = 0.0

    def observe(self, cost: float, units: float) -> None:
        """Takes the cost of some units."""
        self.cost = self.cost * RATE_FADING + cost
        self.units = self.units * RATE_FADING + units

    def value(self, prior: float) -> float:
        """The ratio."""
        return (self.cost + PRIOR_UNITS * prior) / (self.units + PRIOR_UNITS)


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
        steps (`int`): Single-token rounds seen.
        cost (`CostLine`): Cost of a round by the tokens it feeds, those of a draft included.
        chains (`dict[str, Chain]`): Acceptance of candidates without estimates, by source and
            phase.
        calibrations (`dict[str, Calibration]`): Acceptance of spans, by source and phase.
        thinking (`Rate`): Cost per token of thinking beside which no draft rode.
        riding (`Rate`): Added cost per token of a draft that rode.
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
    steps: int = 0
    cost: CostLine = field(default_factory=CostLine)
    chains: dict[str, Chain] = field(default_factory=dict)
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    thinking: Rate = field(default_factory=Rate)
    riding: Rate = field(default_factory=Rate)
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
            for name in ("thinking", "riding"):
                values[name] = Rate(**values[name])
            for name, kind in (("chains", Chain), ("calibrations", Calibration)):
                values[name] = {key: kind(**counts) for key, counts in values[name].items()}
            profile = cls(**values)
            profile._check()
            return profile
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            accepted = "A JSON object written by Profile.to_json() is accepted"
            raise ConfigError(
                message(f"The text is no profile ({error})", accepted, "Start with Profile()")
            ) from error

    def _check(self) -> None:
        """Raises `ValueError` where a value is none that could have been learnt."""
        for name, value in _leaves(asdict(self)):
            # Riding may cost less than nothing, where a round commits more than it would alone.
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or (value < 0 and name != "riding.cost"):
                raise ValueError(f"{name} is {value!r}")
        if len(self.cost.sums) != len(PRIOR_SUMS) or self.answer_cost.keys() - {"plain", "drafts"}:
            raise ValueError("its parts are others")
        for name, counts in self.calibrations.items():
            if len(counts.hits) != N_BINS or len(counts.trials) != N_BINS or 0 in counts.trials:
                raise ValueError(f"{name} has other bins")
        for name, chain in self.chains.items():
            if 0 in (chain.first_trials, chain.next_trials):
                raise ValueError(f"{name} was never tried")

    def round_cost(self, entry: Round) -> float:
        """Cost of a round as it is learnt by now, in single-token rounds.

        Calls are compared by this rather than by their seconds: it does not move with the machine.
        """
        return self.cost.at(entry.n_fed * entry.rows)

    def observe_cost(self, n_tokens: int, seconds: float) -> None:
        """Takes the time of one round that fed `n_tokens`, over all of its rows."""
        if n_tokens == 1:
            # The first step is slower than others, so that the second one replaces it.
            weight = max(STEP_WEIGHT, 1 / max(1, self.steps))
            usual = seconds if self.steps < 2 else min(seconds, OUTLIER * self.step_seconds)
            self.step_seconds += weight * (usual - self.step_seconds)
            self.steps += 1
        elif self.step_seconds:
            self.cost.observe(n_tokens, seconds / self.step_seconds)


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in dicts and lists, with the dotted name of where it is."""
    if isinstance(value, dict):
        for key, held in value.items():
            yield from _leaves(held, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for held in value:
            yield from _leaves(held, name)
    else:
        yield name, value


def average(old: float, new: float) -> float:
    """Moves an average, of which 0 stands for none, towards a new value."""
    if old == 0.0:
        return new
    return old + CALL_WEIGHT * (min(max(new, old / OUTLIER), old * OUTLIER) - old)
