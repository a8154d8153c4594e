"""Drafts in a second thread and, on a GPU, a second CUDA stream, on a forked cache.

The parent goes on with rounds of any size. On a GPU both streams share the device: the draft is
nearly free as long as the parent's steps leave it idle. On a CPU the same code runs in the thread and
both compete for the cores.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from ..records import Draft
from .base import DraftWriter, Lane, write_draft

if TYPE_CHECKING:
    from ..target import Target


class StreamLane(Lane):
    """Writes the draft on an independent target while the parent goes on."""

    name = "stream"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._error: BaseException | None = None

    def open(self, writer: DraftWriter, previous: Draft | None) -> None:
        self.writer = writer
        child = self.target.fork(writer.sequence)
        self._stream = _second_stream(child)
        self._cancelled.clear()
        self._thread = threading.Thread(
            target=self._run,
            args=(child, writer, previous, _same_context(self._stream)),
            name="ssr_hf-draft",
            daemon=True,
        )
        self._thread.start()

    def _run(
        self,
        child: Target,
        writer: DraftWriter,
        previous: Draft | None,
        context: AbstractContextManager[None],
    ) -> None:
        try:
            with context:
                write_draft(child, writer, previous, self._cancelled.is_set)
        except BaseException as error:  # re-raised in the calling thread by `close`
            self._error = error

    @property
    def is_done(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def close(self) -> None:
        if self._thread is not None:
            self._cancelled.set()
            self._thread.join()
            self._thread = None
        if self._stream is not None:
            # The child's tensors are freed only after the device has finished with them.
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._stream = None
        super().close()
        error, self._error = self._error, None
        if error is not None:
            raise error


def _second_stream(child: Target) -> torch.cuda.Stream | None:
    """A new stream that waits for the parent's; None where the model is not on a GPU."""
    device = child.model.device
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for tensor in child.tensors():
        tensor.record_stream(stream)
    return stream


def _same_context(stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
    """What the calling thread has set and a new thread has not: gradients, autocast, device.

    Everything is read now, in the calling thread, and entered later, in the new one.
    """
    inference = torch.is_inference_mode_enabled()
    kinds = ("cpu", "cuda") if stream is not None else ("cpu",)
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds
    ]

    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.inference_mode(inference))
            for kind, dtype, enabled in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if stream is not None:
                stack.enter_context(torch.cuda.device(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return context()
