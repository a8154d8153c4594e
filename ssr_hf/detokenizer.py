"""Text of a stream of tokens, token by token: for streamers that show who proposed what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


class IncrementalDetokenizer:
    """Turns tokens into text one at a time; a character is given out with the token that ends it.

    The host's `TextStreamer` holds text back until a word ends, which hides from whom each token
    came. Only the last tokens are decoded, so that a token costs the same in long texts.

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
        # What was given out last stays as context: some vocabularies drop a first token's space.
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that `token_id` adds; empty while a character is incomplete."""
        self._pending.append(token_id)
        added = self._added()
        if not added or added.endswith(_INCOMPLETE):
            return ""
        self._context, self._pending = self._pending, []
        return added

    def finish(self) -> str:
        """What is left of a character that no token completed."""
        return self._added()

    def _added(self) -> str:
        """The text of the pending tokens behind their context."""
        text = self._decode(self._context + self._pending)
        return text[len(self._decode(self._context)) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text
