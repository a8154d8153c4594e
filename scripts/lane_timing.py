"""Drives one lane of a model directly and measures it: seconds and bytes, on any device.

Used by `gpu_check.py`. A round here is what the decoding loop does for greedy text: one forward,
one argmax that is read back (so the stream of the caller is synchronised), one commit. Seconds are
wall clock, medians after a warm-up.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from ssr_hf import compat
from ssr_hf.cache.growth import MINIMUM_SPARE, SPARE_SHARE, GrowingLayer
from ssr_hf.lanes import DraftRules, DraftWriter, Lane
from ssr_hf.records import NO_CANDIDATES, BranchPoint, Draft, DraftStatus
from ssr_hf.target import Target
from ssr_hf.tokens import TokenSequence

WARM_UP_ROUNDS = 4
MARKER = 1


class ForkingTarget(Target):
    """A target that remembers its last fork, whose cache takes memory, too."""

    last_fork: Target | None = None

    def fork(self, sequence: TokenSequence) -> Target:
        self.last_fork = super().fork(sequence)
        return self.last_fork


class Session:
    """A parent after a random prompt, driven round by round.

    Args:
        model (`PreTrainedModel`): The model.
        length (`int`): Tokens of the prompt.
        seed (`int`): Of the prompt.
    """

    def __init__(self, model: PreTrainedModel, length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        vocab_size = model.config.get_text_config().vocab_size
        prompt = torch.randint(2, vocab_size, (1, length), generator=generator).to(model.device)
        config = model.generation_config
        self.sequence = TokenSequence(prompt)
        kwargs = compat.fresh_kwargs(model, prompt, config)
        self.target = ForkingTarget(model, self.sequence, kwargs)
        self._commit(self.target.prefill(config))

    @property
    def new_ids(self) -> tuple[int, ...]:
        """What the parent wrote."""
        return tuple(self.sequence.token_ids[self.sequence.prompt_length :])

    def round(self, lane: Lane | None = None) -> None:
        """One token of the parent; an open draft of the lane may ride along."""
        forward = self.target.forward if lane is None else lane.forward
        self._commit(forward(() if lane is None else NO_CANDIDATES))

    def verify(self, candidate_ids: tuple[int, ...]) -> None:
        """Judges candidates, keeps none of them, and commits one token."""
        self._commit(self.target.forward(candidate_ids))

    def _commit(self, logits: torch.Tensor) -> None:
        selected: list[int] = logits[0].argmax(dim=-1).tolist()
        self.sequence.append(selected[:1])
        self.target.keep(1)

    def writer(self, n_tokens: int) -> DraftWriter:
        """A draft of `n_tokens` that branches here."""
        branch_point = BranchPoint(len(self.new_ids), len(self.sequence), 0)
        rules = DraftRules((MARKER,), frozenset(), LogitsProcessorList())
        return DraftWriter(branch_point, self.sequence, rules, n_tokens)

    def run_draft(
        self, lane: Lane, n_tokens: int, after_round: Callable[[], None] = lambda: None
    ) -> Draft:
        """Opens a draft, goes on until it is written, and collects it."""
        lane.open(self.writer(n_tokens), None)
        while not lane.is_done:
            self.round(lane)
            after_round()
        return lane.collect(DraftStatus.CUT)


def synchronise(device: torch.device) -> None:
    """Waits until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of `run`, including what it leaves to the device."""
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return 1e3 * (time.perf_counter() - start)


@dataclass(frozen=True)
class LaneCost:
    """What drafts of one lane cost.

    Args:
        step_ms (`float`, *optional*): Median round of the parent while a draft is written; None
            where the parent waits.
        draft_ms_per_token (`float`): Wall clock from opening to collecting, per token of the draft.
        extra_ms_per_token (`float`): The same, less what the parent's rounds cost without a draft.
    """

    step_ms: float | None
    draft_ms_per_token: float
    extra_ms_per_token: float

    def overhead(self, plain_ms: float, draft_tokens: int, thinking_tokens: int) -> float:
        """One draft in percent of the time of a plain chain of thought."""
        return 100 * self.extra_ms_per_token * draft_tokens / (plain_ms * thinking_tokens)


@torch.no_grad()
def measure_step(model: PreTrainedModel, length: int, n_steps: int) -> float:
    """Median milliseconds of a plain step on `length` tokens and more."""
    session = Session(model, length)
    times = [timed(session.round, model.device) for _ in range(WARM_UP_ROUNDS + n_steps)]
    return statistics.median(times[WARM_UP_ROUNDS:])


@torch.no_grad()
def measure_lane(
    model: PreTrainedModel, lane_type: type[Lane], length: int, n_tokens: int, plain_ms: float
) -> LaneCost:
    """Times one draft of `n_tokens` after a short one that warms up."""
    session = Session(model, length)
    lane = lane_type(session.target)
    session.run_draft(lane, WARM_UP_ROUNDS)
    marks: list[float] = []
    draft_ms = timed(
        lambda: session.run_draft(lane, n_tokens, lambda: marks.append(1e3 * time.perf_counter())),
        model.device,
    )
    # The first round is not among them: it cannot be told from the opening of the draft.
    rounds = [after - before for before, after in itertools.pairwise(marks)]
    step_ms = statistics.median(rounds) if rounds else None
    extra_ms = draft_ms - sum(rounds)
    if step_ms is not None:
        extra_ms += len(rounds) * step_ms - len(marks) * plain_ms
    return LaneCost(step_ms, draft_ms / n_tokens, extra_ms / n_tokens)


@torch.no_grad()
def measure_verification(
    model: PreTrainedModel, length: int, blocks: Sequence[int], repeats: int
) -> dict[int, float]:
    """Median milliseconds of a round that feeds a block of so many tokens, all of them rejected."""
    session = Session(model, length)
    times = {}
    for n_tokens in blocks:
        candidate_ids = (MARKER,) * (n_tokens - 1)
        own = [
            timed(lambda ids=candidate_ids: session.verify(ids), model.device)
            for _ in range(repeats + 1)
        ]
        times[n_tokens] = statistics.median(own[1:])
    return times


@torch.no_grad()
def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values that one token adds to the layers that keep every token."""
    layers = Session(model, length=2).target.cache.layers
    growing = (layer for layer in layers if isinstance(layer, GrowingLayer))
    held = (tensor for layer in growing for tensor in (layer.keys, layer.values))
    return sum(t.shape[1] * t.shape[-1] * t.element_size() for t in held)


