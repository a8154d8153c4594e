"""Streaming text to a terminal, coloured by who proposed it and wrapped between words."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.style import Style
from rich.text import Text

import ssr_hf

from .wrapping import WordWrap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCE_STYLES = {
    "draft": Style(color="green"),
    "suffix": Style(color="cyan"),
    "marker": Style(color="magenta"),
    "model": Style(),
}
_SOURCE_NAMES = {
    "draft": "draft, accepted",
    "suffix": "suffix match, accepted",
    "marker": "end marker",
    "model": "decoded",
}
_THINKING = Style(dim=True)


def legend(sources: Sequence[str] = ("draft", "suffix", "model")) -> Text:
    """What the colours mean."""
    text = Text()
    for source in sources:
        text.append("■ ", SOURCE_STYLES[source])
        text.append(f"{_SOURCE_NAMES[source]}   ", "dim")
    return text


class TextPainter:
    """Writes a generation to a console while it goes on.

    On a terminal words are wrapped at its width, with a margin and the indentation of their line;
    elsewhere the text is written as it is.

    Args:
        console (`Console`): Where to write.
        tokenizer (`PreTrainedTokenizerBase`): Decodes the tokens.
        markers (`ThinkingMarkers`): Says where thinking, which is shown dimmed, ends.
        hidden (`frozenset[int]`): Tokens that are not shown, such as the end of the sequence.
    """

    def __init__(
        self,
        console: Console,
        tokenizer: PreTrainedTokenizerBase,
        markers: ssr_hf.ThinkingMarkers,
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        self._console = console
        self._decoder = ssr_hf.IncrementalDetokenizer(tokenizer)
        self._ends = markers.end
        self._longest_end = max(map(len, markers.end))
        self._hidden = hidden
        self._recent: tuple[int, ...] = ()
        self._thinking = True
        self._wrap = WordWrap(console.width) if console.is_terminal else None

    def __call__(self, token_ids: Sequence[int], sources: Sequence[str]) -> None:
        """Shows tokens, coloured by who proposed each of them."""
        out = Text()
        for token_id, source in zip(token_ids, sources, strict=True):
            style = SOURCE_STYLES[source]
            style = style + _THINKING if self._thinking else style
            self._follow(token_id)
            if token_id in self._hidden:
                continue
            self._lay_out(out, self._decoder.push(token_id), style)
        self._emit(out)

    def write(self, text: str) -> None:
        """Shows text that no model wrote, such as the prompt."""
        out = Text()
        self._lay_out(out, text, _THINKING)
        self._emit(out)

    def finish(self) -> None:
        """Shows what is held back and ends the line."""
        out = Text()
        self._lay_out(out, self._decoder.finish(), Style())
        if self._wrap is not None:
            self._wrap.flush(out)
        if self._wrap is None or not self._wrap.is_at_line_start:
            out.append("\n")
        self._emit(out)

    def _lay_out(self, out: Text, text: str, style: Style) -> None:
        for character in _printable(text):
            if self._wrap is None:
                out.append(character)
            else:
                self._wrap.write(out, character, style)

    def _follow(self, token_id: int) -> None:
        self._recent = (*self._recent, token_id)[-self._longest_end :]
        if any(self._recent[-len(end) :] == end for end in self._ends):
            self._thinking = False

    def _emit(self, out: Text) -> None:
        if out:
            self._console.print(out, end="", soft_wrap=True)


def _printable(text: str) -> str:
    """`text` without control characters, which could steer a terminal; tabs become spaces."""
    text = text.replace("\t", "    ").replace("\r\n", "\n")
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) != "Cc")
