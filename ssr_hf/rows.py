"""Two texts as the batch rows of one forward: the parent's and a draft's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import compat
from .cache.checkpoint import Checkpoint
from .cache.fork import add_row, allows_holes, compact, join, retire_row, strip_padding

if TYPE_CHECKING:
    from .target import Target


class TwoRows:
    """Makes a draft row 1 of its parent's cache, until `retire`.

    A round feeds both rows the same number of tokens but need not keep as many of one as of the
    other. A slot of the cache that is kept for one row only is a *hole* of the other: masked from
    then on, and taken out when the row is retired. Positions count tokens, not slots, so that
    every layer that sees all slots computes what it would without holes. Where another kind of
    layer is present, both rows keep whatever is fed (`takes_candidates` is False).

    Args:
        target (`Target`): The parent.
        child (`Target`, *optional*): A fork of it that is ahead, whose cache is taken over and
            padded to on the left; else the draft starts from the parent's own cache.
    """

    def __init__(self, target: Target, child: Target | None = None) -> None:
        self._target = target
        n_slots = target.n_positions() - target.n_pending
        self._lead = 0
        if child is not None:
            self._lead = child.n_positions() - child.n_pending - n_slots
        mask = target.kwargs.get("attention_mask")
        self._is_masked = mask is not None or self._lead > 0
        if mask is None:
            mask = torch.ones(1, n_slots, dtype=torch.long, device=target.sequence.device)
        padding, ahead = mask.new_zeros(1, self._lead), mask.new_ones(1, self._lead)
        rows = [[padding, mask[:, :n_slots]], [mask[:, :n_slots], ahead]]
        self._mask = torch.cat([torch.cat(row, dim=1) for row in rows])
        # Slots that the parent's text fills, the padding not counted.
        self._slots = list(range(n_slots))
        self._n_slots = n_slots
        self._checkpoint: Checkpoint | None = None
        self._n_fed = 0
        self._n_kept_of_child = 0
        positions = target.kwargs.get("position_ids")
        self.takes_candidates = (
            positions is not None
            and positions.dim() == 2
            and allows_holes(target.cache, target.model.config)
        )
        # Last, because nobody would take it back.
        if child is None:
            add_row(target.cache, target.model.device)
        else:
            join(target.cache, child.cache, self._lead)
        self._is_joined = True

    def forward(
        self, candidate_ids: Sequence[int], child_ids: Sequence[int], child_position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feeds the parent's pending tokens and candidates, and `child_ids` beside them.

        Args:
            candidate_ids (`Sequence[int]`): The parent's candidates.
            child_ids (`Sequence[int]`): Tokens of the child, its candidates included.
            child_position (`int`): Where `child_ids` begin in the child's text.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Logits at the parent's tokens, `[1, n, V]`, and at
            the child's.
        """
        target = self._target
        parent_ids = [*target.sequence.token_ids[-target.n_pending :], *candidate_ids]
        n_fed = max(len(parent_ids), len(child_ids))
        # A short row is filled up behind its tokens, which cannot see what comes later.
        padded = [[*ids, *[0] * (n_fed - len(ids))] for ids in (parent_ids, child_ids)]
        ids = target.sequence.ids
        self._n_fed = n_fed
        self._checkpoint = Checkpoint(target.cache, n_fed)
        logits = target.forward_rows(
            torch.tensor(padded, dtype=ids.dtype, device=ids.device),
            self._kwargs(n_fed, child_position),
            checkpoint=self,
        )
        return logits[:1, : len(parent_ids)], logits[1:, : len(child_ids)]

    def keep_of_child(self, n_tokens: int) -> None:
        """Says how many of the last forward's `child_ids` belong to the child's text."""
        self._n_kept_of_child = n_tokens

    def keep(self, n_kept: int) -> int:
        """Keeps the first `n_kept` tokens of the parent; see `Checkpoint.keep`."""
        assert self._checkpoint is not None, "keep follows a forward"
        kept_by_row = (n_kept, self._n_kept_of_child)
        n_new = max(kept_by_row)
        self._checkpoint.keep(n_new)
        self._checkpoint = None
        new = self._mask.new_ones(2, n_new)
        for row, n_tokens in enumerate(kept_by_row):
            new[row, n_tokens:] = 0
        self._is_masked |= min(kept_by_row) < n_new
        self._mask = torch.cat([self._mask, new], dim=1)
        self._slots.extend(range(self._n_slots, self._n_slots + n_kept))
        self._n_slots += n_new
        return n_kept

    def restore(self) -> None:
        """Puts the cache back as it was before the last forward, with both rows."""
        assert self._checkpoint is not None, "restore follows a forward"
        self._checkpoint.restore()
        self._checkpoint = None

    def retire(self) -> None:
        """Gives the parent its cache back, also after a forward that failed half-way.

        Can be called again if it fails half-way itself.
        """
        cache, device = self._target.cache, self._target.model.device
        if self._checkpoint is not None:
            self._target.abandon_round()
        if self._is_joined:
            retire_row(cache, device)
            self._is_joined = False
        if self._lead:
            strip_padding(cache, self._lead)
            self._lead = 0
        if len(self._slots) < self._n_slots:
            compact(cache, torch.tensor(self._slots, device=device))
            self._n_slots = len(self._slots)

    def _kwargs(self, n_fed: int, child_position: int) -> dict[str, Any]:
        """The parent's arguments of a forward, for two rows of `n_fed` tokens."""
        target = self._target
        kwargs = dict(target.kwargs)
        for name in compat.PER_TOKEN_KWARGS:
            if kwargs.get(name) is not None:
                kwargs[name] = _two_rows(kwargs[name], n_fed - target.n_pending)
        if self._is_masked:
            new = self._mask.new_ones(2, n_fed)
            kwargs["attention_mask"] = torch.cat([self._mask, new], dim=1)
        positions = target.kwargs.get("position_ids")
        if positions is not None:
            ahead = child_position - (len(target.sequence) - target.n_pending)
            first = positions[..., -target.n_pending, None]
            offsets = torch.arange(n_fed, device=positions.device)
            kwargs["position_ids"] = torch.cat([first, first + ahead], dim=-2) + offsets
        return kwargs


def _two_rows(value: torch.Tensor, n_more: int) -> torch.Tensor:
    """Repeats the batch row of `[1, T]` or `[planes, 1, T]`, and its last entry `n_more` times."""
    grown = torch.cat([value, value[..., -1:].expand(*value.shape[:-1], n_more)], dim=-1)
    repeats = [1] * value.dim()
    repeats[-2] = 2
    return grown.repeat(*repeats)