def row_bytes(kv_bytes: int, n_tokens: int) -> int:
    """Most bytes that the cache of one text of `n_tokens` tokens takes.

    The formula is `kv_bytes * (n + max(128, n / 4))`: buffers grow by a quarter, by 128 tokens at
    least. `kv_bytes` is `2 * layers * kv_heads * head_dim * bytes per number`.

    A draft is a second text. For a draft of D tokens that branches after L tokens this, with
    `n = L + D`, is the most that it adds to a run without drafts. Rows of the lockstep lane that go
    at their own pace leave holes: there `n = L + 2 D + T`, with T tokens thought meanwhile. Sliding
    layers add their window and recurrent layers their state, whatever the length. In the stream
    lane the first L tokens are shared until the draft writes its first. Sampled drafts (rejection
    sampling) keep distributions besides: at most 4 bytes per token of the draft and entry of the
    vocabulary.
    """
    return kv_bytes * (n_tokens + max(MINIMUM_SPARE, n_tokens // SPARE_SHARE))


def held_bytes(targets: Iterable[Target]) -> int:
    """Bytes of the memory that caches hold, each piece counted once."""
    storages = {}
    for target in targets:
        for tensor in target.tensors():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@torch.no_grad()
def measure_peak(
    model: PreTrainedModel, lane_type: type[Lane] | None, length: int, n_tokens: int
) -> int:
    """Peak bytes beside the weights while `n_tokens` are written, with or without a draft.

    On a CUDA device this is what the allocator saw; elsewhere the largest sum of all caches between
    two rounds.
    """
    device = model.device
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    session = Session(model, length)
    seen = [0]

    def look() -> None:
        fork = session.target.last_fork
        if device.type != "cuda":
            seen.append(held_bytes([session.target] if fork is None else [session.target, fork]))

    if lane_type is None:
        for _ in range(n_tokens):
            session.round()
            look()
    else:
        session.run_draft(lane_type(session.target), n_tokens, look)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - before
    return max(seen)
