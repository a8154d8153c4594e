"""Where a step ends, and what a step says, independent of how it is cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..markers import TokenCodec

REPLACEMENT = "\ufffd"  # what decoding gives for a part of a character
LONGEST_CHARACTER = 4  # bytes of UTF-8, and so the most tokens that write one character


class StepEnd:
    """Finds the token that completes a step.

    The delimiter is looked for in decoded text, since it merges with its neighbours in most
    vocabularies (`.` and two line breaks are one token). White space before the first other
    character does not count: steps are never empty.

    Args:
        codec (`TokenCodec`): Of the model that writes.
        delimiters (`tuple[str, ...]`): Alternative texts that end a step.
    """

    def __init__(self, codec: TokenCodec, delimiters: tuple[str, ...]) -> None:
        self._codec = codec
        self._delimiters = delimiters
        self._related: dict[int, bool] = {}

    def reached(self, step_ids: Sequence[int]) -> bool:
        """Whether the last token of a step completes it, given that none before did."""
        if not step_ids or not self._is_related(step_ids[-1]):
            return False
        said = self._codec.decode(step_ids).lstrip()
        return any(delimiter in said for delimiter in self._delimiters)

    def first_in(self, step_ids: Sequence[int], next_ids: Sequence[int]) -> int | None:
        """Index of the token of `next_ids` that completes the step begun with `step_ids`."""
        so_far = list(step_ids)
        for index, token_id in enumerate(next_ids):
            so_far.append(token_id)
            if self.reached(so_far):
                return index
        return None

    def _is_related(self, token_id: int) -> bool:
        """Whether a token can write the end of a delimiter."""
        known = self._related.get(token_id)
        if known is None:
            piece = self._codec.decode([token_id])
            known = REPLACEMENT in piece or any(
                character in piece for text in self._delimiters for character in text
            )
            self._related[token_id] = known
        return known


def text_of(codec: TokenCodec, token_ids: Sequence[int]) -> str:
    """What `token_ids` write in the middle of a text: a leading space is kept."""
    lead = codec.encode("\n")
    return codec.decode([*lead, *token_ids])[len(codec.decode(lead)) :]


def splits_character(codec: TokenCodec, token_ids: Sequence[int]) -> bool:
    """Whether `token_ids` stop inside a character."""
    tail = token_ids[-LONGEST_CHARACTER:]
    return bool(tail) and codec.decode(tail).endswith(REPLACEMENT)
