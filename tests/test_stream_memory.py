"""The stream lane: memory that crosses threads and streams, checked on a CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from families import build_model
from helpers import PROMPT_LENGTH, declare, run_fast
from stream_watch import DRAFT, PARENT, StreamWatch, before_forward, wait_for_draft

from ssr_hf.cache import growth
from ssr_hf.lanes import stream
from ssr_hf.lanes.stream import SideStream

STAGES = {"draft_budget": 3, "draft_interval": 5, "max_draft_tokens": 4}
# Layers that share and grow, slide, copy a state, and do both in one layer.
KINDS = ("llama", "gemma3", "qwen3_5", "falcon_h1")


@pytest.mark.parametrize("spare", [2, 128])
@pytest.mark.parametrize("family", KINDS)
def test_memory_that_crosses_streams_is_handed_over(family: str, spare: int) -> None:
    """On a GPU: memory reused while the other stream still reads it, or read before it is written.

    A `spare` of 2 makes the parent leave the buffers that the draft still reads.
    """
    declared = declare(family)
    model = build_model(family)
    watch = StreamWatch([*model.parameters(), *model.buffers()])
    with (
        mock.patch.object(stream, "SideStream", watch.side),
        mock.patch.object(growth, "MINIMUM_SPARE", spare),
        watch.watching(PARENT),
    ):
        fast = run_fast(model, declared.prompt, declared.config(lane="stream", **STAGES))
    assert fast.sequences[0, PROMPT_LENGTH:].tolist() == list(declared.new_ids)
    assert watch.n_shared > 0
    assert not watch.violations


def test_what_sampled_drafts_were_drawn_from_is_handed_back() -> None:
    """The parent judges a draft by tensors of the second stream, and drops them last."""
    declared = declare("llama", do_sample=True)
    model = build_model("llama")
    watch = StreamWatch([*model.parameters(), *model.buffers()])
    config = declared.config(lane="stream", acceptance="rejection_sampling", max_draft_tokens=4)
    with (
        mock.patch.object(stream, "SideStream", watch.side),
        before_forward(model, wait_for_draft),
        watch.watching(PARENT),
    ):
        run_fast(model, declared.prompt, config, do_sample=True)
    assert watch.n_handed_back > 0
    assert not watch.violations


def test_watch_sees_memory_that_was_not_handed_over() -> None:
    """A watch that never complains would prove nothing in the tests above."""
    watch = StreamWatch([])
    with watch.watching(PARENT):
        mine, shared = torch.zeros(8), torch.zeros(8)
    watch.side(torch.device("cpu")).share([shared[:4]])
    with watch.watching(DRAFT):
        shared[:4].sum()
        assert not watch.violations
        mine.sum()
        assert len(watch.violations) == 1
        shared[:1].fill_(1)
    with watch.watching(PARENT):
        shared[4:].fill_(1)
        assert len(watch.violations) == 1
        shared[3:].fill_(1)
        assert len(watch.violations) == 2
        shared.sum()
    assert len(watch.violations) == 3


class FakeStream:
    """A CUDA stream that writes down what happens on it."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"leave {self.name}")


def test_streams_wait_for_each_other() -> None:
    """A fork that reads, a parent that writes, a close that frees before the other is done."""
    log: list[str] = []
    caller, second = FakeStream("caller", log), FakeStream("second", log)
    tensor = mock.Mock()
    with (
        mock.patch.object(stream, "_second_stream", return_value=second),
        mock.patch.object(torch.cuda, "current_stream", return_value=caller),
        mock.patch.object(torch.cuda, "stream", lambda entered: entered),
    ):
        side = SideStream(torch.device("cuda", 0))
        with side.forking():
            log.append("fork")
        side.share([tensor])
        tensor.record_stream.assert_called_once_with(second)
        side.join()
        side.hand_back([tensor])
        tensor.record_stream.assert_called_with(caller)
    assert log == [
        "second waits for caller",
        "enter second",
        "fork",
        "leave second",
        "caller waits for second",
        "caller waits for second",
    ]
