"""Thinking models as they come: templates, channels and split markers, in whole generations."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from families import build_model
from helpers import (
    LANES,
    STEADY_LANES,
    Pair,
    RecordingStreamer,
    assert_same,
    declare,
    generate,
    run_both,
    run_fast,
)
from tiny_tokenizers import FAMILIES, family_tokenizer, ids_of, prompt_ids
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TextStreamer,
)

from ssr_hf import SelfSpeculationConfig, ThinkingBudgetLogitsProcessor, ThinkingMarkers

QUESTION = [{"role": "user", "content": "Say </think> or not."}]
HISTORY = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1", "reasoning_content": "x", "thinking": "x"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2", "reasoning_content": "y", "thinking": "y"},
    *QUESTION,
]
# What a model of each family writes to open and to close its thinking.
OPENING = {"gpt_oss": "<|channel|>analysis<|message|>", "gemma4": "<|channel>thought\n"}
CLOSING = {
    "gpt_oss": "<|end|><|start|>assistant<|channel|>final<|message|>",
    "gemma4": "<channel|>",
    "magistral": "[/THINK]",
}
BRANCH = 4
N_THINKING = 14


@functools.cache
def _model() -> PreTrainedModel:
    """Random weights and room for every token of the tokenizers."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # Markers appear where a test writes them.
        model.lm_head.weight[256:] = 0
    return model


class Scripted(LogitsProcessor):
    """Makes the model write given tokens at given places of its text."""

    def __init__(self, prompt_length: int, script: Mapping[int, int]) -> None:
        self.prompt_length = prompt_length
        self.script = script

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = self.script.get(input_ids.shape[1] - self.prompt_length)
        if forced is None:
            return scores
        masked = torch.full_like(scores, -torch.inf)
        masked[:, forced] = 0.0
        return masked


def _run(
    family: str,
    messages: Any = QUESTION,
    script: str | None = None,
    lane: str = "lockstep",
    settings: Mapping[str, Any] | None = None,
    **switches: Any,
) -> Pair:
    """Both ways on a prompt of the family's template.

    In `script`, `#` stands for one token of the model's own; everything else is written as it is.
    """
    tokenizer = family_tokenizer(family)
    prompt = torch.tensor([prompt_ids(tokenizer, messages, **switches)])
    forced: dict[int, int] = {}
    place = 0
    for piece in (script or "").replace("#", "\0#\0").split("\0"):
        for token_id in ids_of(tokenizer, piece) if piece != "#" else [None]:
            if token_id is not None:
                forced[place] = token_id
            place += 1
    processors = LogitsProcessorList([Scripted(prompt.shape[1], forced)])
    config = SelfSpeculationConfig(
        draft_budget=BRANCH, max_draft_tokens=6, lane=lane, adaptive=False, **(settings or {})
    )
    pair = run_both(
        _model(),
        prompt,
        config,
        tokenizer=tokenizer,
        logits_processor=processors,
        max_new_tokens=max(place, 20) + 20,
    )
    assert_same(pair)
    return pair


@pytest.mark.parametrize("messages", [QUESTION, HISTORY], ids=["first turn", "third turn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_template_thinks_drafts_and_answers(family: str, messages: Any) -> None:
    """Markers of earlier turns or of the user taken for the model's; a phase never entered."""
    switches = {"thinking": True} if family == "deepseek_v3_1" else {"enable_thinking": True}
    opening = OPENING.get(family, "<think>\n")
    if family in ("deepseek_r1", "deepseek_v3_1", "qwen3_5"):
        opening = ""  # the template has written it
    if family == "magistral":
        opening = "[THINK]"
    script = opening + "#" * N_THINKING + CLOSING.get(family, "</think>") + "#" * 8
    pair = _run(family, messages, script, **switches)
    assert pair.stats.thinking_ended
    (draft,) = pair.stats.drafts
    assert draft.branch_tokens in (BRANCH, BRANCH + 1)
    assert pair.stats.answer_tokens == 8 + 20
    assert {r.phase for r in pair.stats.rounds} >= {"thinking", "answering"}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "smollm3", "gemma4"])
