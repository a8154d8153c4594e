"""Text of a stream of tokens, token by token: for streamers that show who proposed what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


class IncrementalDetokenizer:
    """Turns tokens into text one at a time; a character is given out with the token that ends it.

    The host's `TextStreamer` holds text back until a word ends, which hides from whom each token
    came. Only the current line is decoded for a token, so that its cost does not grow with the
    text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.

    Example:

    ```python
    >>> import ssr_hf
    >>> _, tokenizer = ssr_hf.load_tiny_reasoner()
    >>> text = ssr_hf.IncrementalDetokenizer(tokenizer)
    >>> [text.push(token_id) for token_id in tokenizer.encode("In Kyoto, é")]
    ['In', ' ', 'Kyoto', ', ', '', 'é']
    >>> text.finish()
    ''

    ```
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._line: list[int] = []
        self._shown = ""

    def push(self, token_id: int) -> str:
        """The text that `token_id` adds; empty while a character is incomplete."""
        self._line.append(token_id)
        text = self._decode()
        if text.endswith(_INCOMPLETE):
            return ""
        added = text[len(self._shown) :]
        self._shown = text
        if text.endswith("\n"):
            # What ends the line stays as context: some vocabularies drop a first token's space.
            self._line = [token_id]
            self._shown = self._decode()
        return added

    def finish(self) -> str:
        """What is left of a character that no token completed."""
        return self._decode()[len(self._shown) :]

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._line, clean_up_tokenization_spaces=False)
        return text
