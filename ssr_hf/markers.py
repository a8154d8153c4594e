"""Where thinking begins and ends: marker discovery and the phase of a running generation.

Everything here works on token ids and is cheap enough to run once per token. A wrong guess about
the phase can cost speed, never correctness: no output token depends on it unless a thinking budget
is asked for.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .errors import MarkerError, message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids: TypeAlias = tuple[int, ...]
MarkerSpec: TypeAlias = str | int | Sequence[int] | Sequence[str | Sequence[int]]


class _Preset(NamedTuple):
    """One family; a row matches if each of `special` is one token of the vocabulary."""

    families: str
    special: tuple[str, ...]
    start: str
    end: tuple[str, ...]
    pause: tuple[str, ...] = ()


_HARMONY_FINAL = "<|channel|>final<|message|>"

PRESETS: tuple[_Preset, ...] = (
    _Preset("Qwen, DeepSeek, SmolLM3, GLM, Kimi K2", ("</think>",), "<think>", ("</think>",)),
    _Preset("Gemma 4", ("<|channel>", "<channel|>"), "<|channel>thought", ("<channel|>",)),
    _Preset(
        "gpt-oss",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        "<|channel|>analysis<|message|>",
        # The short form is how an answer without any analysis begins.
        (f"<|end|><|start|>assistant{_HARMONY_FINAL}", _HARMONY_FINAL),
        pause=("<|end|>",),
    ),
    _Preset("Magistral", ("[/THINK]",), "[THINK]", ("[/THINK]",)),
    _Preset("Seed", ("</seed:think>",), "<seed:think>", ("</seed:think>",)),
    _Preset("Cohere", ("<|END_THINKING|>",), "<|START_THINKING|>", ("<|END_THINKING|>",)),
    _Preset("Kimi-VL", ("◁/think▷",), "◁think▷", ("◁/think▷",)),
)

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


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """The token sequences that open and close a model's thinking.

    Args:
        start (`tuple[tuple[int, ...], ...]`): Alternative sequences that open thinking. Empty when
            the model never writes one: then a generation is thinking from its first token on.
        end (`tuple[tuple[int, ...], ...]`): Alternative sequences that close thinking; the first
            one is canonical.
        start_text (`tuple[str, ...]`): The text of each `start` sequence, `""` if given as ids.
        end_text (`tuple[str, ...]`): The text of each `end` sequence, `""` if given as ids.
        pause (`frozenset[int]`): Tokens that leave thinking without beginning the answer (the end
            of one message where a turn may hold several).
        boundaries (`frozenset[int]`): Tokens that separate the turns of a prompt.
        codec (`TokenCodec`, *optional*): Needed to recognise markers that are ordinary text, whose
            tokens may merge with their neighbours.

    Raises:
        MarkerError: If there is no end marker, or a sequence is empty or holds something other than
            token ids.

    Example:

    ```python
    >>> from ssr_hf.markers import PhaseTracker, ThinkingMarkers

    >>> markers = ThinkingMarkers(start=((7,),), end=((8, 9),))
    >>> markers.closing
    (8, 9)
    >>> tracker = PhaseTracker(markers, prompt_ids=[1, 2, 7])
    >>> [tracker.push(token).value for token in (3, 8, 9, 4)]
    ['thinking', 'closing', 'answering', 'answering']

    ```
    """

    start: tuple[Ids, ...]
    end: tuple[Ids, ...]
    start_text: tuple[str, ...] = ()
    end_text: tuple[str, ...] = ()
    pause: frozenset[int] = frozenset()
    boundaries: frozenset[int] = frozenset()
    codec: TokenCodec | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.end:
            raise MarkerError(
                message(
                    "No end-of-thinking marker was given",
                    "At least one sequence of token ids is needed",
                    "Pass end_of_thinking=, or leave it None to discover it from the tokenizer",
                )
            )
        for ids in (*self.start, *self.end):
            if not ids or not all(_is_id(index) for index in ids):
                raise MarkerError(
                    message(
                        f"{ids!r} is not a marker",
                        "A marker is a non-empty sequence of token ids >= 0",
                        "Look the ids up with tokenizer.encode(text, add_special_tokens=False)",
                    )
                )

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: PreTrainedTokenizerBase | Any,
        end_of_thinking: MarkerSpec | None = None,
        start_of_thinking: MarkerSpec | None = None,
    ) -> ThinkingMarkers:
        """Finds the markers of a model, or checks those given.

        Args:
            tokenizer (`PreTrainedTokenizerBase`): The model's tokenizer, or a processor that holds
                it.
            end_of_thinking (`str`, `list[int]` or a list of either, *optional*): What closes
                thinking, as text or token ids; of several alternatives the first is the one that
                drafts append.
            start_of_thinking (`str`, `list[int]` or a list of either, *optional*): What opens
                thinking. An empty list says that the model never writes an opening marker.

        Returns:
            [`ThinkingMarkers`]: The markers as token ids.

        Raises:
            MarkerError: If no known family, or more than one, fits the vocabulary, or if a marker
                given cannot be written with it.
        """
        codec = TokenCodec(tokenizer)
        preset: _Preset | None = None
        if end_of_thinking is None:
            preset = _discover(codec, _template_of(tokenizer))
            end_of_thinking = preset.end
        end = _parse(codec, "end_of_thinking", end_of_thinking)
        if preset is None and end:
            preset = _preset_closed_by(codec, end[0].ids)
        if start_of_thinking is None:
            start_of_thinking = preset.start if preset else ()
        start = _parse(codec, "start_of_thinking", start_of_thinking)
        pause = [text for text in (preset.pause if preset else ()) if codec.is_atomic(text)]
        pieces = {index for marker in (*start, *end) for index in marker.ids}
        return cls(
            start=tuple(marker.ids for marker in start),
            end=tuple(marker.ids for marker in end),
            start_text=tuple(marker.text for marker in start),
            end_text=tuple(marker.text for marker in end),
            pause=frozenset(codec.encode(text)[0] for text in pause),
            boundaries=codec.boundaries - pieces,
            codec=codec,
        )

    @property
    def closing(self) -> Ids:
        """The canonical end marker: what a draft appends and a budget forces."""
        return self.end[0]

    def plain_texts(self, ids: tuple[Ids, ...], texts: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `texts` whose outer tokens may merge with a neighbour: ids alone miss them."""
        if self.codec is None:
            return ()
        added = self.codec.added
        pairs = zip(ids, texts, strict=False)
        return tuple(text for ids_, text in pairs if text and not {ids_[0], ids_[-1]} <= added)