def test_thinking_switched_off_costs_nothing(family: str) -> None:
    """A fork, a marker or a wasted forward where the prompt has closed thinking."""
    pair = _run(family, enable_thinking=False, settings={"reuse": "prefix"})
    assert pair.stats.drafts == ()
    assert pair.stats.forwards == pair.stats.new_tokens
    assert {r.rows for r in pair.stats.rounds} == {1}
    assert {r.phase for r in pair.stats.rounds} <= {"prefill", "answering"}


@pytest.mark.parametrize("lane", LANES)
def test_opening_marker_in_the_prompt(lane: str) -> None:
    """Output that has only the closing marker: thinking from the first token on."""
    script = "#" * N_THINKING + "</think>" + "#" * 4
    pair = _run("deepseek_r1", script=script, lane=lane)
    assert pair.stats.rounds[1].phase == "thinking"
    assert pair.stats.thinking_tokens == N_THINKING + 1
    assert len(pair.stats.drafts) == 1


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_streamed_text_of_a_prefilled_block(
    skip_prompt: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A streamer that skips the prompt and shows the marker in it, or hides the first token."""
    tokenizer = family_tokenizer("deepseek_r1")
    prompt = torch.tensor([prompt_ids(tokenizer, QUESTION)])
    printed = []
    for config in (None, SelfSpeculationConfig(draft_budget=BRANCH, adaptive=False)):
        streamer = TextStreamer(tokenizer, skip_prompt=skip_prompt)
        arguments = {"streamer": streamer, "tokenizer": tokenizer, "max_new_tokens": 12}
        if config is None:
            generate(_model(), prompt, **arguments)
        else:
            run_fast(_model(), prompt, config, **arguments)
        printed.append(capsys.readouterr().out)
    assert printed[1] == printed[0] != ""


def test_empty_thinking_block() -> None:
    """A draft, or an error, where the model closes thinking at once."""
    pair = _run("qwen3", script="<think>\n\n</think>\n\n" + "#" * 8)
    assert pair.stats.drafts == ()
    assert pair.stats.thinking_ended


def test_thinking_cut_by_the_length_limit() -> None:
    """A draft that is handed out as an answer although thinking never ended."""
    pair = _run("deepseek_r1", script="#" * 30)
    assert pair.stats.thinking_ended is False
    assert pair.stats.answer_tokens == 0
    assert pair.stats.drafts[0].accepted_prefix == 0


def test_channels_in_turns() -> None:
    """A draft that is offered to the tool channel, or kept for the second analysis."""
    analysis = "<|channel|>analysis<|message|>" + "#" * 24
    commentary = "<|end|><|start|>assistant<|channel|>commentary<|message|>" + "#" * 4
    again = "<|end|><|start|>assistant" + analysis
    final = "<|end|><|start|>assistant<|channel|>final<|message|>" + "#" * 6
    pair = _run("gpt_oss", script=analysis + commentary + again + final)
    assert pair.stats.thinking_ended
    assert len(pair.stats.drafts) == 2
    rounds = [r for r in pair.stats.rounds if r.source == "draft"]
    assert {r.phase for r in rounds} == {"answering"}
    assert pair.stats.drafts[0].accepted_prefix == 0


def test_tool_call_inside_of_thinking() -> None:
    """Text of a call that ends thinking, or a draft that is never collected."""
    call = '<tool_call>\n{"name": "f"}\n</tool_call>'
    pair = _run("qwen3", script="<think>\n" + "#" * 6 + call + "#" * 6 + "</think>" + "#" * 4)
    assert pair.stats.thinking_ended
    assert len(pair.stats.drafts) == 1
    call_ids = ids_of(family_tokenizer("qwen3"), call)
    assert pair.stats.thinking_tokens == 2 + 12 + len(call_ids) + 1


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma4", "magistral"])
@pytest.mark.parametrize("lane", STEADY_LANES)
def test_budget_closes_every_family(lane: str, family: str) -> None:
    """A budget that forces another marker than the family's, or leaves the cache without it."""
    tokenizer = family_tokenizer(family)
    prompt = torch.tensor([prompt_ids(tokenizer, QUESTION)])
    opening = "[THINK]" if family == "magistral" else OPENING.get(family, "<think>\n")
    forced = dict(enumerate(ids_of(tokenizer, opening)))
    budget = ThinkingBudgetLogitsProcessor(
        ThinkingMarkers.from_tokenizer(tokenizer), 9, prompt.shape[1]
    )
    scripted = Scripted(prompt.shape[1], forced)
    plain = generate(_model(), prompt, logits_processor=LogitsProcessorList([scripted, budget]))
    config = SelfSpeculationConfig(
        thinking_budget=9, draft_budget=BRANCH, max_draft_tokens=5, lane=lane, adaptive=False
    )
    fast = run_fast(
        _model(),
        prompt,
        config,
        tokenizer=tokenizer,
        logits_processor=LogitsProcessorList([scripted]),
    )
    assert_same(Pair(plain, fast))
    text = tokenizer.decode(fast.sequences[0, prompt.shape[1] :])
    assert CLOSING.get(family, "</think>") in text
    assert fast.speculation is not None
    assert len(fast.speculation.drafts) == 1
    # All of the marker but its first token is known, so it is offered at once.
    n_closing = len(ids_of(tokenizer, CLOSING.get(family, "</think>")))
    offered = [r for r in fast.speculation.rounds if r.source == "marker"]
    assert sum(r.n_accepted for r in offered) == n_closing - 1


@pytest.mark.parametrize("n_marker", [2, 3, 5])
@pytest.mark.parametrize("lane", LANES)
def test_marker_of_several_tokens_across_blocks(lane: str, n_marker: int) -> None:
    """The first piece taken for the marker, or a marker lost at the edge of a block."""
    declared = declare("lfm2", n_new=6)
    at = declared.n_thinking
    marker = declared.new_ids[at : at + n_marker]
    config = SelfSpeculationConfig(
        end_of_thinking=marker, draft_budget=5, max_draft_tokens=6, lane=lane, adaptive=False
    )
    pair = run_both(build_model("lfm2"), declared.prompt, config, output_scores=True)
    assert_same(pair)
    assert pair.stats.thinking_ended
    assert pair.stats.thinking_tokens == at + n_marker


@pytest.mark.parametrize("lane", LANES)
def test_first_piece_of_a_marker_alone_is_a_false_alarm(lane: str) -> None:
    """A marker that is completed because it began."""
    declared = declare("lfm2", n_new=6)
    first, second = declared.new_ids[8], (declared.new_ids[9] + 1) % 256
    streamer = RecordingStreamer()
    config = SelfSpeculationConfig(
        end_of_thinking=[first, second], draft_budget=3, lane=lane, adaptive=False
    )
    pair = run_both(build_model("lfm2"), declared.prompt, config, fresh=dict)
    assert_same(pair)
    run_fast(build_model("lfm2"), declared.prompt, config, streamer=streamer)
    assert [event[2][0] for event in streamer.events[1:-1]] == list(declared.new_ids)
    assert pair.stats.thinking_ended is False


def test_a_draft_outlives_a_false_alarm() -> None:
    """A lone "<" in the chain of thought that cuts the only draft."""
    declared = declare("lfm2", n_new=6)
    first, second = declared.new_ids[8], (declared.new_ids[9] + 1) % 256
    config = SelfSpeculationConfig(
        end_of_thinking=[first, second], draft_budget=3, max_draft_tokens=12, adaptive=False
    )
    pair = run_both(build_model("lfm2"), declared.prompt, config, max_new_tokens=60)
    assert_same(pair)
    (draft,) = pair.stats.drafts
    assert draft.status != "cut"
