"""The decoding loop of SSR, self-speculation for reasoning models, on one page.

A round offers candidates, judges them in one forward, commits what the model would have written
anyway, and rolls the cache back to it. Drafts are answers written from a partial chain of thought
while thinking goes on: they are opened at branch points, ride in a lane, and are offered as a whole
when the answer begins (prefix verification); after that, spans of them and of everything else that
was seen are offered by longest suffix match (suffix decoding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import compat
from .records import (
    NO_CANDIDATES,
    NOTHING_COMMITTED,
    Candidates,
    Draft,
    ForwardShape,
    Verdict,
)

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from .candidates import Proposer
    from .commit import Committer
    from .drafting import DraftSchedule
    from .lanes import Lane
    from .markers import PhaseTracker
    from .pacing import Pacer
    from .specreason import StepSpeculation
    from .stats import Recorder
    from .target import Target


@dataclass(frozen=True, slots=True)
class SelfSpeculativeDecoding:
    """The parts of one generation.

    Args:
        target (`Target`): The model and its cache.
        committer (`Committer`): Turns logits into emitted tokens.
        proposer (`Proposer`): Chooses candidates.
        lane (`Lane`): Runs drafts.
        schedule (`DraftSchedule`): Opens and collects drafts.
        pacer (`Pacer`): Learns cost and acceptance from every round.
        tracker (`PhaseTracker`): Thinking, closing or answering.
        recorder (`Recorder`): Counts and times.
        keeps_cache (`bool`): Whether the cache outlives the call.
        steps (`StepSpeculation`, *optional*): Has a small model write reasoning steps (lossy).
    """

    target: Target
    committer: Committer
    proposer: Proposer
    lane: Lane
    schedule: DraftSchedule
    pacer: Pacer
    tracker: PhaseTracker
    recorder: Recorder
    keeps_cache: bool
    steps: StepSpeculation | None = None

    def run(self, generation_config: GenerationConfig) -> None:
        """Generates until a criterion stops. Leaves the cache as plain `generate` would."""
        try:
            self.prefill(generation_config)
            with compat.decode_optimisation(self.target.model):
                while not self.committer.finished:
                    self.round()
                if self.keeps_cache:
                    self.target.settle()
        finally:
            try:
                self.lane.close()
            finally:
                self.target.close(self.keeps_cache)

    def prefill(self, generation_config: GenerationConfig) -> None:
        """Reads the prompt and commits the first token, unless the small model writes it."""
        self.recorder.begin_round()
        n_prompt = len(self.target.sequence)
        target_logits = self.target.prefill(generation_config)
        if self.steps is not None and self.steps.opens(target_logits):
            self.recorder.end_round("prefill", n_prompt, NO_CANDIDATES, NOTHING_COMMITTED, 1)
        else:
            self.commit(target_logits, NO_CANDIDATES, "prefill", n_prompt)

    def round(self) -> None:
        """Offers candidates, judges them in one forward, commits."""
        self.recorder.begin_round()
        phase = self.tracker.phase.value
        step = self.steps.round() if self.steps is not None and self.steps.is_due() else None
        if step is not None:
            self.follow(step.verdict, step.candidates, phase, step.n_fed)
            return
        candidates = self.choose()
        target_logits = self.lane.forward(candidates)
        self.commit(target_logits, candidates, phase, self.target.n_fed)

    def choose(self) -> Candidates:
        """Candidates for the next round; none where a draft rides that cannot go at their pace."""
        if not self.lane.takes_candidates:
            return NO_CANDIDATES
        proposed = self.proposer.propose(ForwardShape(self.target.n_pending, self.lane.rows))
        candidates = self.schedule.limit(proposed)
        return candidates if self.steps is None else self.steps.refine(candidates)

    def commit(
        self, target_logits: torch.Tensor, candidates: Candidates, phase: str, n_fed: int
    ) -> None:
        """Commits what the model selects."""
        verdict = self.committer.commit(target_logits, candidates)
        self.follow(verdict, candidates, phase, n_fed)

    def follow(self, verdict: Verdict, candidates: Candidates, phase: str, n_fed: int) -> None:
        """Lets cache, phase, statistics and drafts follow a commit."""
        self.target.keep(len(verdict.token_ids))
        self.proposer.observe(verdict)
        rows, n_drafted = self.lane.rows, self.lane.n_drafted
        entry = self.recorder.end_round(phase, n_fed, candidates, verdict, rows, n_drafted)
        self.pacer.observe(entry, candidates)
        if candidates.source == "draft":
            self.recorder.prefix_verified(candidates.stage, verdict.n_accepted)
        if self.steps is not None:
            self.steps.observe(verdict)
            self.take(self.schedule.hold(self.steps.is_due() and not verdict.finished))
        self.take(self.schedule.advance(verdict.finished))

    def take(self, draft: Draft | None) -> None:
        """Offers a draft that ended, if one did."""
        if draft is not None:
            self.proposer.add_draft(draft)
