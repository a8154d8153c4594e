"""A generation as a stream of text pieces, each with who proposed it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import ssr_hf

Pieces = list[tuple[str, str | None]]


@dataclass
class Progress:
    """How far a generation is.

    Args:
        pieces (`list[tuple[str, str | None]]`): Text and label; None for decoded text.
        n_tokens (`int`): Tokens so far.
        forwards (`int`): Forwards so far.
        accepted (`dict[str, int]`): Accepted tokens by who proposed them.
        seconds (`float`): What the generation has taken, however late the reader is.
        output (`Any`): What `generate` returned; None before the end.
    """

    pieces: Pieces = field(default_factory=list)
    n_tokens: int = 0
    forwards: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    output: Any = None


class _AbandonedError(Exception):
    """Ends a generation that nobody reads any more."""


class _RoundStreamer:
    """Collects tokens and hands them on, with round and time, when their round is complete.

    The time is taken here, in the thread of the generation: who reads and draws may be slower.
    """

    def __init__(self) -> None:
        self.rounds: queue.SimpleQueue[tuple[list[int], ssr_hf.Round, float] | None]
        self.rounds = queue.SimpleQueue()
        self.seconds = 0.0
        self.is_abandoned = False
        self._token_ids: list[int] = []
        self._prompt_is_next = True
        self._began = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_is_next:
            self._token_ids.extend(value.flatten().tolist())
        self._prompt_is_next = False

    def on_round(self, entry: ssr_hf.Round) -> None:
        if self.is_abandoned:
            raise _AbandonedError
        self.rounds.put((self._token_ids, entry, time.perf_counter() - self._began))
        self._token_ids = []

    def end(self) -> None:
        """The end is told by `finish`, once the output is there."""

    def finish(self) -> None:
        """The call has returned or failed."""
        self.seconds = time.perf_counter() - self._began
        self.rounds.put(None)


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    config: ssr_hf.SelfSpeculationConfig,
    max_new_tokens: int,
) -> Iterator[Progress]:
    """Generates in a thread and yields after every round.

    Args:
        model (`PreTrainedModel`): Given to `ssr_hf.enable` before.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer, with a chat template.
        prompt (`str`): The user's message.
        config (`SelfSpeculationConfig`): The settings.
        max_new_tokens (`int`): Longest generation.

    Yields:
        `Progress`: The same object, brought up to date; the last time with the output.

    Raises:
        `SelfSpeculationError`: The prompt is empty, or `generate` refuses the call.
    """
    inputs = encode(model, tokenizer, prompt)
    streamer = _RoundStreamer()
    progress = Progress()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            progress.output = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                streamer=streamer,
                tokenizer=tokenizer,
                self_speculation=config,
            )
        except BaseException as error:  # raised again by the reader
            failures.append(error)
        finally:
            streamer.finish()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    text = _LabelledText(tokenizer, progress.pieces, _end_tokens(model, tokenizer))
    try:
        while (item := streamer.rounds.get()) is not None:
            token_ids, entry, progress.seconds = item
            for token_id, source in zip(token_ids, entry.token_sources, strict=True):
                text.push(token_id, None if source == "model" else source)
            progress.n_tokens += len(token_ids)
            progress.forwards += 1
            accepted = progress.accepted.get(entry.source, 0) + entry.n_accepted
            progress.accepted[entry.source] = accepted
            yield progress
    finally:
        # Whoever has closed the page reads no further; the next click must not share the machine.
        streamer.is_abandoned = True
        thread.join()
    if failures:
        raise failures[0]
    progress.seconds = streamer.seconds
    progress.forwards = progress.output.speculation.forwards
    text.finish()
    yield progress


def encode(model: Any, tokenizer: Any, prompt: str) -> dict[str, torch.Tensor]:
    """What `generate` is given for a user's message.

    Raises:
        `ConfigError`: The prompt is empty.
    """
    if not prompt.strip():
        raise ssr_hf.ConfigError("The prompt is empty. Some text is accepted.")
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    return {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask")}


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text and are not shown; a model may have several."""
    configured = model.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return frozenset([*several, tokenizer.eos_token_id, tokenizer.pad_token_id]) - {None}


class _LabelledText:
    """Decodes tokens into pieces; neighbours with the same label are one piece."""

    def __init__(self, tokenizer: Any, pieces: Pieces, hidden: frozenset[int]) -> None:
        self._detokenizer = ssr_hf.IncrementalDetokenizer(tokenizer)
        self._pieces = pieces
        self._hidden = hidden
        self._label: str | None = None

    def push(self, token_id: int, label: str | None) -> None:
        if token_id not in self._hidden:
            self._label = label
            self._show(self._detokenizer.push(token_id))

    def finish(self) -> None:
        """Shows what is left of a character that no token completed."""
        self._show(self._detokenizer.finish())

    def _show(self, text: str) -> None:
        if self._pieces and self._pieces[-1][1] == self._label:
            self._pieces[-1] = (self._pieces[-1][0] + text, self._label)
        elif text:
            self._pieces.append((text, self._label))
