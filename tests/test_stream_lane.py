"""The stream lane: what it drafts, what its thread takes over, cancellation and failures."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from families import build_model
from helpers import (
    RecordingStreamer,
    assert_same,
    collected_drafts,
    declare,
    run_both,
    run_fast,
)
from stream_watch import before_forward, draft_threads, in_draft, wait_for_draft
from transformers import DynamicCache

STAGES = {"draft_budget": 3, "draft_interval": 5, "max_draft_tokens": 4}
# Layers that share and grow, slide, copy a state, and do both in one layer.
KINDS = ("llama", "gemma3", "qwen3_5", "falcon_h1")

every_kind = pytest.mark.parametrize("family", KINDS)


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    """Whatever a test does, its drafts have ended when `generate` returns or raises."""
    yield
    assert not draft_threads()


class DraftForwards:
    """Counts the forwards of drafts; the `fails_at`-th one raises."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.count = 0
        self._fails_at = fails_at

    def __call__(self) -> None:
        if not in_draft():
            wait_for_draft()
            return
        self.count += 1
        if self.count == self._fails_at:
            raise RuntimeError("the draft failed")


@pytest.mark.parametrize("seed", range(3))
@every_kind
def test_drafts_are_those_of_the_sequential_lane(family: str, seed: int) -> None:
    """A fork that sees what the parent wrote after it, or a draft that writes into the parent."""
    declared = declare(family, length=9 + seed)
    model = build_model(family)
    drafts = {}
    for lane in ("sequential", "stream"):
        with collected_drafts() as drafts[lane], before_forward(model, wait_for_draft):
            pair = run_both(model, declared.prompt, declared.config(lane=lane, **STAGES))
        assert_same(pair)
    assert len(drafts["stream"]) >= 3
    assert drafts["stream"] == drafts["sequential"]


def thread_settings() -> dict[str, Any]:
    return {
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.mark.parametrize(
    "context",
    [
        contextlib.nullcontext,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["plain", "inference", "autocast"],
)
def test_the_thread_takes_over_the_settings_of_its_caller(context: Callable[[], Any]) -> None:
    """Modes are thread-local: a draft that records gradients, or runs in another dtype."""
    declared = declare("llama")
    model = build_model("llama")
    seen: dict[bool, dict[str, Any]] = {}

    def look() -> None:
        seen[in_draft()] = thread_settings()
        wait_for_draft()

    with context(), before_forward(model, look):
        pair = run_both(model, declared.prompt, declared.config(lane="stream"))
    assert pair.stats.drafts[0].n_tokens > 1
    assert pair.fast.sequences.tolist() == pair.plain.sequences.tolist()
    assert not seen[True]["gradients"]
    assert seen[True] == seen[False]


def test_weights_that_autocast_has_cast_stay_with_the_parent() -> None:
    """All threads share their cache: a draft that empties it, or reads what is still being cast."""
    declared = declare("llama")
    model = build_model("llama")
    draft_uses_cache = set()

    def switch_off() -> None:
        # As some models do in their forward.
        with torch.autocast("cpu", enabled=False):
            if in_draft():
                draft_uses_cache.add(torch.is_autocast_cache_enabled())

    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        mock.patch.object(torch, "clear_autocast_cache") as clears,
        before_forward(model, switch_off),
    ):
        run_fast(model, declared.prompt, declared.config(lane="stream"))
    assert draft_uses_cache == {False}
    clears.assert_not_called()


@every_kind
def test_hidden_states_are_those_of_the_parent(family: str) -> None:
    """The host collects hidden states by hooks on the shared modules: a draft's must not get in."""
    declared = declare(family)
    config = declared.config(lane="stream", max_draft_tokens=64)
    pair = run_both(build_model(family), declared.prompt, config, output_hidden_states=True)
    assert_same(pair)


@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_a_failing_draft_is_raised_in_the_calling_thread(fails_at: int) -> None:
    """A draft that dies unseen: the run would look as if drafts were merely slow."""
    declared = declare("llama")
    model = build_model("llama")
    cache = DynamicCache(config=model.config)
    config = declared.config(lane="stream", reuse="prefix")
    forwards = DraftForwards(fails_at)
    with before_forward(model, forwards), pytest.raises(RuntimeError, match="the draft failed"):
        run_fast(model, declared.prompt, config, cache=cache)
    assert forwards.count == fails_at
    assert {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"}
    assert len({layer.keys.shape for layer in cache.layers}) == 1


class FailingStreamer(RecordingStreamer):
    """Raises after so many tokens."""

    def __init__(self, n_tokens: int, error: BaseException) -> None:
        super().__init__()
        self._n_tokens, self._error = n_tokens, error

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.events) > self._n_tokens:
            raise self._error


@pytest.mark.parametrize("fails_at", [None, 2])
def test_the_error_of_the_caller_comes_first(fails_at: int | None) -> None:
    """Cleaning up must not put a draft's error in the place of the caller's, nor stop half-way."""
    declared = declare("llama")
    model = build_model("llama")
    cache = DynamicCache(config=model.config)
    streamer = FailingStreamer(6, KeyboardInterrupt())
    # The draft branches after 5 tokens and has failed when the streamer is given the next one.
    with before_forward(model, DraftForwards(fails_at)), pytest.raises(KeyboardInterrupt):
        run_fast(
            model, declared.prompt, declared.config(lane="stream"), streamer=streamer, cache=cache
        )
    assert {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"}
    assert streamer.n_ends == 1


def test_a_stale_draft_ends_within_one_step() -> None:
    """Thinking ends while a long draft is written: waiting for its end would stall the answer."""
    declared = declare("llama")
    model = build_model("llama")
    stopped = threading.Event()
    n_forwards = 0
    join = threading.Thread.join

    def stop_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        stopped.set()
        join(thread, timeout)

    def be_slow() -> None:
        nonlocal n_forwards
        n_forwards += in_draft()
        if in_draft() and n_forwards == 3:
            assert stopped.wait(timeout=60)

    config = declared.config(lane="stream", reuse="prefix")
    with (
        before_forward(model, be_slow),
        mock.patch.object(threading.Thread, "join", stop_and_join),
    ):
        pair = run_both(model, declared.prompt, config)
    assert_same(pair)
    assert n_forwards == 3
    assert [(draft.status, draft.n_tokens) for draft in pair.stats.drafts] == [("cut", 3)]


def test_no_thread_is_left_behind_when_one_cannot_start() -> None:
    """A close that waits for a thread which never ran."""
    declared = declare("llama")
    refusal = RuntimeError("can't start new thread")
    with (
        mock.patch.object(threading.Thread, "start", side_effect=refusal),
        pytest.raises(RuntimeError, match="can't start new thread"),
    ):
        run_fast(build_model("llama"), declared.prompt, declared.config(lane="stream"))
