"""The commit rule: what turns the logits of a round into emitted tokens.

Positions are taken one by one, each doing exactly what one step of plain `generate` does: run the
logits processors on the true prefix, select the token, append it, ask the stopping criteria, hand
it to the streamer. It stops at the first token that differs from the candidate. Processors,
criteria, streamer and the random generator therefore see what plain `generate` shows them, in the
same order, and nothing that was rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import compat
from .records import Candidates, Verdict

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    from .acceptance import Proposal
    from .tokens import TokenSequence


class Committer:
    """Applies the commit rule to one generation.

    Args:
        sequence (`TokenSequence`): The text that grows.
        logits_processor (`LogitsProcessorList`): Called once per emitted token, in order.
        stopping_criteria (`StoppingCriteriaList`): Asked once per emitted token, in order.
        generation_config (`GenerationConfig`): Greedy or sampled; which outputs are recorded.
        streamer (`BaseStreamer`, *optional*): Gets every emitted token.
    """

    def __init__(
        self,
        sequence: TokenSequence,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self.sequence = sequence
        self.finished = False
        self._logits_processor = logits_processor
        self._stopping_criteria = stopping_criteria
        self._streamer = streamer
        self._do_sample = bool(generation_config.do_sample)
        recorded = generation_config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = (
            () if recorded and generation_config.output_scores else None
        )
        self.logits: tuple[torch.Tensor, ...] | None = (
            () if recorded and generation_config.output_logits else None
        )
        self._simple_end = self._find_simple_end()
        self._shows_every_token = (
            self.scores is not None
            or self.logits is not None
            or any(
                type(processor) not in compat.SIDE_EFFECT_FREE_PROCESSORS
                for processor in logits_processor
            )
        )

    def _find_simple_end(self) -> tuple[frozenset[int], int] | None:
        """Criteria as plain numbers, where committing a block at once is provably the same."""
        stepwise = self._do_sample or len(self._logits_processor) > 0
        if stepwise or self.scores is not None or self.logits is not None:
            return None
        return compat.end_and_length_only(self._stopping_criteria)

    def commit(self, target_logits: torch.Tensor, candidates: Candidates) -> Verdict:
        """Emits the accepted candidates and one token of the model's own.

        Position `i` of `target_logits` selects the token that stands where candidate `i` stands;
        the last position selects the token after all candidates.

        Args:
            target_logits (`torch.Tensor` of shape `(1, m + 1, V)`): From the round's forward.
            candidates (`Candidates`): The `m` tokens that were offered.

        Returns:
            `Verdict`: What was committed.
        """
        if self._simple_end is not None:
            verdict = self._commit_greedy_block(target_logits, candidates, *self._simple_end)
        else:
            verdict = self._commit_stepwise(target_logits, candidates)
        self.finished = verdict.finished
        return verdict

    def adopt(self, token_ids: tuple[int, ...], target_logits: torch.Tensor) -> Verdict:
        """Emits tokens that the model did not select (lossy); the streamer gets them at once.

        Processors are called where they keep a state or where scores are recorded, but they do not
        choose.

        Args:
            token_ids (`tuple[int, ...]`): The `n` tokens.
            target_logits (`torch.Tensor` of shape `(1, n, V)`): Row `i` belongs to token `i`.

        Returns:
            `Verdict`: What was committed: all tokens, unless a criterion stopped before.
        """
        n_committed = 0
        for position, token_id in enumerate(token_ids):
            if self._shows_every_token:
                self._process(target_logits[:, position])
            self.sequence.append((token_id,))
            n_committed += 1
            self.finished = bool(self._stopping_criteria(self.sequence.ids, self.scores).all())
            if self.finished:
                break
        committed = token_ids[:n_committed]
        if self._streamer is not None:
            self._streamer.put(torch.tensor(committed, device="cpu"))
        return Verdict(committed, n_committed, self.finished)

    def _commit_stepwise(self, target_logits: torch.Tensor, candidates: Candidates) -> Verdict:
        offered = candidates.token_ids
        committed: list[int] = []
        finished = False
        for position in range(len(offered) + 1):
            proposal = candidates.proposal(position)
            token_id, finished = self._step(target_logits[:, position], proposal)
            committed.append(token_id)
            matches = position < len(offered) and token_id == offered[position]
            if finished or not matches:
                break
        n_accepted = _count_matches(committed, offered)
        return Verdict(tuple(committed), n_accepted, finished)

    def _step(self, position_logits: torch.Tensor, proposal: Proposal | None) -> tuple[int, bool]:
        """One step of plain `generate` from logits `[1, V]`; it judges a sampled candidate."""
        sequence = self.sequence
        next_scores = self._process(position_logits)
        if self._do_sample:
            probabilities = torch.nn.functional.softmax(next_scores, dim=-1)
            if proposal is not None:
                probabilities = proposal.judge(probabilities)
            next_token = torch.multinomial(probabilities, num_samples=1).squeeze(1)
        else:
            next_token = torch.argmax(next_scores, dim=-1)
        token_id = int(next_token.item())
        sequence.append((token_id,))
        finished = bool(self._stopping_criteria(sequence.ids, self.scores).all())
        if self._streamer is not None:
            self._streamer.put(next_token.cpu())
        return token_id, finished

    def _process(self, position_logits: torch.Tensor) -> torch.Tensor:
        """Processed scores `[1, V]` of the next token, recorded if asked for."""
        sequence = self.sequence
        next_logits = position_logits.to(copy=True, dtype=torch.float32, device=sequence.device)
        next_scores = self._logits_processor(sequence.ids, next_logits)
        if self.scores is not None:
            self.scores += (next_scores,)
        if self.logits is not None:
            self.logits += (next_logits,)
        return next_scores

    def _commit_greedy_block(
        self,
        target_logits: torch.Tensor,
        candidates: Candidates,
        eos_token_ids: frozenset[int],
        max_length: int,
    ) -> Verdict:
        """The same as `_commit_stepwise` where nothing has to be called for a single step."""
        offered = candidates.token_ids
        selected: list[int] = target_logits[0].argmax(dim=-1).tolist()
        room = max_length - len(self.sequence)
        committed: list[int] = []
        finished = False
        for position, token_id in enumerate(selected):
            committed.append(token_id)
            finished = token_id in eos_token_ids or len(committed) >= room
            matches = position < len(offered) and token_id == offered[position]
            if finished or not matches:
                break
        self.sequence.append(committed)
        if self._streamer is not None:
            for token_id in committed:
                self._streamer.put(torch.tensor([token_id], device="cpu"))
        n_accepted = _count_matches(committed, offered)
        return Verdict(tuple(committed), n_accepted, finished)


def _count_matches(committed: list[int], offered: tuple[int, ...]) -> int:
    """Length of the common prefix: candidates that were committed."""
    n_matches = 0
    for token_id, candidate in zip(committed, offered, strict=False):
        if token_id != candidate:
            break
        n_matches += 1
    return n_matches
