"""The threads of drafts, and a watch on what two CUDA streams may do to each other's memory.

The watch needs no GPU. A dispatch mode in each thread sees every operation of parent and draft.
Memory belongs to the stream in which it was first seen. The rules are those of the CUDA allocator:
what one stream made and the other uses is handed over, and neither writes what the other reads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

DRAFT_THREAD = "ssr_hf-draft"
PARENT, DRAFT, WEIGHTS = "parent", "draft", "weights"


def draft_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == DRAFT_THREAD]


def in_draft() -> bool:
    return threading.current_thread().name == DRAFT_THREAD


@contextlib.contextmanager
def before_forward(model: PreTrainedModel, hook: Callable[[], None]) -> Iterator[None]:
    """Calls `hook` in the thread of every forward, before it."""
    handle = model.register_forward_pre_hook(lambda *_: hook())
    try:
        yield
    finally:
        handle.remove()


def wait_for_draft() -> None:
    """Lets the parent go on when the draft has ended, so that tests do not depend on timing."""
    if not in_draft():
        for thread in draft_threads():
            thread.join(timeout=30)


class StreamWatch:
    """Who made which memory, what was handed over, and which rules were broken.

    Args:
        weights (`Iterable[Tensor]`): What both sides read and neither writes.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.violations: set[str] = set()
        self.n_shared = 0
        self.n_handed_back = 0
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._owners: dict[int, str] = {}
        self._kept: list[Any] = []  # an address must not be used twice
        self._readers: dict[int, set[str]] = {}
        self._shared: list[Tensor] = []
        self._written_by_draft: list[Tensor] = []
        for tensor in weights:
            self._own(tensor, WEIGHTS)

    def _own(self, tensor: Tensor, owner: str) -> str:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._owners:
            self._owners[address] = owner
            self._kept.append(storage)
        return self._owners[address]

    def side(self, device: torch.device) -> WatchedSide:
        """Stands in for `SideStream`."""
        return WatchedSide(self)

    def hand_over(self, tensors: Iterable[Tensor], reader: str) -> int:
        """Both sides may read these from now on; returns how many they are."""
        with self._lock:
            handed = [tensor for tensor in tensors if tensor.numel()]
            for tensor in handed:
                self._own(tensor, PARENT if reader == DRAFT else DRAFT)
                self._readers.setdefault(tensor.untyped_storage().data_ptr(), set()).add(reader)
            if reader == DRAFT:
                self._shared = handed
            return len(handed)

    def end_sharing(self) -> None:
        """The draft reads nothing any more."""
        with self._lock:
            self._shared = []

    def see(
        self,
        stream: str,
        meets: bool,
        func: Any,
        inputs: list[Tensor],
        written: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        """Checks one operation."""
        with self._lock:
            for tensor in inputs:
                self._check_read(stream, meets, func, tensor)
            for tensor in written:
                self._check_write(stream, func, tensor)
            for tensor in outputs:
                if tensor.numel():
                    self._own(tensor, stream)

    def _check_read(self, stream: str, meets: bool, func: Any, tensor: Tensor) -> None:
        if not tensor.numel():
            return
        owner = self._own(tensor, PARENT if meets else stream)
        if not meets and not self._may_use(stream, tensor):
            self.violations.add(f"{stream} uses {owner}'s {tuple(tensor.shape)} in {func}")
        if stream == PARENT and any(_overlap(tensor, other) for other in self._written_by_draft):
            self.violations.add(f"parent uses what the draft wrote in {func}")

    def _may_use(self, stream: str, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        handed_over = stream in self._readers.get(address, ())
        return self._owners[address] in (stream, WEIGHTS) or handed_over

    def _check_write(self, stream: str, func: Any, tensor: Tensor) -> None:
        owner = self._own(tensor, stream)
        if owner == WEIGHTS:
            self.violations.add(f"{stream} writes weights in {func}")
        if stream == DRAFT and owner == PARENT:
            self._written_by_draft.append(tensor)
        if stream == PARENT and any(_overlap(tensor, shared) for shared in self._shared):
            self.violations.add(f"parent writes what the draft reads in {func}")

    @contextlib.contextmanager
    def watching(self, stream: str, meets: bool = False) -> Iterator[None]:
        """While operations of this thread belong to `stream`; `meets` where both streams wait."""
        stack = self._thread.__dict__.setdefault("stack", [])
        mode = contextlib.nullcontext() if stack else _Mode(self, stack)
        stack.append((stream, meets))
        try:
            with mode:
                yield
        finally:
            stack.pop()


class WatchedSide:
    """A `SideStream` that tells the watch what it is asked for."""

    def __init__(self, watch: StreamWatch) -> None:
        self._watch = watch

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        with self._watch.watching(DRAFT, meets=True):
            yield

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self._watch.watching(DRAFT):
            yield

    def share(self, tensors: Iterable[Tensor]) -> None:
        self._watch.n_shared += self._watch.hand_over(tensors, DRAFT)

    def join(self) -> None:
        self._watch.end_sharing()

    def hand_back(self, tensors: Iterable[Tensor]) -> None:
        self._watch.n_handed_back += self._watch.hand_over(tensors, PARENT)


class _Mode(TorchDispatchMode):
    def __init__(self, watch: StreamWatch, stack: list[tuple[str, bool]]) -> None:
        super().__init__()
        self._watch, self._stack = watch, stack

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        named = {argument.name: argument for argument in func._schema.arguments}
        given = {**dict(zip(named, args, strict=False)), **kwargs}
        written = [value for name, value in given.items() if _is_written(named[name])]
        outputs = func(*args, **kwargs)
        if func.is_view:
            return outputs  # touches no memory
        stream, meets = self._stack[-1]
        self._watch.see(stream, meets, func, _tensors(given), _tensors(written), _tensors(outputs))
        return outputs


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element of memory in common."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    return bool(_elements(one) & _elements(other))


def _elements(tensor: Tensor) -> set[int]:
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    places = torch.arange(size).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set(places.flatten().tolist())
