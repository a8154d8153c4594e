"""Wrapping text between words while it is still being written."""

from __future__ import annotations

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

_MARGIN = 2


class WordWrap:
    """Lays styled characters out in lines, with a margin and the indentation each line has itself.

    A word is held back until it is complete. Continued lines hang below the beginning of their
    line, so that rows of data stay apart.

    Args:
        width (`int`): Columns of the terminal.
    """

    def __init__(self, width: int) -> None:
        self._end = width - _MARGIN
        self._word: list[tuple[str, Style]] = []
        self._column = 0
        self._line_begin = 0  # column of the first word
        self._indent = 0
        self._spaces = 0  # before the word that is held back
        self._has_words = False

    def write(self, out: Text, character: str, style: Style) -> None:
        """Appends to `out` what can be shown now that `character` has come."""
        if not character.isspace():
            self._hold(character, style)
            if self._word_width() >= self._end // 2:
                self.flush(out)
        elif character == "\n":
            self.flush(out)
            out.append("\n")
            self._start_line()
        elif self._has_words or self._word:
            self.flush(out)
            self._spaces += 1
        else:
            self._indent = min(self._indent + 1, self._end // 2)

    def flush(self, out: Text) -> None:
        """Appends the word that is held back, on a new line if it does not fit on this one."""
        if not self._word:
            return
        width = self._word_width()
        if not self._has_words:
            self._begin(out, _MARGIN + self._indent)
        elif self._column + self._spaces + width > self._end and self._column > self._line_begin:
            out.append("\n")
            self._begin(out, 2 * _MARGIN + self._indent)
        else:
            out.append(" " * self._spaces)
            self._column += self._spaces
        for text, style in self._word:
            out.append(text, style)
        self._column += width
        self._spaces = 0
        self._word = []

    @property
    def is_at_line_start(self) -> bool:
        """Whether nothing was written on this line."""
        return not self._has_words

    def _hold(self, character: str, style: Style) -> None:
        if self._word and self._word[-1][1] == style:
            self._word[-1] = (self._word[-1][0] + character, style)
        else:
            self._word.append((character, style))

    def _start_line(self) -> None:
        self._column = self._line_begin = self._indent = self._spaces = 0
        self._has_words = False

    def _begin(self, out: Text, column: int) -> None:
        out.append(" " * column)
        self._column = self._line_begin = column
        self._has_words = True

    def _word_width(self) -> int:
        return cell_len("".join(text for text, _ in self._word))
