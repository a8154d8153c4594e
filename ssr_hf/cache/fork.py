"""Forking a cache for a draft: as an independent copy, or as a second batch row."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from .layers import Layer, kind_of

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig


def fork(cache: Cache) -> Cache:
    """A cache with the same content that can be written independently.

    Tensors are shared wherever the layer kind replaces rather than writes them, so that a fork of a
    pure attention cache costs no memory until it grows.
    """
    forked = copy.copy(cache)
    forked.layers = [kind_of(layer).fork(layer) for layer in cache.layers]
    return forked


def cache_tensors(cache: Cache) -> Iterator[torch.Tensor]:
    """Every tensor that the layers of `cache` hold, those in dicts of states included."""
    for layer in cache.layers:
        for value in layer.__dict__.values():
            held = value.values() if isinstance(value, dict) else (value,)
            yield from (tensor for tensor in held if isinstance(tensor, torch.Tensor))


@contextmanager
def _all_layers_or_none(cache: Cache) -> Iterator[None]:
    """Puts every layer back if memory runs out, or an interrupt arrives, between two of them."""
    saved = [kind_of(layer).save(layer) for layer in cache.layers]
    try:
        yield
    except BaseException:
        for layer, state in zip(cache.layers, saved, strict=True):
            kind_of(layer).restore(layer, state)
        raise


def add_row(cache: Cache, device: torch.device) -> None:
    """Doubles the only batch row in place: row 0 stays the parent, row 1 is the child.

    No more than one old layer is held while the new ones come into being.
    """
    rows = torch.tensor([0, 0], device=device)
    for n_done, layer in enumerate(cache.layers):
        saved = kind_of(layer).save(layer)
        try:
            layer.reorder_cache(rows)
        except BaseException:
            kind_of(layer).restore(layer, saved)
            for doubled in cache.layers[:n_done]:
                _cut_to_first_row(doubled)
            raise


def retire_row(cache: Cache, device: torch.device) -> None:
    """Drops the child row that `add_row` or `join` added; can be called again if it fails half-way.

    No more than one old layer is held while the new ones come into being.
    """
    row = torch.tensor([0], device=device)
    for layer in cache.layers:
        try:
            layer.reorder_cache(row)
        except torch.OutOfMemoryError:
            _cut_to_first_row(layer)


def _cut_to_first_row(layer: Layer) -> None:
    """Drops all rows but the first without new memory: views hold on to what they are cut from."""
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(layer, name, {key: _first_row(held) for key, held in value.items()})
        else:
            setattr(layer, name, _first_row(value))


def _first_row(value: object) -> object:
    # States have rows, heads or channels, and more; what has fewer dimensions has no rows.
    return value[:1] if isinstance(value, torch.Tensor) and value.dim() > 2 else value


def join(cache: Cache, child: Cache, lead: int) -> None:
    """Makes `child`, which is `lead` tokens longer, the second batch row of `cache`.

    The parent is padded on the left, where padding is exact on every layer kind; the caller masks
    the padding and gives each row its own positions. `child` must not be used afterwards.
    """
    with _all_layers_or_none(cache):
        for layer, other in zip(cache.layers, child.layers, strict=True):
            kind = kind_of(layer)
            kind.pad_left(layer, lead)
            kind.concatenate(layer, other)


def allows_holes(cache: Cache, config: PreTrainedConfig) -> bool:
    """Whether slots in the middle of the cache can be masked without changing anything else.

    A user's cache may hold every token for a model that sees a window of them, so that the layers
    which the config asks for have a say, too.
    """
    intended = DynamicCache(config=config.get_text_config(decoder=True))
    layers = (*cache.layers, *intended.layers)
    return all(kind_of(layer).allows_holes(layer) for layer in layers)


def compact(cache: Cache, slots: torch.Tensor) -> None:
    """Keeps the given slots only, for caches that allow holes."""
    with _all_layers_or_none(cache):
        for layer in cache.layers:
            kind_of(layer).compact(layer, slots)


def strip_padding(cache: Cache, lead: int) -> None:
    """Removes the left padding of `join` after the child row was retired."""
    with _all_layers_or_none(cache):
        for layer in cache.layers:
            kind_of(layer).strip_left(layer, lead)
