"""The text-generation pipeline takes `self_speculation` like any argument of `generate`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from families import build_model
from helpers import RecordingStreamer, declare, enabled, pair_tokenizer
from transformers import PreTrainedTokenizerFast, TextGenerationPipeline

FAMILY = "llama"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(pair_tokenizer())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _prompt(form: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    text = tokenizer.decode(declare(FAMILY).prompt[0])
    if form == "chat":
        return [{"role": "user", "content": text}]
    return [text, text] if form == "list" else text


@pytest.mark.parametrize("form", ["text", "chat", "list"])
def test_pipeline_gives_the_same_text(form: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """An argument that the pipeline refuses or keeps for itself, or a batch that goes wrong."""
    declared = declare(FAMILY)
    model = build_model(FAMILY)
    prompt = _prompt(form, tokenizer)
    arguments = {"max_new_tokens": 40, "do_sample": False}
    with enabled(model):
        pipe = TextGenerationPipeline(model=model, tokenizer=tokenizer)
        plain = pipe(prompt, **arguments)
        fast = pipe(prompt, **arguments, self_speculation=declared.config())
        settings = {"end_of_thinking": declared.marker, "draft_budget": 5}
        as_dict = pipe(prompt, **arguments, self_speculation=settings)
    assert fast == plain
    assert as_dict == plain
    assert tokenizer.decode(list(declared.new_ids[:40])) in str(plain)


def test_pipeline_hands_streamer_and_stop_strings_on(tokenizer: PreTrainedTokenizerFast) -> None:
    """A stream that never ends, or a stop string that fails for want of a tokenizer."""
    declared = declare(FAMILY)
    model = build_model(FAMILY)
    stop = tokenizer.decode(list(declared.answer[2:4]))
    events, texts = [], []
    with enabled(model):
        pipe = TextGenerationPipeline(model=model, tokenizer=tokenizer)
        for config in (None, declared.config()):
            streamer = RecordingStreamer()
            texts.append(
                pipe(
                    _prompt("text", tokenizer),
                    max_new_tokens=40,
                    do_sample=False,
                    streamer=streamer,
                    stop_strings=[stop],
                    tokenizer=tokenizer,
                    self_speculation=config,
                )
            )
            events.append(streamer.events)
    assert texts[1] == texts[0]
    assert events[1] == events[0]
    assert texts[0][0]["generated_text"].endswith(stop)


def test_two_sequences_per_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    """A pipeline that returns one sequence where two were asked for."""
    model = build_model(FAMILY)
    with enabled(model):
        pipe = TextGenerationPipeline(model=model, tokenizer=tokenizer)
        results = pipe(
            _prompt("text", tokenizer),
            max_new_tokens=8,
            do_sample=True,
            num_return_sequences=2,
            self_speculation=declare(FAMILY).config(),
        )
    assert len(results) == 2
