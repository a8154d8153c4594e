"""Amortised growth of attention caches.

`DynamicLayer` copies all its keys and values for every forward. A `GrowingLayer` writes the new
ones into a buffer with spare room and hands out views, so that a token costs a copy of itself.
Layers are exchanged for the time of one generation; the cache handed back is an ordinary one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

from .layers import LAYER_KINDS, ConcatenatingKind, Layer

if TYPE_CHECKING:
    from transformers import Cache

MINIMUM_SPARE = 128
# Up to so many elements, copying costs less than looking after a buffer.
SMALL = 2**16
# Spare room as a share of the length: at most 1.25 times the memory, 5 copies per token in all.
SPARE_SHARE = 4


class GrowingLayer(DynamicLayer):
    """A full-attention layer on buffers that grow geometrically.

    `keys` and `values`, `[B, H, T, D]`, are views of the buffers or, after an operation that
    replaced them (reordering, padding), ordinary tensors; the next update takes new buffers.

    Args:
        origin (`DynamicLayer`): The layer that this one stands in for.
    """

    def __init__(self, origin: DynamicLayer) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.__dict__.update(origin.__dict__)
        self.origin = origin
        # Else the prompt would be held twice.
        origin.keys = origin.values = None
        self.buffers: dict[str, torch.Tensor] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states `[B, H, n, D]`; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def _append(self, name: str, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if held.numel() <= SMALL:
            return torch.cat([held, new], dim=-2)
        start = held.shape[-2]
        end = start + new.shape[-2]
        buffer = self.buffers.get(name)
        if buffer is None or end > buffer.shape[-2] or not _is_prefix(held, buffer):
            spare = max(MINIMUM_SPARE, end // SPARE_SHARE)
            buffer = new.new_empty(*new.shape[:-2], end + spare, new.shape[-1])
            buffer[..., :start, :] = held
            self.buffers = {**self.buffers, name: buffer}
        buffer[..., start:end, :] = new
        return buffer[..., :end, :]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replaces the rows; the buffers of those before are let go at once."""
        super().reorder_cache(beam_idx)
        self.buffers = {}

    def settled(self, keeps_content: bool) -> DynamicLayer:
        """The ordinary layer again, with this one's content if that is still needed."""
        if keeps_content and self.is_initialized:
            self.origin.__dict__.update(is_initialized=True, device=self.device)
            self.origin.keys = self.keys.contiguous()
            self.origin.values = self.values.contiguous()
        return self.origin


class GrowingKind(ConcatenatingKind):
    """A fork shares what was written so far and takes buffers of its own when it writes."""

    def fork(self, layer: Layer) -> Layer:
        forked = super().fork(layer)
        forked.buffers = {}
        return forked


LAYER_KINDS[GrowingLayer] = GrowingKind()


def _is_prefix(held: torch.Tensor, buffer: torch.Tensor) -> bool:
    return held.data_ptr() == buffer.data_ptr() and held.shape[:2] == buffer.shape[:2]


def amortise(cache: Cache) -> None:
    """Exchanges the full-attention layers of `cache` for growing ones, in place."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer(layer)


def settle(cache: Cache, keeps_content: bool) -> None:
    """Takes `amortise` back, in place.

    Args:
        cache (`Cache`): An amortised cache, or one that never was.
        keeps_content (`bool`): Whether the cache outlives the generation.
    """
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, GrowingLayer):
            cache.layers[index] = layer.settled(keeps_content)
