"""The part of a tokenizer that markers need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids: TypeAlias = tuple[int, ...]

# Some vocabularies do not flag their turn tags as special; white space and <tool_call> are never.
_TURN_TAG = re.compile(r"<[|｜].+|.+[|｜]>")


class TokenCodec:
    """The part of a tokenizer that markers need: text to ids and back, with nothing added.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer, or a processor that holds one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | Any) -> None:
        is_processor = not hasattr(tokenizer, "all_special_ids")
        self._tokenizer = tokenizer.tokenizer if is_processor else tokenizer
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = set(self._tokenizer.all_special_ids)
        special.update(index for index, token in added.items() if token.special)
        self.added = frozenset(added) | special
        self.boundaries = frozenset(special).union(
            index for index, token in added.items() if _TURN_TAG.fullmatch(token.content)
        )

    def __len__(self) -> int:
        return len(self._tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def encode(self, text: str) -> Ids:
        """The ids that write exactly `text` in the middle of a generation."""
        lead, ids = self._encode("\n"), self._encode(text)
        if self.decode([*lead, *ids]) == self.decode(lead) + text:
            return tuple(ids)
        # Vocabularies that put a space before the first word do not do so after a line break.
        whole = self._encode("\n" + text)
        return tuple(whole[len(lead) :] if whole[: len(lead)] == lead else ids)

    def is_atomic(self, text: str) -> bool:
        """Whether `text` is one token of the vocabulary."""
        ids = self.encode(text)
        return len(ids) == 1 and self.decode(ids).strip() == text

    def _encode(self, text: str) -> list[int]:
        return [int(index) for index in self._tokenizer.encode(text, add_special_tokens=False)]
