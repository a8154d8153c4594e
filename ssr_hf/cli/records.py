"""JSONL in and out: lines that can be used, lines that cannot, and what an earlier run has done."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .console import InputError
from .prompts import Messages, require_unicode

RESULT_KEYS = ("text", "thinking", "answer", "statistics")

Identifier = str | int


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line of the input that can be used.

    Args:
        line (`int`): Its number, from 1.
        identifier (`str` or `int`): Its `"id"`, or else its number.
        asked (`str` or `list[dict]`): Its `"prompt"` or `"messages"`.
        fields (`dict`): Everything it holds; the output repeats it.
    """

    line: int
    identifier: Identifier
    asked: str | Messages
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """One line of the input that cannot be used."""

    line: int
    reason: str


def read_items(path: Path) -> tuple[list[Item], list[BadLine]]:
    """Reads a JSONL file of prompts; `-` is standard input.

    Args:
        path (`Path`): The file. A line is an object with `"prompt"` (text) or `"messages"` (a chat)
            and, if it is to be resumed by name, an `"id"`. Blank lines are skipped.

    Returns:
        `tuple[list[Item], list[BadLine]]`: Usable lines and the others, both in order.

    Raises:
        `InputError`: The file cannot be read.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise InputError(f"--input {path} cannot be read: {error}") from error
    items: list[Item] = []
    bad: list[BadLine] = []
    seen: dict[Identifier, int] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            item = _parse(number, line)
        except InputError as error:
            bad.append(BadLine(line=number, reason=str(error)))
            continue
        first = seen.setdefault(item.identifier, number)
        if first != number:
            origin = "" if "id" in item.fields else " (the line number, as none is given)"
            reason = f"the id {item.identifier!r}{origin} is taken by line {first}"
            bad.append(BadLine(line=number, reason=reason))
        else:
            items.append(item)
    return items, bad


def _parse(number: int, line: bytes) -> Item:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot be read as JSON ({error})") from error
    require_unicode(json.dumps(fields, ensure_ascii=False))
    if not isinstance(fields, dict):
        raise InputError('not an object such as {"id": "a", "prompt": "..."}')
    taken = [key for key in RESULT_KEYS if key in fields]
    if taken:
        raise InputError(f"{taken[0]!r} is a name of the output; rename this field")
    identifier = fields.get("id", number)
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int)):
        raise InputError(f"the id is {identifier!r}; text or an integer is accepted")
    return Item(line=number, identifier=identifier, asked=_asked(fields), fields=fields)


def _asked(fields: dict[str, Any]) -> str | Messages:
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        raise InputError('exactly one of "prompt" and "messages" is accepted')
    if messages is None:
        if not isinstance(prompt, str):
            raise InputError(f"the prompt is {prompt!r}; text is accepted")
        return prompt
    is_chat = isinstance(messages, list) and all(isinstance(item, dict) for item in messages)
    if not is_chat or not messages:
        raise InputError('"messages" is not a list of {"role": ..., "content": ...}')
    return messages


class RecordFile:
    """A JSONL file that is appended to, one whole line at a time, and read to resume.

    Args:
        path (`Path`): The file; made if there is none.

    Raises:
        `InputError`: The file cannot be written, or it is not one that this command wrote.

    Attributes:
        done (`set`): Identifiers of the records that it held when it was opened.
        repaired (`bool`): Whether an incomplete last line, as a killed process leaves it, was
            removed.
    """

    def __init__(self, path: Path) -> None:
        self.done: set[Identifier] = set()
        self.repaired = False
        self._path = path
        try:
            # Unbuffered: a line is one write, which Ctrl-C does not tear.
            self._file = path.open("a+b", buffering=0)
            self._file.seek(0)
            self._take_up(self._file.read())
        except OSError as error:
            raise self._unwritable(error) from error

    def _take_up(self, data: bytes) -> None:
        lines = data.split(b"\n")
        tail = lines.pop()
        for number, line in enumerate(lines, start=1):
            if line.strip():
                self.done.add(self._identifier(number, line))
        if not tail:
            return
        if _is_json(tail):
            self.done.add(self._identifier(len(lines) + 1, tail))
            self._file.write(b"\n")
        else:
            self._file.truncate(len(data) - len(tail))
            self.repaired = True

    def _identifier(self, number: int, line: bytes) -> Identifier:
        try:
            identifier = json.loads(line)["id"]
        except (ValueError, TypeError, KeyError):
            identifier = None
        if not isinstance(identifier, (str, int)):
            raise InputError(
                f"Line {number} of --output is not a record that generate wrote. A new file or one "
                "of an earlier run is accepted."
            )
        return identifier

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record; it is in the file when this returns."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        try:
            n_written = self._file.write(line)
        except OSError as error:
            raise self._unwritable(error) from error
        if n_written != len(line):
            raise self._unwritable("the disk is full")

    def _unwritable(self, reason: object) -> InputError:
        return InputError(f"--output {self._path} cannot be written: {reason}")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
