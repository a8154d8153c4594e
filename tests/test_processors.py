"""Processors are called once per emitted token, in order, on true prefixes; plain's every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import build_model
from helpers import (
    LANES,
    STEADY_LANES,
    Declared,
    Pair,
    assert_same,
    collected_drafts,
    declare,
    find_marker,
    generate,
    run_both,
    run_fast,
    scripted_drafts,
    true_up_to,
)
from torch import Tensor
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process

from ssr_hf import ThinkingBudgetLogitsProcessor, ThinkingMarkers

FAMILY = "lfm2"
EOS = 250

# By the class that the setting makes `generate` build.
GREEDY_SETTINGS: dict[str, dict[str, Any]] = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": {"guidance_scale": 1.5},
    "SequenceBiasLogitsProcessor": {"sequence_bias": [[[17], -4.0], [[40, 41], 9.0]]},
    "EncoderRepetitionPenaltyLogitsProcessor": {"encoder_repetition_penalty": 1.3},
    "RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 1.3},
    "NoRepeatNGramLogitsProcessor": {"no_repeat_ngram_size": 2},
    "EncoderNoRepeatNGramLogitsProcessor": {"encoder_no_repeat_ngram_size": 2},
    "NoBadWordsLogitsProcessor": {"bad_words_ids": [[17], [40, 41]]},
    "MinLengthLogitsProcessor": {"min_length": 30},
    "MinNewTokensLengthLogitsProcessor": {"min_new_tokens": 30},
    "PrefixConstrainedLogitsProcessor": {
        "prefix_allowed_tokens_fn": lambda batch, ids: list(range(int(ids[-1]) % 3, 256, 3))
    },
    "ForcedBOSTokenLogitsProcessor": {"forced_bos_token_id": 5},
    "ForcedEOSTokenLogitsProcessor": {"forced_eos_token_id": 5},
    "InfNanRemoveLogitsProcessor": {"remove_invalid_values": True},
    "ExponentialDecayLengthPenalty": {"exponential_decay_length_penalty": (25, 1.2)},
    "SuppressTokensLogitsProcessor": {"suppress_tokens": list(range(1, 100))},
    "SuppressTokensAtBeginLogitsProcessor": {"begin_suppress_tokens": list(range(1, 200))},
    "WatermarkLogitsProcessor": {
        "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")
    },
    "LogitNormalization": {"renormalize_logits": True},
}
SAMPLED_SETTINGS: dict[str, dict[str, Any]] = {
    "TemperatureLogitsWarper": {"temperature": 0.4},
    "TopHLogitsWarper": {"top_h": 0.4},
    "TopKLogitsWarper": {"top_k": 3},
    "TopPLogitsWarper": {"top_p": 0.5},
    "MinPLogitsWarper": {"min_p": 0.2},
    "TypicalLogitsWarper": {"typical_p": 0.5},
    "EpsilonLogitsWarper": {"epsilon_cutoff": 0.05},
    "EtaLogitsWarper": {"eta_cutoff": 0.05},
    "SynthIDTextWatermarkLogitsProcessor": {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)
    },
}


def _declare(do_sample: bool = False) -> Declared:
    return declare(FAMILY, do_sample=do_sample)


def _run(fresh: Callable[[], dict[str, Any]] = dict, **arguments: Any) -> Pair:
    """Both ways, with a marker from the text under these settings and drafts true for 5 tokens."""
    model = build_model(FAMILY)
    prompt = _declare(bool(arguments.get("do_sample"))).prompt
    torch.manual_seed(0)
    text = generate(model, prompt, **fresh(), **arguments).sequences[0, 9:].tolist()
    n_thinking = find_marker(tuple(text), first=6)
    assert n_thinking is not None
    declared = Declared(prompt, tuple(text), n_thinking)
    config = declared.config(draft_budget=4, draft_interval=6, max_draft_tokens=8)
    with scripted_drafts(true_up_to(declared.answer, 5)):
        pair = run_both(model, prompt, config, fresh=fresh, **{"output_scores": True, **arguments})
    assert_same(pair)
    assert pair.stats.accepted_prefix + pair.stats.suffix_accepted >= 5
    return pair


def _set_up_by_the_host(settings: dict[str, Any]) -> list[str]:
    """Class names of the processors that `generate` builds for these settings."""
    names: list[str] = []

    def spy(model: Any, input_ids: Tensor, logits_processor: Any, **arguments: Any) -> Tensor:
        names.extend(type(processor).__name__ for processor in logits_processor)
        return input_ids

    build_model(FAMILY).generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=40, custom_generate=spy, **settings
    )
    return names


@pytest.mark.parametrize("name", GREEDY_SETTINGS)
def test_every_processor_of_greedy_search(name: str) -> None:
    """A processor applied to a block, to candidates, twice or not at all."""
    settings = {"eos_token_id": EOS, **GREEDY_SETTINGS[name]}
    assert name in _set_up_by_the_host(settings)
    _run(**settings)


@pytest.mark.parametrize("name", SAMPLED_SETTINGS)
def test_every_processor_of_sampling(name: str) -> None:
    """The same seed gives another text: draws out of order, or from other scores."""
    settings = {"do_sample": True, **SAMPLED_SETTINGS[name]}
    assert name in _set_up_by_the_host(settings)
    _run(**settings)


def test_no_processor_of_the_host_was_left_out() -> None:
    """A processor that a new release of the host adds and these tests do not know."""
    built = GenerationMixin._get_logits_processor.__code__.co_names
    known = {name for name in built if isinstance(getattr(logits_process, name, None), type)}
    known -= {"LogitsProcessorList"}
    assert known <= GREEDY_SETTINGS.keys() | SAMPLED_SETTINGS.keys()


class RecordingProcessor(LogitsProcessor):
    """Keeps every text it is called with; its result depends on how often it was called."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        # In place, as some processors do; a stranger to what it was called for.
        scores[:, (7 * len(self.seen)) % 256] += 2.0
        return scores


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_stateful_processor_sees_each_prefix_once(do_sample: bool) -> None:
    """A state machine advanced by candidates, by drafts, or by the probe of the model."""
    processors: list[RecordingProcessor] = []

    def fresh() -> dict[str, Any]:
        processors.append(RecordingProcessor())
        return {"logits_processor": LogitsProcessorList(processors[-1:])}

    _run(fresh, do_sample=do_sample, output_logits=True)
    _, plain, fast = processors
    assert fast.seen == plain.seen
    assert [len(ids) for ids in fast.seen] == list(range(9, 9 + 48))


