"""What each kind of cache layer needs in order to be rolled back and forked: one table row each.

To add a kind, write (or reuse) a `LayerKind` and add one row to `LAYER_KINDS`.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import cache_utils

Layer = Any
Saved = dict[str, Any]


class LayerKind(Protocol):
    """Operations on one cache layer. None of them may change a tensor that another layer holds."""

    def save(self, layer: Layer) -> Saved:
        """What `restore` needs. Valid until the layer is restored or the fork ends."""

    def restore(self, layer: Layer, saved: Saved) -> None:
        """Puts the layer back as it was at `save`, also after a forward that failed half-way."""

    def fork(self, layer: Layer) -> Layer:
        """A layer that can be written without the original noticing, and the other way round."""

    def pad_left(self, layer: Layer, n_tokens: int) -> None:
        """Adds `n_tokens` zero slots before the first token, to be masked by the caller."""

    def strip_left(self, layer: Layer, n_tokens: int) -> None:
        """Takes back what `pad_left` added and the layer still holds."""

    def concatenate(self, layer: Layer, other: Layer) -> None:
        """Appends the batch rows of `other` (of equal length) to those of `layer`."""

    def allows_holes(self, layer: Layer) -> bool:
        """Whether masked slots between tokens change nothing: every query sees every slot."""

    def compact(self, layer: Layer, slots: torch.Tensor) -> None:
        """Keeps the given slots only; called where holes are allowed."""


class ConcatenatingKind:
    """Layers that replace their tensors on every update, so references are enough."""

    def save(self, layer: Layer) -> Saved:
        return dict(layer.__dict__)

    def restore(self, layer: Layer, saved: Saved) -> None:
        layer.__dict__.update(saved)

    def fork(self, layer: Layer) -> Layer:
        return copy.copy(layer)

    def pad_left(self, layer: Layer, n_tokens: int) -> None:
        if not layer.is_initialized:
            return
        for name in ("keys", "values"):
            setattr(layer, name, functional.pad(getattr(layer, name), (0, 0, n_tokens, 0)))
        if layer.is_sliding:
            layer.cumulative_length += n_tokens
            self._keep_last(layer, layer.sliding_window - 1)

    def strip_left(self, layer: Layer, n_tokens: int) -> None:
        if not layer.is_initialized:
            return
        if layer.is_sliding:
            layer.cumulative_length -= n_tokens
            # A window that is full of true tokens has dropped the padding already.
            self._keep_last(layer, layer.cumulative_length)
        else:
            self._keep_last(layer, layer.keys.shape[-2] - n_tokens)

    def _keep_last(self, layer: Layer, n_tokens: int) -> None:
        layer.keys = layer.keys[..., -n_tokens:, :]
        layer.values = layer.values[..., -n_tokens:, :]

    def concatenate(self, layer: Layer, other: Layer) -> None:
        if not layer.is_initialized:
            return
        layer.keys = torch.cat([layer.keys, other.keys], dim=0)
        layer.values = torch.cat([layer.values, other.values], dim=0)

    def allows_holes(self, layer: Layer) -> bool:
        # A window counts slots, not positions.
        return not layer.is_sliding

    def compact(self, layer: Layer, slots: torch.Tensor) -> None:
        if not layer.is_initialized:
            return
        for name in ("keys", "values"):
            held = getattr(layer, name)
            setattr(layer, name, held.index_select(-2, slots.to(held.device)))


class RecurrentKind(ConcatenatingKind):
    """Layers that write convolution or recurrent states in place, so the states are copied."""

    def save(self, layer: Layer) -> Saved:
        saved = super().save(layer)
        for name, value in saved.items():
            if isinstance(value, dict):
                saved[name] = {key: _copy_state(state) for key, state in value.items()}
        return saved

    def fork(self, layer: Layer) -> Layer:
        forked = copy.copy(layer)
        forked.__dict__.update(self.save(layer))
        return forked

    def pad_left(self, layer: Layer, n_tokens: int) -> None:
        if isinstance(layer, cache_utils.DynamicLayer):
            super().pad_left(layer, n_tokens)

    def strip_left(self, layer: Layer, n_tokens: int) -> None:
        if isinstance(layer, cache_utils.DynamicLayer):
            super().strip_left(layer, n_tokens)

    def concatenate(self, layer: Layer, other: Layer) -> None:
        for index in range(layer.number_of_states):
            for name in ("conv_states", "recurrent_states"):
                mine, theirs = getattr(layer, name), getattr(other, name)
                if mine[index] is not None:
                    mine[index] = torch.cat([mine[index], theirs[index]], dim=0)
        if isinstance(layer, cache_utils.DynamicLayer):
            super().concatenate(layer, other)

    def allows_holes(self, layer: Layer) -> bool:
        return False


class EmptyKind:
    """Layers without content: those that share the states of another layer or need none."""

    def save(self, layer: Layer) -> Saved:
        return {}

    def restore(self, layer: Layer, saved: Saved) -> None:
        pass

    def fork(self, layer: Layer) -> Layer:
        return layer

    def pad_left(self, layer: Layer, n_tokens: int) -> None:
        pass

    def strip_left(self, layer: Layer, n_tokens: int) -> None:
        pass

    def concatenate(self, layer: Layer, other: Layer) -> None:
        pass

    def allows_holes(self, layer: Layer) -> bool:
        return True

    def compact(self, layer: Layer, slots: torch.Tensor) -> None:
        pass


def _copy_state(state: object) -> object:
    return state.clone() if isinstance(state, torch.Tensor) else state


LAYER_KINDS: dict[type, LayerKind] = {
    cache_utils.DynamicLayer: ConcatenatingKind(),
    cache_utils.DynamicSlidingWindowLayer: ConcatenatingKind(),
    cache_utils.LinearAttentionLayer: RecurrentKind(),
    cache_utils.LinearAttentionAndFullAttentionLayer: RecurrentKind(),
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: RecurrentKind(),
    cache_utils.DummyLayer: EmptyKind(),
}


def kind_of(layer: Layer) -> LayerKind:
    """The kind of a supported layer (`cache_support` has checked that there is one)."""
    return LAYER_KINDS[type(layer)]
