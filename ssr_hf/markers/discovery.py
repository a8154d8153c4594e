"""The token sequences that open and close thinking, and how they are found from a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..errors import MarkerError, message
from .codec import Ids, TokenCodec
from .presets import PRESETS, Preset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MarkerSpec: TypeAlias = str | int | Sequence[int] | Sequence[str | Sequence[int]]


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
        preset: Preset | None = None
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


def _matches(codec: TokenCodec) -> list[Preset]:
    return [row for row in PRESETS if all(codec.is_atomic(piece) for piece in row.special)]


def _preset_closed_by(codec: TokenCodec, ids: Ids) -> Preset | None:
    """The family whose canonical end marker is `ids`: its other markers are then known as well."""
    return next((row for row in _matches(codec) if codec.encode(row.end[0]) == ids), None)


def _discover(codec: TokenCodec, template: str) -> Preset:
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


def _names(rows: Iterable[Preset]) -> str:
    return ", ".join(f"{row.end[0]!r} ({row.families})" for row in rows)
