"""Streamers get what plain `generate` gives them: shapes, order, and the end exactly once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build_model
from helpers import (
    LANES,
    RecordingStreamer,
    assert_same,
    declare,
    enabled,
    generate,
    pair_tokenizer,
    run_both,
    scripted_drafts,
    true_up_to,
)
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import ssr_hf
from ssr_hf import UnsupportedError

FAMILY = "llama"
every_lane = pytest.mark.parametrize("lane", LANES)


def _run(lane: str, make: Callable[[], BaseStreamer], **arguments: Any) -> list[Any]:
    """Both ways with drafts that are true for a while; returns the two streamers."""
    declared = declare(FAMILY)
    streamers: list[BaseStreamer] = []

    def fresh() -> dict[str, Any]:
        streamers.append(make())
        return {"streamer": streamers[-1]}

    config = declared.config(lane=lane, draft_interval=4)
    with scripted_drafts(true_up_to(declared.answer, 5)):
        pair = run_both(build_model(FAMILY), declared.prompt, config, fresh=fresh, **arguments)
    assert_same(pair)
    return streamers


@pytest.mark.parametrize("recorded", [False, True])
@every_lane
def test_events_are_those_of_plain(lane: str, recorded: bool) -> None:
    """Blocks instead of tokens, rows of a draft, candidates, a missing prompt or a second end."""
    plain, fast = _run(lane, RecordingStreamer, output_scores=recorded)
    assert fast.events == plain.events
    assert fast.events[0][1] == (1, 9)
    assert {shape for _, shape, _ in fast.events[1:-1]} == {(1,)}
    assert fast.n_ends == 1


def test_tokens_are_copies_on_the_cpu() -> None:
    """Views into a growing buffer that change after they were handed out."""
    kept: list[torch.Tensor] = []

    class Keeping(RecordingStreamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            kept.append(value)

    _, fast = _run("lockstep", Keeping)
    n_events = len(fast.events) - 1
    assert [value.flatten().tolist() for value in kept[-n_events:]] == [
        ids for _, _, ids in fast.events[:-1]
    ]
    assert {value.device.type for value in kept} == {"cpu"}


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer(skip_prompt: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Text that is printed twice, cut, or not flushed at the end."""
    printed = []

    def make() -> TextStreamer:
        printed.append(capsys.readouterr().out)
        return TextStreamer(pair_tokenizer(), skip_prompt=skip_prompt)

    _run("lockstep", make)
    printed.append(capsys.readouterr().out)
    assert printed[2] == printed[1] != ""


@every_lane
def test_iterator_streamer_in_a_thread(lane: str) -> None:
    """A consumer that waits for ever, or text that arrives only when all is done."""
    declared = declare(FAMILY)
    model = build_model(FAMILY)
    expected = pair_tokenizer().decode(list(declared.new_ids))
    streamer = TextIteratorStreamer(pair_tokenizer(), skip_prompt=True, timeout=30)
    with enabled(model):
        arguments = {"self_speculation": declared.config(lane=lane), "streamer": streamer}
        worker = threading.Thread(target=generate, args=(model, declared.prompt), kwargs=arguments)
        worker.start()
        pieces = list(streamer)
        worker.join()
    assert "".join(pieces) == expected
    assert len(pieces) > 1


def test_draft_is_streamed_only_after_verification() -> None:
    """A token of the draft that is shown and then taken back."""
    declared = declare(FAMILY)
    wrong = {(token_id + 1) % 256 for token_id in declared.answer} - set(declared.new_ids)
    with scripted_drafts(lambda position, stage: min(wrong)):
        _, fast = _run_scripted(declared)
    streamed = [token_id for event in fast.events[1:-1] for token_id in event[2]]
    assert streamed == list(declared.new_ids)


def _run_scripted(declared: Any) -> list[RecordingStreamer]:
    streamers: list[RecordingStreamer] = []

    def fresh() -> dict[str, Any]:
        streamers.append(RecordingStreamer())
        return {"streamer": streamers[-1]}

    run_both(build_model(FAMILY), declared.prompt, declared.config(), fresh=fresh)
    return streamers


def test_end_is_called_on_a_refusal() -> None:
    """A consumer that waits for ever because the call was refused after the prompt was streamed."""
    declared = declare(FAMILY)
    model = build_model(FAMILY)
    streamer = RecordingStreamer()
    with enabled(model), pytest.raises(UnsupportedError):
        generate(
            model,
            declared.prompt,
            self_speculation=declared.config(),
            streamer=streamer,
            prompt_lookup_num_tokens=3,
        )
    assert streamer.n_ends == 1


def test_end_is_called_on_a_refusal_without_enable() -> None:
    """The same where the streamer is bound to the decoding function by hand."""
    declared = declare(FAMILY)
    streamer = RecordingStreamer()
    decoding = functools.partial(
        ssr_hf.self_speculative_decoding, self_speculation=declared.config(), streamer=streamer
    )
    with pytest.raises(UnsupportedError):
        generate(build_model(FAMILY), declared.prompt, custom_generate=decoding, num_beams=2)
    assert streamer.n_ends == 1


@pytest.mark.parametrize("error", [RuntimeError("full"), KeyboardInterrupt()])
def test_end_is_called_once_when_the_streamer_itself_fails(error: BaseException) -> None:
    """A second end after an exception in `put`, or none."""
    declared = declare(FAMILY)
    model = build_model(FAMILY)

    class Failing(RecordingStreamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.events) == 20:
                raise error

    streamer = Failing()
    with enabled(model), pytest.raises(type(error)):
        generate(model, declared.prompt, self_speculation=declared.config(), streamer=streamer)
    assert streamer.n_ends == 1
    assert len(streamer.events) == 21


def test_streamer_bound_without_enable() -> None:
    """The host's own extension point drops the streamer unless it is bound to the callable."""
    declared = declare(FAMILY)
    streamer = RecordingStreamer()
    plain = RecordingStreamer()
    generate(build_model(FAMILY), declared.prompt, streamer=plain)

    def decoding(*args: Any, **kwargs: Any) -> Any:
        return ssr_hf.self_speculative_decoding(
            *args, self_speculation=declared.config(), streamer=streamer, **kwargs
        )

    generate(build_model(FAMILY), declared.prompt, custom_generate=decoding)
    # The prompt is the host's to stream.
    assert streamer.events == plain.events[1:]
