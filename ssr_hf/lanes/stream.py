"""Drafts in a second thread and, on a GPU, a second CUDA stream, on a forked cache.

The parent goes on with rounds of any size. On a GPU both streams share the device: the draft is
nearly free as long as the parent's steps leave it idle. On a CPU the same code runs in the thread
and both compete for the cores.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from ..records import Draft, DraftStatus
from .base import DraftWriter, Lane, write_draft
from .concurrency import STREAM_DEVICES, two_thread_support

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..cache.support import Support
    from ..target import Target


class StreamLane(Lane):
    """Writes the draft on an independent target while the parent goes on.

    What goes wrong in a draft, other than that memory runs out, is raised by `collect`, in the
    thread of the parent.
    """

    name = "stream"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._side: SideStream | None = None
        self._error: BaseException | None = None

    @classmethod
    def support(cls, model: PreTrainedModel) -> Support:
        return two_thread_support(model)

    def _begin(self, writer: DraftWriter, previous: Draft | None) -> None:
        self._cancelled.clear()
        self._error = None
        side = self._side = SideStream(self.target.model.device)
        with side.forking():
            child = self.target.fork(writer.sequence)
        side.share((*child.tensors(), writer.sequence.ids))
        thread = threading.Thread(
            target=self._run,
            args=(child, writer, previous, side, _settings_of_caller()),
            name="ssr_hf-draft",
            daemon=True,
        )
        thread.start()
        self._thread = thread

    def _run(
        self,
        child: Target,
        writer: DraftWriter,
        previous: Draft | None,
        side: SideStream,
        settings: AbstractContextManager[None],
    ) -> None:
        try:
            with settings, side.running():
                write_draft(child, writer, previous, self._cancelled.is_set)
        except BaseException as error:  # raised in the calling thread by `collect`
            self._error = error

    @property
    def is_done(self) -> bool:
        return self.exhausted or (self._thread is not None and not self._thread.is_alive())

    def collect(self, fallback: DraftStatus) -> Draft:
        side = self._side
        draft = super().collect(fallback)
        error, self._error = self._error, None
        if isinstance(error, torch.OutOfMemoryError):
            self.exhausted = True
        elif error is not None:
            raise error
        if side is not None:
            side.hand_back(_proposal_tensors(draft))
        return draft

    def close(self) -> None:
        if self._thread is not None:
            self._cancelled.set()
            self._thread.join()
            self._thread = None
        if self._side is not None:
            self._side.join()
            self._side = None
        super().close()


class SideStream:
    """Where the kernels of a draft run: the second stream of a CUDA device. A CPU has no streams.

    Memory of a dropped tensor goes to the next tensor of the stream that made it. So whatever one
    stream makes and the other reads is recorded on its reader, too, and the streams wait for each
    other wherever one of them reads what the other has written.

    Args:
        device (`torch.device`): The device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = _second_stream(device) if device.type == "cuda" else None

    @contextmanager
    def forking(self) -> Iterator[None]:
        """While the fork is made, in the second stream: what it makes belongs to the draft.

        The parent waits for the fork, which reads tensors that the parent is going to overwrite.
        """
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        try:
            with self.running():
                yield
        finally:
            caller.wait_stream(self._stream)

    def running(self) -> AbstractContextManager[object]:
        """While kernels go to the second stream of the device."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes tensors of the parent that the draft reads, too, and may be the last to hold."""
        if self._stream is not None:
            _record(tensors, self._stream)

    def join(self) -> None:
        """Makes the calling thread's stream wait for all that the draft has started."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def hand_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gives tensors of the draft to the calling thread's stream, after `join`."""
        if self._stream is not None:
            _record(tensors, torch.cuda.current_stream(self._stream.device))


def _record(tensors: Iterable[torch.Tensor], stream: torch.cuda.Stream) -> None:
    for tensor in tensors:
        tensor.record_stream(stream)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device for good: each one keeps memory that no other can use."""
    return torch.cuda.Stream(device)


def _proposal_tensors(draft: Draft) -> Iterator[torch.Tensor]:
    """What the tokens of a sampled draft were drawn from."""
    for proposal in draft.proposals:
        yield proposal.probabilities
        if proposal.support is not None:
            yield proposal.support


def _settings_of_caller() -> AbstractContextManager[None]:
    """What the calling thread has set and a new thread has not: inference mode and autocast.

    Everything is read now, in the calling thread, and entered later, in the new one.
    """
    inference = torch.is_inference_mode_enabled()
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in STREAM_DEVICES
    ]

    @contextmanager
    def settings() -> Iterator[None]:
        # `inference_mode(False)` switches gradients on, so it comes first.
        with torch.inference_mode(inference), torch.no_grad():
            # All threads share autocast's cache of weights. One stream must not read what the other
            # is still casting, and leaving the outermost `torch.autocast` would empty it. These
            # flags and the nesting end with the thread.
            torch.set_autocast_cache_enabled(False)
            torch.autocast_increment_nesting()
            for kind, dtype, enabled in autocast:
                torch.set_autocast_dtype(kind, dtype)
                torch.set_autocast_enabled(kind, enabled)
            yield

    return settings()
