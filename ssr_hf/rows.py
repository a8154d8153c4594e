"""Two texts as the batch rows of one forward: the parent's and a draft's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from . import compat
from .cache.checkpoint import Checkpoint
from .cache.fork import add_row, allows_holes, compact, join, retire_row, strip_padding
from .cache.support import asked_once, deviation, probe_ids, tolerance
from .target import Target
from .tokens import TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class TwoRows:
    """Makes a draft row 1 of its parent's cache, until `retire`.

    A round feeds both rows the same number of tokens but need not keep as many of one as of the
    other. A slot of the cache that is kept for one row only is a *hole* of the other: masked from
    then on, and taken out when the row is retired. Positions count tokens, not slots, so that
    every layer that sees all slots computes what it would without holes. `row_support` says
    whether that holds for a model; where it does not, both rows must keep whatever is fed.

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
        self._n_kept_of_child = 0
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
        self._checkpoint = Checkpoint(target.cache, n_fed)
        logits = target.forward_rows(
            torch.tensor(padded, dtype=ids.dtype, device=ids.device),
            self._kwargs(len(parent_ids), len(child_ids), child_position),
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
        new = self._mask.new_ones(2, n_new)
        for row, n_tokens in enumerate(kept_by_row):
            new[row, n_tokens:] = 0
        mask = torch.cat([self._mask, new], dim=1)
        self._checkpoint.keep(n_new)
        self._checkpoint = None
        self._mask = mask
        self._is_masked |= min(kept_by_row) < n_new
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

    def _kwargs(self, n_parent: int, n_child: int, child_position: int) -> dict[str, Any]:
        """The parent's arguments of a forward, for rows of so many tokens."""
        target = self._target
        n_fed = max(n_parent, n_child)
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
            # What fills a short row up must not reach positions that the text has not reached.
            rows = (
                first + offsets.clamp_max(n_parent - 1),
                first + ahead + offsets.clamp_max(n_child - 1),
            )
            kwargs["position_ids"] = torch.cat(rows, dim=-2)
        return kwargs


def _two_rows(value: torch.Tensor, n_more: int) -> torch.Tensor:
    """Repeats the batch row of `[1, T]` or `[planes, 1, T]`, and its last entry `n_more` times."""
    grown = torch.cat([value, value[..., -1:].expand(*value.shape[:-1], n_more)], dim=-1)
    repeats = [1] * value.dim()
    repeats[-2] = 2
    return grown.repeat(*repeats)


@dataclass(frozen=True, slots=True)
class RowSupport:
    """What two rows may do without changing a token.

    Args:
        holes (`bool`): They may go at their own pace.
        padding (`bool`): One may be ahead when it joins.
    """

    holes: bool
    padding: bool


def row_support(target: Target) -> RowSupport:
    """What the rows of a model, with the cache in use, may do.

    Models differ in what they count: text positions that they are given, or slots of the cache.
    The first call per model compares both cases with rows of their own; later calls reuse it.

    Args:
        target (`Target`): The parent; its text and cache are not touched.

    Returns:
        `RowSupport`: What may be done.
    """
    model = target.model
    probed = asked_once(model, "rows", lambda: _probe(model))
    positions = target.kwargs.get("position_ids")
    has_positions = positions is not None and positions.dim() == 2
    holes = has_positions and allows_holes(target.cache, model.config)
    return RowSupport(holes and probed.holes, probed.padding)


PROBE_PREFIX, PROBE_TOKENS = 4, 4


def _probe(model: PreTrainedModel) -> RowSupport:
    if _counts_slots(model.config):
        return RowSupport(holes=False, padding=False)
    config = GenerationConfig()
    ids = probe_ids(model, PROBE_PREFIX + PROBE_TOKENS)
    token_ids = tuple(ids[0].tolist())

    def read(n_tokens: int) -> Target:
        """A target with so many tokens, of which the last is pending."""
        prompt = ids[:, :PROBE_PREFIX]
        fresh = Target(model, TokenSequence(prompt), compat.fresh_kwargs(model, prompt, config))
        fresh.prefill(config)
        for token_id in token_ids[PROBE_PREFIX:n_tokens]:
            if len(fresh.sequence) > PROBE_PREFIX:
                fresh.forward()
            fresh.sequence.append((token_id,))
            fresh.keep(1)
        return fresh

    alone = read(PROBE_PREFIX + 1).forward(token_ids[PROBE_PREFIX + 1 :])

    def agree(logits: torch.Tensor, position: int) -> bool:
        expected = alone[:, position - PROBE_PREFIX :][:, : logits.shape[1]]
        return deviation(expected, logits) <= tolerance(model, config)

    parent, child = read(PROBE_PREFIX + 1), read(PROBE_PREFIX + 3)
    rows = TwoRows(parent, child)
    logits, child_logits = rows.forward((), token_ids[6:7], child_position=6)
    padding = agree(logits, 4) and agree(child_logits, 6)

    parent = read(PROBE_PREFIX + 1)
    if not allows_holes(parent.cache, model.config) or "position_ids" not in parent.kwargs:
        return RowSupport(holes=False, padding=padding)
    rows = TwoRows(parent)
    rows.forward(token_ids[5:6], token_ids[4:5], child_position=4)
    rows.keep_of_child(1)
    parent.sequence.append(token_ids[5:7])
    parent.keep(2)
    logits, child_logits = rows.forward((), token_ids[5:7], child_position=5)
    return RowSupport(agree(logits, 6) and agree(child_logits, 5), padding)


def _counts_slots(config: PreTrainedConfig) -> bool:
    """Whether a model does what no short probe can see: windows or scales by slots of the cache."""
    text = config.get_text_config(decoder=True)
    local = "local" in repr(
        [getattr(text, name, None) for name in ("attention_layers", "attention_types")]
    )
    return local or bool(getattr(text, "attn_temperature_tuning", False))