class _Marker(NamedTuple):
    ids: Ids
    text: str


def _parse(codec: TokenCodec, name: str, spec: MarkerSpec) -> tuple[_Marker, ...]:
    """Normalises what a user may pass for one argument into `(ids, text)` pairs."""
    items: list[Any] = [spec] if isinstance(spec, (str, int)) else list(spec)
    if items and not any(isinstance(item, Sequence) for item in items):
        items = [items]
    return tuple(
        _from_text(codec, name, item) if isinstance(item, str) else _from_ids(codec, name, item)
        for item in items
    )


def _from_text(codec: TokenCodec, name: str, text: str) -> _Marker:
    ids = codec.encode(text)
    if not ids or text.strip() not in codec.decode(ids):
        raise MarkerError(
            message(
                f"{name}={text!r} reads back as {codec.decode(ids)!r} from this tokenizer",
                "The text of a marker must survive encode and decode",
                f"Pass the token ids instead, {name}=[...]",
            )
        )
    return _Marker(ids, text)


def _from_ids(codec: TokenCodec, name: str, ids: Any) -> _Marker:
    checked = tuple(ids) if isinstance(ids, Sequence) else ()
    if not checked or not all(_is_id(index) and index < len(codec) for index in checked):
        raise MarkerError(
            message(
                f"{name} holds {ids!r}, which is not a sequence of token ids",
                f"Ids from 0 to {len(codec) - 1}, text, or a list of either are accepted",
                f"Pass for instance {name}=tokenizer.encode('</think>', add_special_tokens=False)",
            )
        )
    return _Marker(tuple(int(index) for index in checked), "")


