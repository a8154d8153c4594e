"""Recognising markers token by token: by ids, and by text where tokens merge with neighbours."""

from __future__ import annotations

from collections import deque
from copy import copy
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from .codec import Ids, TokenCodec
from .discovery import ThinkingMarkers


class MatchState(NamedTuple):
    """What the last tokens amount to: a completed marker, or an end marker in progress."""

    starts: bool = False
    ends: bool = False
    progress: int = 0
    rest: Ids = ()


class MarkerAutomaton(NamedTuple):
    """All markers as one matcher: `moves[state].get(token, 0)` is the next state, 0 the first."""

    moves: tuple[dict[int, int], ...]
    states: tuple[MatchState, ...]


@lru_cache(maxsize=32)
def marker_automaton(start: tuple[Ids, ...], end: tuple[Ids, ...]) -> MarkerAutomaton:
    markers = (*start, *end)
    prefixes = sorted({ids[:size] for ids in markers for size in range(len(ids) + 1)}, key=len)
    index = {prefix: number for number, prefix in enumerate(prefixes)}
    alphabet = {token for ids in markers for token in ids}

    def longest_known(text: Ids) -> int:
        return next(index[text[cut:]] for cut in range(len(text) + 1) if text[cut:] in index)

    moves = tuple(
        {token: target for token in alphabet if (target := longest_known((*prefix, token)))}
        for prefix in prefixes
    )
    return MarkerAutomaton(moves, tuple(_describe(prefix, start, end) for prefix in prefixes))


def _describe(text: Ids, start: tuple[Ids, ...], end: tuple[Ids, ...]) -> MatchState:
    progress = 0
    rest: Ids = ()
    for ids in end:
        for size in range(min(len(ids) - 1, len(text)), progress, -1):
            if text[-size:] == ids[:size]:
                progress, rest = size, ids[size:]
                break
    return MatchState(
        starts=any(text[-len(ids) :] == ids for ids in start),
        ends=any(text[-len(ids) :] == ids for ids in end),
        progress=progress,
        rest=rest,
    )


class TextMatcher:
    """Recognises plain-text markers whose tokens have merged with their neighbours.

    In many vocabularies `>` and a line break are one token, and `.</` is another.
    """

    def __init__(self, codec: TokenCodec, starts: tuple[str, ...], ends: tuple[str, ...]) -> None:
        self._codec = codec
        self._starts, self._ends = starts, ends
        # A token that takes part in a marker writes at least one byte of it.
        self._window: deque[int] = deque(
            maxlen=max(len(text.encode()) for text in (*starts, *ends)) + 1
        )
        self._roles: dict[int, _Role] = {}
        self._is_begun = False
        self._rest: Ids = ()
        self._progress = 0

    def copy(self) -> TextMatcher:
        twin = copy(self)
        twin._window = self._window.copy()
        return twin

    def push(self, token: int) -> MatchState:
        """What the text up to `token` amounts to; decodes only what may belong to a marker."""
        self._window.append(token)
        role = self._role(token)
        self._is_begun = role is _Role.BEGINS or (self._is_begun and role is _Role.CONTINUES)
        if not self._is_begun:
            self._rest, self._progress = (), 0
            return NOTHING
        window = list(self._window)
        before, after = self._codec.decode(window[:-1]), self._codec.decode(window)
        self._follow(token, window, after)
        return MatchState(
            starts=any(after.count(text) > before.count(text) for text in self._starts),
            ends=any(after.count(text) > before.count(text) for text in self._ends),
            progress=self._progress,
            rest=self._rest,
        )

    def _follow(self, token: int, window: list[int], tail: str) -> None:
        """Updates the end marker in progress."""
        overlaps = [(_overlap(tail, text), text) for text in self._ends]
        size, text = max(overlaps, key=lambda pair: pair[0], default=(0, ""))
        if size:
            self._rest = self._codec.encode(text[size:])
            spans = (
                span
                for span in range(1, len(window))
                if self._codec.decode(window[-span:]).endswith(text[:size])
            )
            self._progress = next(spans, len(window))
        elif self._rest and self._rest[0] == token and len(self._rest) > 1:
            # Inside one character that several tokens write, the text alone shows no progress.
            self._rest, self._progress = self._rest[1:], self._progress + 1
        else:
            self._rest, self._progress = (), 0

    def _role(self, token: int) -> _Role:
        known = self._roles.get(token)
        if known is None:
            piece = self._codec.decode([token])
            known = max(_role_in(piece, text) for text in (*self._starts, *self._ends))
            self._roles[token] = known
        return known


class _Role(IntEnum):
    """What a token can do for a marker."""

    NOTHING = 0
    CONTINUES = 1
    BEGINS = 2


NOTHING = MatchState()


def _overlap(tail: str, text: str) -> int:
    """Length of the longest proper prefix of `text` that `tail` ends with."""
    return next((size for size in range(len(text) - 1, 0, -1) if tail.endswith(text[:size])), 0)


def _role_in(piece: str, text: str) -> _Role:
    """What a token that writes `piece` can do for the marker `text`."""
    # A replacement character stands for a part of a character: it could be any.
    if "\ufffd" in piece or text in piece or _overlap(piece, text):
        return _Role.BEGINS
    continues = piece.strip() in text or any(
        piece.startswith(text[cut:]) for cut in range(1, len(text))
    )
    return _Role.CONTINUES if continues else _Role.NOTHING


def text_matcher(markers: ThinkingMarkers) -> TextMatcher | None:
    starts = markers.plain_texts(markers.start, markers.start_text)
    ends = markers.plain_texts(markers.end, markers.end_text)
    if markers.codec is None or not (starts or ends):
        return None
    return TextMatcher(markers.codec, starts, ends)
