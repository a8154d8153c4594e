"""What a round offers for verification: the draft first, then spans that were seen before."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .config import SUFFIX_SOURCES, SuffixConfig
from .markers import Phase, PhaseTracker
from .pacing import DRAFTING
from .records import NO_CANDIDATES, Candidates, Draft, ForwardShape, Verdict
from .suffix_index import HISTORY, History, SuffixIndex

if TYPE_CHECKING:
    from .config import SelfSpeculationConfig
    from .pacing import Pacer
    from .tokens import TokenSequence


class SuffixCandidateGenerator(CandidateGenerator):
    """Proposes spans that followed the longest matching suffix of the text (SuffixDecoding, arXiv
    2411.04975), in the host's `CandidateGenerator` contract.

    Args:
        config (`SuffixConfig`, *optional*): Match depth, span length, sources.
        history (`History`, *optional*): What was written in earlier calls, if that is a source.

    Example:

    ```python
    >>> import torch
    >>> from ssr_hf import SuffixCandidateGenerator
    >>> generator = SuffixCandidateGenerator()
    >>> candidate_ids, _ = generator.get_candidates(torch.tensor([[1, 2, 3, 9, 1, 2]]))
    >>> candidate_ids[0, 6:].tolist()[:2]
    [3, 9]

    ```
    """

    def __init__(self, config: SuffixConfig | None = None, history: History | None = None) -> None:
        self.config = config or SuffixConfig()
        self._index = SuffixIndex(
            max_match=self.config.max_match,
            sources=[source for source in self.config.sources if source != HISTORY],
            history=history if HISTORY in self.config.sources else None,
        )
        self._n_seen = 0

    def add(self, source: str, token_ids: Iterable[int]) -> None:
        """Appends tokens to one source; sources that the config leaves out are ignored."""
        if source in self.config.sources:
            self._index.append(source, token_ids)

    def add_draft(self, draft: Draft) -> None:
        """Adds a draft as a text of its own."""
        if "draft" in self.config.sources:
            self._index.start("draft")
            self._index.append("draft", draft.token_ids)

    def propose(self, context: Sequence[int], room: int) -> Candidates:
        """A span that may follow `context`, of at most `room` tokens."""
        config = self.config
        span = self._index.propose(
            context,
            max_tokens=min(config.max_tokens, room),
            factor=config.factor,
            min_probability=config.min_probability,
        )
        if span is None:
            return NO_CANDIDATES
        return Candidates(span.token_ids, "suffix", chances=span.probabilities)

    def get_candidates(
        self, input_ids: torch.LongTensor, **kwargs: Any
    ) -> tuple[torch.LongTensor, None]:
        """The host's contract: `input_ids` `[1, T]` followed by the proposed tokens.

        The first call takes its text as the prompt, later calls what was added as the answer.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, T)`): The committed text.

        Returns:
            `tuple[torch.LongTensor, None]`: Ids `[1, T + m]`, and no logits.
        """
        token_ids: list[int] = input_ids[0].tolist()
        self.add("answer" if self._n_seen else "prompt", token_ids[self._n_seen :])
        self._n_seen = len(token_ids)
        candidates = self.propose(token_ids, room=self.config.max_tokens)
        new_ids = input_ids.new_tensor([candidates.token_ids])
        return torch.cat([input_ids, new_ids], dim=1), None  # type: ignore[return-value]

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """The host's contract; committed tokens are read from the next `get_candidates`."""


class DraftGuesser:
    """Guesses what a draft writes next: spans of the text at its fork and of the previous draft.

    An independent draft runs it in its own thread, so it has an index of its own.

    Args:
        config (`SuffixConfig`): Match depth and span length.
        pacer (`Pacer`): Says how many candidates are worth offering.
        token_ids (`Sequence[int]`): The text at the fork.
        previous (`Draft`, *optional*): The draft before.
        history (`History`, *optional*): What was written in earlier calls.
    """

    def __init__(
        self,
        config: SuffixConfig,
        pacer: Pacer,
        token_ids: Sequence[int],
        previous: Draft | None,
        history: History | None = None,
    ) -> None:
        self._pacer = pacer
        # All that the draft can repeat, but the history only where the user wants it.
        own = tuple(source for source in SUFFIX_SOURCES if source != HISTORY)
        sources = (*own, HISTORY) if HISTORY in config.sources else own
        self._generator = SuffixCandidateGenerator(replace(config, sources=sources), history)
        self._generator.add("prompt", token_ids)
        self._n_seen = len(token_ids)
        self._offered = NO_CANDIDATES
        if previous is not None:
            self._generator.add_draft(previous)

    def __call__(self, token_ids: Sequence[int], room: int, shape: ForwardShape) -> Candidates:
        """At most `room` candidates behind `token_ids`."""
        written = token_ids[self._n_seen :]
        pairs = zip(self._offered.token_ids, written, strict=False)
        n_accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._pacer.observe_candidates(self._offered, DRAFTING, n_accepted)
        self._generator.add("answer", written)
        self._n_seen = len(token_ids)
        self._offered = NO_CANDIDATES
        if room >= 1:
            candidates = self._generator.propose(token_ids, room)
            self._offered = self._pacer.trim(candidates, DRAFTING, shape)
        return self._offered


class Proposer:
    """Chooses the candidates of each round from the phase, the newest draft and the suffix index.

    Args:
        config (`SelfSpeculationConfig`): What may be proposed.
        tracker (`PhaseTracker`): The phase; `observe` moves it on.
        sequence (`TokenSequence`): The committed text.
        longest_text (`int`): Most tokens the text may have, prompt included.
        pacer (`Pacer`): Says how many of the candidates are worth offering.
        history (`History`, *optional*): What was written in earlier calls.
    """

    def __init__(
        self,
        config: SelfSpeculationConfig,
        tracker: PhaseTracker,
        sequence: TokenSequence,
        longest_text: int,
        pacer: Pacer,
        history: History | None = None,
    ) -> None:
        self._config = config
        self._tracker = tracker
        self._sequence = sequence
        self._longest_text = longest_text
        self._pacer = pacer
        self._generator = SuffixCandidateGenerator(config.suffix, history)
        self._unverified: Draft | None = None
        if config.proposes_spans:
            self._generator.add("prompt", sequence.token_ids)

    def propose(self, shape: ForwardShape) -> Candidates:
        """The candidates of the next round.

        Args:
            shape (`ForwardShape`): What its forward feeds besides.

        Returns:
            `Candidates`: Possibly none.
        """
        phase = self._tracker.phase
        # The model adds one token of its own to whatever is accepted.
        room = self._longest_text - len(self._sequence) - 1
        if room < 1 or self._config.reuse == "none":
            return NO_CANDIDATES
        if phase is Phase.CLOSING:
            return Candidates(self._tracker.remaining_closing()[:room], "marker")
        candidates = self._aligned_draft() if phase is Phase.ANSWERING else NO_CANDIDATES
        looks = not candidates.token_ids and self._proposes_spans(phase)
        if looks and self._pacer.looks(phase.value):
            candidates = self._generator.propose(self._sequence.token_ids, room)
        candidates = candidates.first(min(room, len(candidates.token_ids)))
        return self._pacer.trim(candidates, phase.value, shape)

    def _proposes_spans(self, phase: Phase) -> bool:
        if phase is Phase.THINKING and not self._config.suffix.speculates_while_thinking:
            return False
        return self._config.proposes_spans

    def _aligned_draft(self) -> Candidates:
        """What the newest draft says next, as long as the answer has followed it word for word."""
        draft = self._unverified
        if draft is None:
            return NO_CANDIDATES
        n_answer = self._tracker.n_answer
        answer = self._sequence.token_ids[len(self._sequence) - n_answer :]
        if n_answer < len(draft.token_ids) and draft.token_ids[:n_answer] == tuple(answer):
            return Candidates(
                draft.token_ids[n_answer:],
                "draft",
                draft.proposals[n_answer:],
                stage=draft.branch_point.stage,
            )
        self._unverified = None
        return NO_CANDIDATES

    def add_draft(self, draft: Draft) -> None:
        """Takes a draft that ended; it replaces older ones for prefix verification."""
        if self._config.verifies_prefix:
            self._unverified = draft
        if self._config.proposes_spans:
            self._generator.add_draft(draft)

    def observe(self, verdict: Verdict) -> None:
        """Follows a commit: moves the phase on and indexes what was written."""
        block = self._tracker.blocks
        for token_id in verdict.token_ids:
            phase = self._tracker.push(token_id)
            if self._config.proposes_spans:
                thinking = phase in (Phase.THINKING, Phase.CLOSING)
                self._generator.add("thinking" if thinking else "answer", (token_id,))
        if self._tracker.blocks != block:
            # Thinking was opened again: the draft answered what was thought before.
            self._unverified = None