def _is_id(value: Any) -> bool:
    """Integers of other libraries count as well, booleans do not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _matches(codec: TokenCodec) -> list[_Preset]:
    return [row for row in PRESETS if all(codec.is_atomic(piece) for piece in row.special)]


def _preset_closed_by(codec: TokenCodec, ids: Ids) -> _Preset | None:
    """The family whose canonical end marker is `ids`: its other markers are then known as well."""
    return next((row for row in _matches(codec) if codec.encode(row.end[0]) == ids), None)


def _discover(codec: TokenCodec, template: str) -> _Preset:
    """The one family that fits: by its tokens, else by what the chat template writes."""
    fitting = _matches(codec)
    in_template = [
        row for row in fitting or PRESETS if all(piece in template for piece in row.special)
    ]
    for found in (fitting, in_template):
        if len(found) == 1:
            return found[0]
    if fitting or in_template:
        what = f"Several thinking markers fit this tokenizer: {_names(fitting or in_template)}"
        accepted = "Exactly one family must fit"
    else:
        what = f"This tokenizer has no known end-of-thinking marker, tried: {_names(PRESETS)}"
        accepted = "One of them must be a token of the vocabulary or stand in the chat template"
    raise MarkerError(
        message(
            what,
            accepted,
            "Pass your model's marker as end_of_thinking='</think>' (text) or end_of_thinking=[id] "
            "(token ids), and start_of_thinking= if the model writes one",
        )
    )


def _template_of(tokenizer: PreTrainedTokenizerBase | Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return "" if template is None else str(template)


def _names(rows: Iterable[_Preset]) -> str:
    return ", ".join(f"{row.end[0]!r} ({row.families})" for row in rows)


class Phase(str, Enum):
    """Where a generation stands."""

    NONE = "none"
    THINKING = "thinking"
    CLOSING = "closing"
    ANSWERING = "answering"


class _State(NamedTuple):
    """What the last tokens amount to: a completed marker, or an end marker in progress."""

    starts: bool = False
    ends: bool = False
    progress: int = 0
    rest: Ids = ()


class _Automaton(NamedTuple):
    """All markers as one matcher: `moves[state].get(token, 0)` is the next state, 0 the first."""

    moves: tuple[dict[int, int], ...]
    states: tuple[_State, ...]


@lru_cache(maxsize=32)
def _automaton(start: tuple[Ids, ...], end: tuple[Ids, ...]) -> _Automaton:
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
    return _Automaton(moves, tuple(_describe(prefix, start, end) for prefix in prefixes))


def _describe(text: Ids, start: tuple[Ids, ...], end: tuple[Ids, ...]) -> _State:
    progress = 0
    rest: Ids = ()
    for ids in end:
        for size in range(min(len(ids) - 1, len(text)), progress, -1):
            if text[-size:] == ids[:size]:
                progress, rest = size, ids[size:]
                break
    return _State(
        starts=any(text[-len(ids) :] == ids for ids in start),
        ends=any(text[-len(ids) :] == ids for ids in end),
        progress=progress,
        rest=rest,
    )


class _TextMatcher:
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

    def copy(self) -> _TextMatcher:
        twin = copy(self)
        twin._window = self._window.copy()
        return twin

    def push(self, token: int) -> _State:
        """What the text up to `token` amounts to; decodes only what may belong to a marker."""
        self._window.append(token)
        role = self._role(token)
        self._is_begun = role is _Role.BEGINS or (self._is_begun and role is _Role.CONTINUES)
        if not self._is_begun:
            self._rest, self._progress = (), 0
            return _NOTHING
        window = list(self._window)
        before, after = self._codec.decode(window[:-1]), self._codec.decode(window)
        self._follow(token, window, after)
        return _State(
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


_NOTHING = _State()


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


class PhaseTracker:
    """Follows one sequence through thinking, closing and answering, one token at a time.

    The prompt decides the first phase. Only what follows its last turn boundary counts, so markers
    in earlier turns and in user messages are ignored:

    - the last marker there opens thinking: `THINKING`;
    - the last marker there closes it (thinking switched off, or a prefilled answer): `ANSWERING`;
    - no marker there: `NONE`, as the model may open thinking itself; `THINKING` if there is no
      opening marker.

    Where no turn boundaries are known, the whole prompt counts, and a closing marker followed by
    anything but white space (by more than two tokens, without a tokenizer) is an earlier turn's.

    Args:
        markers ([`ThinkingMarkers`]): The markers of the model.
        prompt_ids (`Sequence[int]`): The prompt, left padding allowed.

    Attributes:
        markers ([`ThinkingMarkers`]): The markers given.
        blocks (`int`): Thinking blocks so far: one opened by the prompt, each one opened since.
        n_answer (`int`): Generated tokens since thinking was closed last, the marker excluded.
    """

    __slots__ = (
        "_automaton",
        "_base",
        "_block",
        "_match",
        "_paused",
        "_state",
        "_text",
        "blocks",
        "markers",
        "n_answer",
    )

    def __init__(self, markers: ThinkingMarkers, prompt_ids: Sequence[int]) -> None:
        self.markers = markers
        self._automaton = _automaton(markers.start, markers.end)
        self._text = _text_matcher(markers)
        self._state = 0
        self._match = _NOTHING
        self._base = self._unopened
        self._block = self.blocks = self.n_answer = 0
        self._paused = False
        self._read_prompt(prompt_ids)

    @property
    def phase(self) -> Phase:
        """The phase after the last token; `CLOSING` while an end marker is incomplete."""
        return Phase.CLOSING if self.closing_progress else self._base

    @property
    def n_thinking(self) -> int:
        """Generated tokens of the current (or last) thinking block, markers excluded."""
        return max(0, self._block - (0 if self._paused else self.closing_progress))

    @property
    def n_open(self) -> int:
        """Like `n_thinking`, but an incomplete end marker counts too: what a budget compares."""
        return self._block

    @property
    def is_open(self) -> bool:
        """Whether a thinking block is open (`THINKING` or `CLOSING`)."""
        return self._base is Phase.THINKING

    @property
    def is_paused(self) -> bool:
        """Whether the model has left the open block for the answer or something else."""
        return self.is_open and self._paused

    @property
    def closing_progress(self) -> int:
        """How many of the last tokens are the beginning of an end marker."""
        return self._match.progress if self.is_open else 0

    def remaining_closing(self) -> tuple[int, ...]:
        """The ids that complete the end marker in progress, or else write the canonical one.

        Empty outside a thinking block.
        """
        if not self.is_open:
            return ()
        return self._match.rest if self._match.progress else self.markers.closing

    def push(self, token_id: int) -> Phase:
        """Takes the next token of the sequence and returns the phase after it."""
        progress = 0 if self._paused else self.closing_progress
        match = self._match = self._recognise(token_id)
        if self._base is Phase.THINKING:
            self._push_inside(token_id, match, progress)
        elif match.starts:
            self._open()
        elif self._base is Phase.ANSWERING:
            self.n_answer += 1
            if token_id in self.markers.pause:
                self._base = self._unopened
        elif match.ends:
            self._answer()
        return self.phase

    def copy(self) -> PhaseTracker:
        """An independent tracker in the same state."""
        twin = copy(self)
        twin._text = self._text.copy() if self._text else None
        return twin

    @property
    def _unopened(self) -> Phase:
        return Phase.NONE if self.markers.start else Phase.THINKING

    def _push_inside(self, token_id: int, match: _State, progress: int) -> None:
        """One token of an open block; `progress` is how much of it was an end marker so far."""
        if match.ends:
            self._block = max(0, self._block - progress)
            self._answer()
            return
        if token_id in self.markers.pause:
            self._paused = True
        elif not self._paused:
            self._block += 1
        if self._paused and not match.progress:
            self._base = self._unopened
            self._paused = False
            if match.starts:
                self._open()

    def _open(self) -> None:
        self._base = Phase.THINKING
        self._block = 0
        self._paused = False
        self.blocks += 1

    def _answer(self) -> None:
        self._base = Phase.ANSWERING
        self._paused = False
        self.n_answer = 0

    def _recognise(self, token_id: int) -> _State:
        self._state = self._automaton.moves[self._state].get(token_id, 0)
        match = self._automaton.states[self._state]
        text = self._text.push(token_id) if self._text else _NOTHING
        if match.ends or (match.starts and not self.is_open):
            # The tokens of one marker are never the beginning of another.
            self._state = 0
            return match._replace(progress=0, rest=())
        is_further = text.starts or text.ends or text.progress > match.progress
        return text if is_further else match

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        boundaries = self.markers.boundaries
        places = range(len(prompt_ids) - 1, -1, -1)
        first = next((at for at in places if prompt_ids[at] in boundaries), -1) + 1
        closed_at = first
        for at in range(first, len(prompt_ids)):
            self.push(prompt_ids[at])
            if self._match.ends:
                closed_at = at
        is_closed = self._base is Phase.ANSWERING
        if is_closed and not boundaries and self._is_old_turn(prompt_ids[closed_at + 1 :]):
            self._base = self._unopened
        self._block = self.n_answer = 0
        self.blocks = int(self.is_open)

    def _is_old_turn(self, after: Sequence[int]) -> bool:
        """Whether more follows a closed block than a template writes where thinking is off."""
        codec = self.markers.codec
        return len(after) > 2 if codec is None else bool(codec.decode(after).strip())


def _text_matcher(markers: ThinkingMarkers) -> _TextMatcher | None:
    starts = markers.plain_texts(markers.start, markers.start_text)
    ends = markers.plain_texts(markers.end, markers.end_text)
    if markers.codec is None or not (starts or ends):
        return None
    return _TextMatcher(markers.codec, starts, ends)
