"""Checks that lanes change nothing, on models with random weights and on any device.

Used by `gpu_check.py`. The oracle is plain `generate`, and for drafts the sequential lane.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from lane_timing import Session
from scripted_text import scripted_drafts
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import ssr_hf
from ssr_hf.cache import growth
from ssr_hf.lanes.sequential import SequentialLane
from ssr_hf.lanes.stream import StreamLane

NO_SPECIAL_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
# Weights so large that a greedy text does not hang on the last digit of a logit.
SMALL: dict[str, Any] = {
    **NO_SPECIAL_IDS,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("Qwen3Config", {"head_dim": 32}),
    "sliding": ("MistralConfig", {"sliding_window": 16}),
    "sliding+full": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "conv+full": (
        "Lfm2Config",
        {"block_multiple_of": 16, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "recurrent+full": (
        "Qwen3_5TextConfig",
        {
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
}
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 1.0}
GREEDY = {"do_sample": False}
DRAFT_THREAD = "ssr_hf-draft"
# Device cycles for which the first kernels of a draft wait: some tenths of a second.
HOLD_CYCLES = 400_000_000
HOLD_SECONDS = 0.02


@dataclass(frozen=True)
class Check:
    """One thing that was checked; `detail` says what was found where it does not hold."""

    name: str
    passed: bool
    detail: str = ""


def use_exact_float32() -> None:
    """Switches TF32 off, which rounds convolutions to 10 bits unless it is told not to."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def build(
    config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    attention: str | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A model with random weights, made on the device itself."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
    return model.eval()


def build_small(family: str, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """A small model in float32 with the kinds of layers that `family` names."""
    config_class, changes = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**SMALL, **changes})
    return build(config, device, torch.float32, seed=seed)


@dataclass(frozen=True)
class Declared:
    """A prompt `[1, T]`, what plain `generate` writes, and where its marker stands."""

    prompt: torch.Tensor
    new_ids: list[int]
    n_thinking: int

    def config(self, lane: str) -> ssr_hf.SelfSpeculationConfig:
        """Short drafts at short intervals, so that many are bootstrapped."""
        return ssr_hf.SelfSpeculationConfig(
            end_of_thinking=[self.new_ids[self.n_thinking]],
            draft_budget=3,
            draft_interval=11,
            max_draft_tokens=16,
            lane=lane,
            adaptive=False,
        )


def new_tokens(
    model: PreTrainedModel, prompt: torch.Tensor, seed: int, **arguments: Any
) -> list[int]:
    """What `generate` writes from `seed`."""
    torch.manual_seed(seed)
    mask = torch.ones_like(prompt)
    sequences = model.generate(prompt, attention_mask=mask, **arguments)
    ids: list[int] = sequences[0, prompt.shape[1] :].tolist()
    return ids


def declare(model: PreTrainedModel, n_tokens: int, seed: int, **selection: Any) -> Declared:
    """Names a token of the plain text as the marker: the last new one before its middle."""
    for attempt in range(50):
        generator = torch.Generator().manual_seed(1000 * seed + attempt)
        vocab_size = model.config.get_text_config().vocab_size
        prompt = torch.randint(1, vocab_size, (1, 9), generator=generator).to(model.device)
        ids = new_tokens(model, prompt, seed, max_new_tokens=n_tokens, **selection)
        for place in range(n_tokens // 2, n_tokens // 4, -1):
            if ids[place] not in ids[:place]:
                return Declared(prompt, ids, place)
    raise LookupError("no text has a new token there: other weights are needed")


def check_lossless(
    name: str, model: PreTrainedModel, lanes: Sequence[str], n_tokens: int, seed: int
) -> Iterator[Check]:
    """Every lane, greedy and sampled, beside plain `generate`."""
    ssr_hf.enable(model)
    for selected, selection in (("greedy", GREEDY), ("sampled", SAMPLED)):
        declared = declare(model, n_tokens, seed, **selection)
        answer = declared.new_ids[declared.n_thinking + 1 :]
        for lane in lanes:
            arguments = {"max_new_tokens": n_tokens, **selection}
            with (
                scripted_drafts(answer, 0.85, SMALL["vocab_size"], seed),
                caller_stream(model.device),
            ):
                ids = new_tokens(
                    model,
                    declared.prompt,
                    seed,
                    self_speculation=declared.config(lane),
                    **arguments,
                )
            yield compare(f"lossless: {name}, {selected}, {lane}", declared.new_ids, ids)


def compare(name: str, expected: Sequence[int], found: Sequence[int]) -> Check:
    """Whether two texts are the same, and where they part."""
    if list(expected) == list(found):
        return Check(name, passed=True)
    pairs = enumerate(zip(expected, found, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), min(len(expected), len(found)))
    return Check(name, passed=False, detail=f"{at} of {len(expected)} tokens are the same")


@contextlib.contextmanager
def caller_stream(device: torch.device) -> Iterator[None]:
    """A stream that is not the default one, as a caller may have; a CPU has none."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    before = torch.cuda.current_stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


@contextlib.contextmanager
def held_up_drafts(model: PreTrainedModel) -> Iterator[None]:
    """Holds up the first forward of each draft, so that the parent gets far ahead of it."""
    held: set[int | None] = set()

    def hold(*_: object) -> None:
        thread = threading.current_thread()
        if thread.name != DRAFT_THREAD or thread.ident in held:
            return
        held.add(thread.ident)
        if model.device.type == "cuda":
            torch.cuda._sleep(HOLD_CYCLES)
        else:
            time.sleep(HOLD_SECONDS)

    handle = model.register_forward_pre_hook(hold)
    try:
        yield
    finally:
        handle.remove()


def overwrite_freed_memory(device: torch.device) -> None:
    """Takes what the allocator holds as free for this stream, and fills it with NaN."""
    taken = [
        torch.full((n_numbers,), float("nan"), device=device)
        for n_numbers in (128, 512, 2048, 8192)
        for _ in range(16)
    ]
    del taken


@torch.no_grad()
def check_stream(
    name: str, model: PreTrainedModel, length: int, n_tokens: int, seed: int
) -> Iterator[Check]:
    """A draft of the stream lane beside the sequential lane's, while everything is against it."""
    reference = Session(model, length, seed)
    reference.round()
    expected = reference.run_draft(SequentialLane(reference.target), n_tokens)
    # With little spare room the parent leaves the buffers that the draft reads; else it stays.
    places = (
        ("default stream", contextlib.nullcontext(), growth.MINIMUM_SPARE),
        ("own stream", caller_stream(model.device), 2),
    )
    for place, context, spare in places:
        with (
            context,
            mock.patch.object(growth, "MINIMUM_SPARE", spare),
            held_up_drafts(model),
        ):
            session = Session(model, length, seed)
            session.round()  # takes the buffers that the fork is going to share
            lane = StreamLane(session.target)
            draft = session.run_draft(lane, n_tokens, lambda: overwrite_freed_memory(model.device))
        while len(reference.new_ids) < len(session.new_ids):
            reference.round()
        title = f"stream lane: {name}, seed {seed}, {place}"
        yield compare(f"{title}, draft", expected.token_ids, draft.token_ids)
        parent_ids = reference.new_ids[: len(session.new_ids)]
        yield compare(f"{title}, parent", parent_ids, session.new_ids)
