"""Rolling a cache back to the committed tokens after a round with candidates.

Two ways, chosen by what the layers can do. Layers that keep one entry per token are cropped. If any
layer holds a recurrent state, the whole cache goes back to where it was before the round, and the
accepted tokens are *pending*: fed again with the next forward, see `Target`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .layers import Saved, kind_of

if TYPE_CHECKING:
    from transformers import Cache


class Checkpoint:
    """The state of a cache before a round that feeds `n_fed` tokens.

    Ended by exactly one of `keep` and `restore`.
    """

    def __init__(self, cache: Cache, n_fed: int) -> None:
        self._cache = cache
        self._n_fed = n_fed
        self._croppable = cache.is_croppable
        self._saved: list[Saved] = [kind_of(layer).save(layer) for layer in cache.layers]
        if self._croppable:
            cache.activate_past_recording()

    def keep(self, n_kept: int) -> int:
        """Keeps the first `n_kept` of the tokens that the round fed.

        Returns:
            `int`: Tokens that the cache really kept: `n_kept`, or 0 where the cache can only go
            back to the checkpoint.
        """
        n_rejected = self._n_fed - n_kept
        if self._croppable:
            self._cache.crop(-n_rejected)
            stop_recording(self._cache)
            return n_kept
        if n_rejected > 0:
            self.restore()
            return 0
        return n_kept

    def restore(self) -> None:
        """Puts the cache back as it was, also after a forward that failed half-way."""
        for layer, saved in zip(self._cache.layers, self._saved, strict=True):
            kind_of(layer).restore(layer, saved)


def stop_recording(cache: Cache) -> None:
    """Switches past recording off; a cache that is handed back must not keep growing."""
    for layer in cache.layers:
        if getattr(layer, "record_past", False):
            layer.record_past = False
