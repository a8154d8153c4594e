"""What one generation did: the rounds, the drafts, and every figure derived from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .records import Candidates, Draft, DraftStatus, Verdict

if TYPE_CHECKING:
    from .markers import PhaseTracker


class Round(NamedTuple):
    """One forward and its commit.

    `phase` is the phase in which the round began (`"prefill"` for the prompt), `source` who
    proposed its candidates, `n_fed` how many tokens the forward read in each row, `n_proposed` how
    many of them were candidates, `n_accepted` how many of those were committed, `n_committed` how
    many tokens were emitted (the accepted ones and the model's own), `rows` 2 while a draft rode in
    the same forward, `start` the seconds since the call began, `seconds` how long the round took,
    `n_drafted` tokens that the riding draft wrote.

    Example:

    ```python
    >>> from ssr_hf import Round
    >>> Round("answering", "draft", 4, 3, 2, 3, rows=1, start=0.5, seconds=0.1).token_sources
    ('draft', 'draft', 'model')

    ```
    """

    phase: str
    source: str
    n_fed: int
    n_proposed: int
    n_accepted: int
    n_committed: int
    rows: int
    start: float
    seconds: float
    n_drafted: int = 0

    @property
    def token_sources(self) -> tuple[str, ...]:
        """Who proposed each emitted token: `source`, or `"model"` for the model's own."""
        own = self.n_committed - self.n_accepted
        return (self.source,) * self.n_accepted + ("model",) * own


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What became of one draft.

    Args:
        stage (`int`): 0 for the first draft of the generation.
        branch_tokens (`int`): Thinking tokens at the fork.
        n_tokens (`int`): Tokens of the draft.
        n_inherited (`int`): Tokens taken over from the previous draft after verification.
        status (`str`): `"complete"`, `"full"`, `"cut"` or `"discarded"`.
        accepted_prefix (`int`): Draft tokens committed when the draft was verified as a whole; 0
            where another draft was verified.
        start (`float`): When thinking was forked, in seconds since the call began.
        seconds (`float`): Wall-clock time from the fork to the end of the draft.
        forwards (`int`): Forwards that it needed beside those of the rounds.

    Example:

    ```python
    >>> from ssr_hf import DraftReport
    >>> report = DraftReport(0, 128, 90, 0, "full", accepted_prefix=36, start=0.5, seconds=1.2)
    >>> report.accepted_prefix / report.n_tokens
    0.4

    ```
    """

    stage: int
    branch_tokens: int
    n_tokens: int
    n_inherited: int
    status: str
    accepted_prefix: int
    start: float
    seconds: float
    forwards: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What self-speculation did in one call of `generate`.

    Every figure is derived from `rounds` and `drafts`. A *round* is one forward of the model and
    the tokens committed from it; the prompt's forward is the first round. Accepted counts never
    include the model's own token that follows the accepted ones.

    Args:
        rounds (`tuple[Round, ...]`): Every round, in order.
        drafts (`tuple[DraftReport, ...]`): Every draft, in order.
        thinking_tokens (`int`): Emitted tokens up to and including the end-of-thinking marker, of
            every block of thinking.
        answer_tokens (`int`): Emitted tokens after a marker (all, if nothing was thought).
        thinking_ended (`bool`): Whether the end-of-thinking marker was reached and thinking was not
            opened again.
        notes (`tuple[str, ...]`): Decisions worth knowing, such as why nothing was proposed.

    Example:

    ```python
    >>> from ssr_hf import Round, SpeculationStats
    >>> rounds = (
    ...     Round("prefill", "none", 9, 0, 0, 1, rows=1, start=0.0, seconds=0.2),
    ...     Round("answering", "draft", 4, 3, 2, 3, rows=1, start=0.2, seconds=0.1),
    ... )
    >>> stats = SpeculationStats(rounds=rounds)
    >>> stats.new_tokens, stats.forwards, stats.accepted_prefix
    (4, 2, 2)

    ```
    """

    rounds: tuple[Round, ...] = ()
    drafts: tuple[DraftReport, ...] = ()
    thinking_tokens: int = 0
    answer_tokens: int = 0
    thinking_ended: bool = False
    notes: tuple[str, ...] = ()

    @property
    def new_tokens(self) -> int:
        """Tokens emitted in all."""
        return sum(r.n_committed for r in self.rounds)

    @property
    def token_sources(self) -> tuple[str, ...]:
        """Who proposed each emitted token, in order.

        `"draft"` and `"suffix"` tokens were proposed and accepted, `"marker"` ones complete an end
        marker, `"model"` ones were decoded one by one. With step speculation, a small model wrote
        the tokens of a `"step"`, and proposed those of `"assistant"`.
        """
        return tuple(source for r in self.rounds for source in r.token_sources)

    @property
    def forwards(self) -> int:
        """Forwards of the model: one per round, and those that drafts needed for themselves."""
        return len(self.rounds) + sum(d.forwards for d in self.drafts)

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens per forward; plain decoding has 1.0."""
        return self.new_tokens / max(1, self.forwards)

    @property
    def draft_tokens(self) -> int:
        """Tokens written by drafts, inherited ones not counted."""
        return sum(d.n_tokens - d.n_inherited for d in self.drafts)

    @property
    def accepted_prefix(self) -> int:
        """Draft tokens accepted by verifying whole drafts."""
        return self._accepted("draft")

    @property
    def suffix_proposed(self) -> int:
        """Tokens that the suffix index proposed."""
        return sum(r.n_proposed for r in self.rounds if r.source == "suffix")

    @property
    def suffix_accepted(self) -> int:
        """Proposed tokens of the suffix index that were committed."""
        return self._accepted("suffix")

    @property
    def seconds(self) -> float:
        """Wall-clock seconds from the beginning to the end of the last round."""
        return self.rounds[-1].start + self.rounds[-1].seconds if self.rounds else 0.0

    def phase_seconds(self, phase: str) -> float:
        """Wall-clock seconds of the rounds of one phase.

        Args:
            phase (`str`): `"prefill"`, `"thinking"`, `"closing"`, `"answering"` or `"none"`.

        Returns:
            `float`: Seconds.
        """
        return sum(r.seconds for r in self.rounds if r.phase == phase)

    def _accepted(self, source: str) -> int:
        return sum(r.n_accepted for r in self.rounds if r.source == source)

    def to_dict(self) -> dict[str, Any]:
        """The figures, as a dict that `json.dumps` takes; rounds are left out."""
        phases = dict.fromkeys(r.phase for r in self.rounds)
        return {
            "new_tokens": self.new_tokens,
            "thinking_tokens": self.thinking_tokens,
            "answer_tokens": self.answer_tokens,
            "thinking_ended": self.thinking_ended,
            "forwards": self.forwards,
            "tokens_per_forward": round(self.tokens_per_forward, 3),
            "drafts": [
                {**asdict(d), "start": round(d.start, 4), "seconds": round(d.seconds, 4)}
                for d in self.drafts
            ],
            "draft_tokens": self.draft_tokens,
            "accepted_prefix": self.accepted_prefix,
            "suffix_proposed": self.suffix_proposed,
            "suffix_accepted": self.suffix_accepted,
            "seconds": {phase: round(self.phase_seconds(phase), 4) for phase in phases},
            "notes": list(self.notes),
        }


class Recorder:
    """Collects what `SpeculationStats` reports; it never synchronises a device.

    Args:
        on_round (`Callable[[Round], None]`, *optional*): Told about every round when it ends; its
            own time is not counted.
    """

    def __init__(self, on_round: Callable[[Round], None] | None = None) -> None:
        self._on_round = on_round
        self._origin = time.perf_counter()
        self._round_start = 0.0
        self._rounds: list[Round] = []
        self._drafts: list[tuple[Draft, float, float]] = []
        self._accepted_prefix: dict[int, int] = {}
        self._notes: list[str] = []

    def now(self) -> float:
        """Seconds since the call began, without those of `on_round`."""
        return time.perf_counter() - self._origin

    def begin_round(self) -> None:
        """Starts the clock of a round."""
        self._round_start = self.now()

    def end_round(
        self,
        phase: str,
        n_fed: int,
        candidates: Candidates,
        verdict: Verdict,
        rows: int,
        n_drafted: int = 0,
    ) -> Round:
        """Records the round that `begin_round` started."""
        entry = Round(
            phase=phase,
            source=candidates.source,
            n_fed=n_fed,
            n_proposed=len(candidates.token_ids),
            n_accepted=verdict.n_accepted,
            n_committed=len(verdict.token_ids),
            rows=rows,
            start=self._round_start,
            seconds=self.now() - self._round_start,
            n_drafted=n_drafted,
        )
        self._rounds.append(entry)
        if self._on_round is not None:
            before = time.perf_counter()
            self._on_round(entry)
            self._origin += time.perf_counter() - before
        return entry

    def draft(self, draft: Draft, seconds: float) -> None:
        """Records a draft that ended."""
        self._drafts.append((draft, self.now() - seconds, seconds))

    def prefix_verified(self, stage: int, n_accepted: int) -> None:
        """Records draft tokens that were accepted by prefix verification."""
        self._accepted_prefix[stage] = self._accepted_prefix.get(stage, 0) + n_accepted

    def note(self, text: str) -> None:
        """Records a decision, once."""
        if text not in self._notes:
            self._notes.append(text)

    def stats(self, tracker: PhaseTracker) -> SpeculationStats:
        """The figures of the finished generation."""
        new_tokens = sum(r.n_committed for r in self._rounds)
        has_thought = tracker.blocks or tracker.n_closed
        n_answered = tracker.n_answered if has_thought else new_tokens
        return SpeculationStats(
            rounds=tuple(self._rounds),
            drafts=tuple(self._reports()),
            thinking_tokens=new_tokens - n_answered,
            answer_tokens=n_answered,
            thinking_ended=tracker.n_closed > 0 and not tracker.is_open,
            notes=tuple(self._notes),
        )

    def _reports(self) -> Iterable[DraftReport]:
        for draft, start, seconds in self._drafts:
            stage = draft.branch_point.stage
            yield DraftReport(
                stage=stage,
                branch_tokens=draft.branch_point.thinking_tokens,
                n_tokens=len(draft.token_ids),
                n_inherited=draft.inherited,
                forwards=draft.forwards,
                status=DraftStatus(draft.status).value,
                accepted_prefix=self._accepted_prefix.get(stage, 0),
                start=start,
                seconds=seconds,
            )
