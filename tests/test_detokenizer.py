"""Text token by token: whole characters, no lost spaces, no cost that grows with the text."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizers import family_tokenizer

from ssr_hf import IncrementalDetokenizer

TOKENIZER: Any = family_tokenizer("deepseek_r1")


@pytest.mark.parametrize("text", ["déjà vu\n  — 漢字 🙂\n", "  two\n\n   three"])
def test_decoder_gives_whole_characters(text: str) -> None:
    """Characters of several tokens shown as question marks, or spaces lost at line breaks."""
    decoder = IncrementalDetokenizer(TOKENIZER)
    pieces = [decoder.push(token) for token in TOKENIZER.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    unfinished = TOKENIZER.encode("é", add_special_tokens=False)[:1]
    assert (decoder.push(unfinished[0]), decoder.finish()) == ("", "\ufffd")


def test_decoder_keeps_a_space_at_the_beginning_of_a_line() -> None:
    """Indentation lost with vocabularies that drop the space of the first token they decode."""

    class DropsFirstSpace:
        words = ("a", "\n", " b", "")

        def decode(self, token_ids: list[int], **_: Any) -> str:
            return "".join(self.words[index] for index in token_ids).removeprefix(" ")

    tokenizer: Any = DropsFirstSpace()
    decoder = IncrementalDetokenizer(tokenizer)
    assert "".join(decoder.push(index) for index in (0, 1, 2, 3, 2)) == "a\n b b"


def test_a_token_costs_the_same_in_long_texts() -> None:
    """The whole text, or a whole line, decoded once more for each of its tokens."""
    longest = 0

    class Watched:
        def decode(self, token_ids: list[int], **settings: Any) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return TOKENIZER.decode(token_ids, **settings)

    tokenizer: Any = Watched()
    text = IncrementalDetokenizer(tokenizer)
    for token_id in TOKENIZER.encode("a row of words " * 50, add_special_tokens=False):
        text.push(token_id)
    assert longest <= 2
