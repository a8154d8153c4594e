"""Generations whose text and drafts are scripted, at the price of real ones.

Random weights write nothing worth drafting. So a logits processor dictates the text, to plain
`generate`, too, and drafts are replaced token by token by a script that is right with a given
probability. Every forward and every selection still happens; only what they say is scripted.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from lane_timing import MARKER, synchronise
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import ssr_hf
from ssr_hf.lanes import DraftWriter


@contextlib.contextmanager
def scripted_drafts(
    answer: Sequence[int], probability: float, vocab_size: int, seed: int = 0
) -> Iterator[None]:
    """Each token of a draft is that of `answer` with the given probability, else another one.

    The draft selects its token as ever and pays for it; then the token is replaced.
    """
    select = DraftWriter._select

    def scripted(writer: DraftWriter, position_logits: torch.Tensor) -> int:
        select(writer, position_logits)
        position = len(writer.token_ids)
        if position >= len(answer):
            return 0
        chance = random.Random(f"{seed} {writer.branch_point.stage} {position}").random()
        return answer[position] if chance < probability else (answer[position] + 1) % vocab_size

    with (
        mock.patch.object(DraftWriter, "_best", lambda *_: None),
        mock.patch.object(DraftWriter, "_select", scripted),
    ):
        yield


class Dictated(LogitsProcessor):
    """Leaves one token possible at each place of a text that starts at `start`."""

    def __init__(self, text: Sequence[int], start: int) -> None:
        self._text = text
        self._start = start

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        scores = torch.full_like(scores, -torch.inf)
        scores[:, self._text[input_ids.shape[1] - self._start]] = 0.0
        return scores


@dataclass(frozen=True)
class Lengths:
    """Tokens of the parts of a generation; a draft branches after `draft_budget` of `thinking`."""

    prompt: int
    thinking: int
    draft_budget: int
    answer: int


@dataclass(frozen=True)
class Dictation:
    """A prompt and what is written after it: random thinking, the marker, a random answer."""

    prompt: torch.Tensor
    thinking: tuple[int, ...]
    answer: tuple[int, ...]

    @classmethod
    def make(cls, model: PreTrainedModel, lengths: Lengths) -> Dictation:
        """Random ids above the marker's."""
        draw = random.Random(0)
        vocab_size = model.config.get_text_config().vocab_size
        n_ids = lengths.prompt + lengths.thinking + lengths.answer
        ids = [draw.randrange(MARKER + 1, vocab_size) for _ in range(n_ids)]
        prompt = torch.tensor([ids[: lengths.prompt]], device=model.device)
        rest = tuple(ids[lengths.prompt :])
        return cls(prompt, rest[: lengths.thinking], rest[lengths.thinking :])

    @property
    def new_ids(self) -> list[int]:
        """What every run writes."""
        return [*self.thinking, MARKER, *self.answer]

    def write(self, model: PreTrainedModel, **arguments: Any) -> tuple[float, Any]:
        """Seconds and output of one generation."""
        processors = LogitsProcessorList([Dictated(self.new_ids, self.prompt.shape[1])])
        synchronise(model.device)
        start = time.perf_counter()
        output = model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            max_new_tokens=len(self.new_ids),
            do_sample=False,
            logits_processor=processors,
            return_dict_in_generate=True,
            **arguments,
        )
        synchronise(model.device)
        return time.perf_counter() - start, output


def measure_generations(
    model: PreTrainedModel,
    lengths: Lengths,
    runs: Sequence[tuple[str, float]],
    deadline: float,
) -> list[dict[str, Any]]:
    """Whole generations, plain first, then with scripted drafts.

    Args:
        model (`PreTrainedModel`): The model.
        lengths (`Lengths`): Of every run.
        runs (`Sequence[tuple[str, float]]`): Lane, and probability of a right draft token.
        deadline (`float`): On the clock of `time.perf_counter`; no run begins after it.

    Returns:
        `list[dict[str, Any]]`: One row per run; `same_text` says whether it wrote what it should.
    """
    ssr_hf.enable(model)
    text = Dictation.make(model, lengths)
    Dictation.make(model, replace(lengths, thinking=8, answer=8)).write(model)
    plain_seconds, _ = text.write(model)
    rows: list[dict[str, Any]] = [
        {"lane": "plain", "p": None, "seconds": plain_seconds, "speedup": 1.0}
    ]
    for lane, probability in runs:
        row: dict[str, Any] = {"lane": lane, "p": probability}
        if time.perf_counter() > deadline:
            rows.append({**row, "skipped": "no time was left"})
            continue
        config = ssr_hf.SelfSpeculationConfig(
            end_of_thinking=[MARKER],
            draft_budget=lengths.draft_budget,
            max_draft_tokens=lengths.answer,
            lane=lane,
            suffix={"sources": ("draft",)},
            adaptive=False,
        )
        vocab_size = model.config.get_text_config().vocab_size
        with scripted_drafts(text.answer, probability, vocab_size):
            seconds, output = text.write(model, self_speculation=config)
        written = output.sequences[0, lengths.prompt :].tolist()
        rows.append({**row, **_figures(seconds, plain_seconds, output.speculation)})
        rows[-1]["same_text"] = written == text.new_ids
    return rows


def _figures(
    seconds: float, plain_seconds: float, stats: ssr_hf.SpeculationStats
) -> dict[str, float]:
    return {
        "seconds": seconds,
        "speedup": plain_seconds / seconds,
        "thinking_seconds": stats.phase_seconds("thinking"),
        "answer_seconds": stats.phase_seconds("answering"),
        "rounds": len(stats.rounds),
        "accepted_prefix": stats.accepted_prefix,
        "draft_tokens": stats.draft_tokens,
    }
