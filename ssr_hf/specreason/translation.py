"""How two models hand text to each other: as ids where they share a vocabulary, else as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import MarkerError
from ..markers import PhaseTracker, ThinkingMarkers, TokenCodec
from .text import LONGEST_CHARACTER, splits_character, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]


class Translation(Protocol):
    """What the step writer needs to know about the vocabularies."""

    codec: TokenCodec  # the small model's
    stops: frozenset[int]  # ids of the small model that have no place inside thinking

    def prompt(self, base_ids: Sequence[int]) -> Ids:
        """The small model's prompt for a prompt of the base model."""

    def to_assistant(self, base_ids: Sequence[int]) -> Ids:
        """Committed ids of the base model, as ids of the small model."""

    def to_base(self, assistant_ids: Sequence[int]) -> Ids:
        """A step of the small model, as ids of the base model."""

    def is_same(self, base_ids: Sequence[int], assistant_ids: Sequence[int]) -> bool:
        """Whether both say the same, so that the small model need not read `base_ids`."""

    def watcher(self) -> PhaseTracker:
        """Follows a step of the small model, to see it close thinking."""

    def splits_character(self, base_ids: Sequence[int]) -> bool:
        """Whether `base_ids` stop where the small model cannot go on."""


class SharedIds:
    """Both models read the same ids; one of them may have padding rows that the other lacks.

    Args:
        codec (`TokenCodec`): The tokenizer of both.
        tracker (`PhaseTracker`): The base model's, which stands where a step begins.
        vocab_size (`int`): Ids below it are known to the small model.
    """

    def __init__(self, codec: TokenCodec, tracker: PhaseTracker, vocab_size: int) -> None:
        self.codec = codec
        self.stops = tracker.markers.boundaries
        self._tracker = tracker
        self.vocab_size = vocab_size

    def prompt(self, base_ids: Sequence[int]) -> Ids:
        return self.to_assistant(base_ids)

    def to_assistant(self, base_ids: Sequence[int]) -> Ids:
        # Ids beyond are padding of the embedding matrix: they write no text.
        return tuple(token_id for token_id in base_ids if token_id < self.vocab_size)

    def to_base(self, assistant_ids: Sequence[int]) -> Ids:
        return tuple(assistant_ids)

    def is_same(self, base_ids: Sequence[int], assistant_ids: Sequence[int]) -> bool:
        return tuple(base_ids) == tuple(assistant_ids)

    def watcher(self) -> PhaseTracker:
        return self._tracker.copy()

    def splits_character(self, base_ids: Sequence[int]) -> bool:
        return False


class TextHandOver:
    """Text is decoded with one tokenizer and encoded with the other; thinking markers are swapped.

    Nothing is added in the middle of a text, and both models read the same text: where encoding
    changes a step, the small model reads what the base model was given.

    Args:
        base_tokenizer (`PreTrainedTokenizerBase`): The base model's.
        base_markers (`ThinkingMarkers`): The base model's.
        assistant_tokenizer (`PreTrainedTokenizerBase`): The small model's.
        assistant_prompt (`str` or `Sequence[int]`, *optional*): The small model's prompt; the text
            of the base model's when None.

    Raises:
        MarkerError: The small model can write neither an end marker of its own nor the base's.
    """

    def __init__(
        self,
        base_tokenizer: PreTrainedTokenizerBase | Any,
        base_markers: ThinkingMarkers,
        assistant_tokenizer: PreTrainedTokenizerBase | Any,
        assistant_prompt: str | Sequence[int] | None,
    ) -> None:
        self.codec = TokenCodec(assistant_tokenizer)
        self._base_codec = TokenCodec(base_tokenizer)
        self._base_tokenizer = base_tokenizer
        self._tokenizer = assistant_tokenizer
        self._given_prompt = assistant_prompt
        self._base_markers = base_markers
        self._markers = _find_markers(assistant_tokenizer, self._base_codec, base_markers)
        self.stops = self._markers.boundaries

    def prompt(self, base_ids: Sequence[int]) -> Ids:
        given = self._given_prompt
        if given is not None and not isinstance(given, str):
            return tuple(given)
        text = self._prompt_text(base_ids) if given is None else given
        first = tuple(self._tokenizer("a")["input_ids"][:1])
        bos = self._tokenizer.bos_token
        adds_bos = bos is not None and first == (self._tokenizer.bos_token_id,)
        if adds_bos and not text.startswith(bos):
            text = bos + text
        return self.codec.encode(text)

    def _prompt_text(self, base_ids: Sequence[int]) -> str:
        """The text of a prompt: with turn tags if the small model knows them, else without."""
        edge = (self._base_tokenizer.bos_token_id, self._base_tokenizer.pad_token_id)
        ids = list(base_ids)
        while ids and ids[0] in edge:
            ids.pop(0)
        tags = self._base_codec.boundaries.intersection(ids)
        if not all(self.codec.is_atomic(self._base_codec.decode([tag])) for tag in tags):
            ids = [token_id for token_id in ids if token_id not in tags]
        return self._swap(self._base_codec.decode(ids))

    def _swap(self, text: str) -> str:
        """Text of the base model with its markers replaced by those of the small model."""
        base, own = self._base_markers, self._markers
        if base.start and own.start:
            written = self._base_codec.decode(base.start[0])
            text = text.replace(written, self.codec.decode(own.start[0]))
        return text.replace(self._base_codec.decode(base.closing), self.codec.decode(own.closing))

    def to_assistant(self, base_ids: Sequence[int]) -> Ids:
        return self.codec.encode(self._swap(text_of(self._base_codec, base_ids)))

    def to_base(self, assistant_ids: Sequence[int]) -> Ids:
        ids = list(assistant_ids)
        while splits_character(self.codec, ids) and len(assistant_ids) - len(ids) < (
            LONGEST_CHARACTER - 1
        ):
            ids.pop()
        text = text_of(self.codec, ids)
        ends = [self.codec.decode(end) for end in self._markers.end]
        found = [(text.index(end), end) for end in ends if end in text]
        if not found:
            return self._base_codec.encode(text)
        return self._base_codec.encode(text[: min(found)[0]]) + self._base_markers.closing

    def is_same(self, base_ids: Sequence[int], assistant_ids: Sequence[int]) -> bool:
        return text_of(self._base_codec, base_ids) == text_of(self.codec, assistant_ids)

    def watcher(self) -> PhaseTracker:
        opening = self._markers.start[0] if self._markers.start else ()
        return PhaseTracker(self._markers, opening)

    def splits_character(self, base_ids: Sequence[int]) -> bool:
        return splits_character(self._base_codec, base_ids)


def _find_markers(
    tokenizer: PreTrainedTokenizerBase | Any, base_codec: TokenCodec, base: ThinkingMarkers
) -> ThinkingMarkers:
    """The small model's own markers, or else those of the base model as plain text."""
    try:
        return ThinkingMarkers.from_tokenizer(tokenizer)
    except MarkerError:
        return ThinkingMarkers.from_tokenizer(
            tokenizer,
            end_of_thinking=[base_codec.decode(ids) for ids in base.end],
            start_of_thinking=[base_codec.decode(ids) for ids in base.start],
        )