@pytest.mark.parametrize("place", ["before the draft", "while it rides", "after", "at once"])
@pytest.mark.parametrize("lane", LANES)
def test_budget_of_the_user_is_met_to_the_token(lane: str, place: str) -> None:
    """A thinking budget that is overshot because it is looked at once per block."""
    declared = _declare()
    budget = {"at once": 0, "before the draft": 3, "while it rides": 7, "after": 12}[place]
    markers = ThinkingMarkers(start=(), end=((251, 252),))

    def fresh() -> dict[str, Any]:
        processor = ThinkingBudgetLogitsProcessor(markers, budget)
        return {"logits_processor": LogitsProcessorList([processor])}

    config = type(declared.config())(
        end_of_thinking=[251, 252], draft_budget=4, max_draft_tokens=6, lane=lane, adaptive=False
    )
    pair = run_both(build_model(FAMILY), declared.prompt, config, fresh=fresh, output_scores=True)
    assert_same(pair)
    new_ids = pair.fast.sequences[0, 9:].tolist()
    assert new_ids[budget : budget + 2] == [251, 252]
    assert pair.stats.thinking_tokens == budget + 2


@pytest.mark.parametrize("n_markers", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lane", LANES)
def test_budget_of_the_config_equals_the_processor(
    lane: str, do_sample: bool, n_markers: int
) -> None:
    """The built-in budget forces other tokens than `ThinkingBudgetLogitsProcessor` does."""
    declared = _declare(do_sample)
    config = type(declared.config())(
        end_of_thinking=[251, 252, 253][:n_markers],
        thinking_budget=11,
        draft_budget=(3, 8),
        max_draft_tokens=5,
        lane=lane,
        adaptive=False,
    )
    pair = run_both(
        build_model(FAMILY), declared.prompt, config, do_sample=do_sample, output_scores=True
    )
    assert_same(pair)
    assert pair.stats.thinking_tokens == 11 + n_markers
    assert len(pair.stats.drafts) == 2 or lane not in STEADY_LANES


class AfterMarker(LogitsProcessor):
    """A grammar that holds from the marker on: no token twice, odd and even in turns."""

    def __init__(self, marker: int) -> None:
        self.marker = marker

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids[0].tolist()
        if self.marker not in ids[9:]:
            return scores
        answer = ids[9 + ids[9:].index(self.marker) + 1 :]
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        allowed[:, len(answer) % 2 :: 2] = True
        allowed[:, answer] = False
        return scores.masked_fill(~allowed, -torch.inf)


@pytest.mark.parametrize("n_true", [0, 1, 4, 12])
@pytest.mark.parametrize("lane", LANES)
def test_constraint_that_starts_at_the_marker(lane: str, n_true: int) -> None:
    """A constraint switched on one block late, or a first answer token doubled or skipped."""
    declared = _declare()
    processors = LogitsProcessorList([AfterMarker(declared.marker[0])])
    plain = generate(build_model(FAMILY), declared.prompt, logits_processor=processors)
    answer = plain.sequences[0, 9 + declared.n_thinking + 1 :].tolist()
    config = declared.config(lane=lane, max_draft_tokens=12)
    with scripted_drafts(true_up_to(answer, n_true)):
        pair = run_both(build_model(FAMILY), declared.prompt, config, logits_processor=processors)
    assert_same(pair)
    assert len(set(answer)) == len(answer)
    assert pair.stats.accepted_prefix >= min(n_true, 4)


class MaskAll(LogitsProcessor):
    """Masks every token from some length on, as two grammars at odds do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < 9 + 30 else torch.full_like(scores, -torch.inf)


def test_row_without_a_token_fails_as_in_plain_sampling() -> None:
    """A token drawn from NaN where plain `generate` raises."""
    declared = _declare(do_sample=True)
    model = build_model(FAMILY)
    arguments = {"logits_processor": LogitsProcessorList([MaskAll()]), "do_sample": True}
    with pytest.raises(RuntimeError) as plain:
        generate(model, declared.prompt, **arguments)
    with pytest.raises(RuntimeError) as fast:
        run_fast(model, declared.prompt, declared.config(), **arguments)
    assert str(fast.value) == str(plain.value)


@pytest.mark.parametrize(
    "settings",
    [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [11, 12]}],
    ids=lambda settings: next(iter(settings), "none"),
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_draft_is_the_answer_to_the_thinking_so_far(family: str, settings: dict[str, Any]) -> None:
    """A draft whose processors see another prefix than thinking so far, marker and draft."""
    declared = declare(family)
    model = build_model(family)
    n_drafted, branch = 8, 5
    with collected_drafts() as drafts:
        config = declared.config(lane="sequential", draft_budget=branch, max_draft_tokens=n_drafted)
        fast = run_fast(model, declared.prompt, config, **settings)
    thinking = fast.sequences[:, : 9 + branch]
    text = torch.cat([thinking, torch.tensor([declared.marker])], dim=1)
    answer = generate(model, text, max_new_tokens=n_drafted, **settings).sequences
    assert drafts[0].token_ids == tuple(answer[0, text.shape[1] :].tolist())


@pytest.mark.parametrize("schedule", [{}, {"draft_budget": (3, 12), "max_draft_tokens": 7}])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next", "lfm2"])
def test_lanes_draft_the_same(family: str, schedule: dict[str, Any]) -> None:
    """A lane that drafts something else: lanes differ in how they draft, never in what."""
    declared = declare(family)
    by_lane: dict[str, list[tuple[int, ...]]] = {}
    for lane in LANES:
        with collected_drafts() as drafts:
            config = declared.config(lane=lane, **schedule)
            run_fast(build_model(family), declared.prompt, config)
        by_lane[lane] = [draft.token_ids for draft in drafts]
    reference = by_lane["sequential"]
    assert reference
    for lane, drafted in by_lane.items():
        # A draft in a thread may be late, and the next one with it.
        n_compared = len(reference) if lane in STEADY_LANES else min(1, len(drafted))
        assert n_compared <= len(drafted)
        for token_ids, expected in zip(drafted[:n_compared], reference, strict=False):
            # Thinking may end before a draft that rides along is complete.
            assert token_ids
            assert token_ids == expected[: len(token_ids)]
