"""Every way to stop, at every place: nothing after it is emitted, streamed, scored or cached."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, build_model, random_prompt
from helpers import (
    LANES,
    Declared,
    Pair,
    RecordingStreamer,
    assert_same,
    declare,
    enabled,
    generate,
    pair_tokenizer,
    run_both,
    scripted_drafts,
    true_up_to,
)
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria

from ssr_hf import ConfigError, SelfSpeculationConfig

FAMILY = "lfm2"
RECORDED = {"output_scores": True, "output_logits": True}
every_lane = pytest.mark.parametrize("lane", LANES)


def _declare() -> Declared:
    """The first ten tokens of the answer are all new, so each can be declared the end."""
    return declare(FAMILY, n_new=11)


def _run(
    declared: Declared,
    config: SelfSpeculationConfig | None = None,
    fresh: Callable[[], dict[str, Any]] = dict,
    **arguments: Any,
) -> Pair:
    """Both ways with an oracle for drafts: without a stop, all of the answer would be accepted."""
    streamers: list[RecordingStreamer] = []

    def with_streamer() -> dict[str, Any]:
        streamers.append(RecordingStreamer())
        return {"streamer": streamers[-1], **fresh()}

    with scripted_drafts(true_up_to(declared.answer, 100)):
        pair = run_both(
            build_model(FAMILY),
            declared.prompt,
            config or declared.config(),
            fresh=with_streamer,
            **{**RECORDED, **arguments},
        )
    assert_same(pair)
    assert streamers[1].events == streamers[0].events
    return pair


@pytest.mark.parametrize("position", range(10))
def test_eos_at_every_position_of_the_verified_draft(position: int) -> None:
    """Generation that runs past an EOS accepted inside a block, or counts what came after it."""
    declared = _declare()
    pair = _run(declared, eos_token_id=[declared.answer[position], 255])
    assert pair.stats.answer_tokens == position + 1
    assert pair.stats.accepted_prefix == position + 1


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("place", ["thinking", "branch point", "marker", "suffix round"])
@every_lane
def test_eos_everywhere_else(lane: str, place: str, recorded: bool) -> None:
    """EOS while a draft rides along, as the marker itself, or in a span of the suffix index."""
    declared = _declare()
    at = {"thinking": 9, "branch point": 4, "marker": declared.n_thinking, "suffix round": 40}[
        place
    ]
    pair = _run(
        declared,
        declared.config(lane=lane, reuse="suffix"),
        eos_token_id=declared.new_ids[at],
        # Without them, a block is committed at once.
        output_scores=recorded,
        output_logits=recorded,
    )
    ended = place in ("marker", "suffix round")
    assert pair.stats.thinking_ended is ended
    assert bool(pair.stats.answer_tokens) is (place == "suffix round")


def test_no_answer_follows_an_end_inside_thinking() -> None:
    """A draft that is appended although the model ended while it was thinking."""
    declared = _declare()
    pair = _run(declared, eos_token_id=declared.new_ids[10])
    assert pair.stats.thinking_ended is False
    assert pair.stats.answer_tokens == 0
    assert [draft.status for draft in pair.stats.drafts] == ["discarded"]
    assert not any(r.source == "draft" for r in pair.stats.rounds)


def test_without_eos_and_pad_it_runs_to_the_limit() -> None:
    """A crash where neither EOS nor padding is configured."""
    model = build_model(FAMILY)
    before = model.generation_config.pad_token_id
    model.generation_config.pad_token_id = None
    try:
        pair = _run(_declare(), eos_token_id=None)
    finally:
        model.generation_config.pad_token_id = before
    assert pair.stats.new_tokens == 48


def _stop_string(declared: Declared, span: str) -> str:
    text = [pair_tokenizer().decode([token_id]) for token_id in declared.answer]
    return {
        "one token": text[3],
        "part of a token and the next": text[3][1] + text[4],
        "the edge of the draft": text[4] + text[5] + text[6][0],
        "only behind the draft": text[8] + text[9],
    }[span]


@pytest.mark.parametrize(
    "span",
    [
        "one token",
        "part of a token and the next",
        "the edge of the draft",
        "only behind the draft",
    ],
)
def test_stop_string_in_the_answer(span: str) -> None:
    """Text that goes on after a stop string completed inside a block or across its edge."""
    declared = _declare()
    config = declared.config(max_draft_tokens=6)
    stop = _stop_string(declared, span)
    pair = _run(declared, config, stop_strings=stop, tokenizer=pair_tokenizer())
    assert pair.stats.thinking_ended
    assert pair.stats.answer_tokens <= 10
    assert stop in pair_tokenizer().decode(pair.fast.sequences[0])


@pytest.mark.parametrize("given", ["kwarg", "generation_config", "model", "positional"])
def test_stop_strings_from_every_source(given: str) -> None:
    """A stop string that is dropped, or fails for want of a tokenizer that was passed."""
    declared = _declare()
    model = build_model(FAMILY)
    stop = [_stop_string(declared, "one token")]
    settings = {"max_new_tokens": 48, "stop_strings": stop, "return_dict_in_generate": True}
    outputs = []
    for speculation in (None, declared.config()):
        arguments: dict[str, Any] = {
            "attention_mask": torch.ones_like(declared.prompt),
            "tokenizer": pair_tokenizer(),
        }
        positional: list[Any] = [declared.prompt]
        if given == "kwarg":
            arguments.update(settings)
        elif given == "generation_config":
            arguments["generation_config"] = GenerationConfig(**settings)
        elif given == "positional":
            positional.append(GenerationConfig(**settings))
        else:
            arguments.update(max_new_tokens=48, return_dict_in_generate=True)
            model.generation_config.stop_strings = stop
        try:
            with enabled(model):
                outputs.append(
                    model.generate(*positional, self_speculation=speculation, **arguments)
                )
        finally:
            model.generation_config.stop_strings = None
    assert outputs[1].sequences.tolist() == outputs[0].sequences.tolist()
    assert outputs[1].sequences.shape[1] < 40


@pytest.mark.parametrize("switch", ["stop_strings", "eos_token_id"])
def test_none_switches_a_default_off(switch: str) -> None:
    """A default of the model that comes back although the call switched it off."""
    declared = _declare()
    model = build_model(FAMILY)
    default = {
        "stop_strings": [_stop_string(declared, "one token")],
        "eos_token_id": declared.answer[3],
    }[switch]
    setattr(model.generation_config, switch, default)
    try:
        pair = _run(declared, **{switch: None}, tokenizer=None)
    finally:
        setattr(model.generation_config, switch, None)
    assert pair.stats.new_tokens == 48


def test_stop_strings_without_a_tokenizer_are_refused_by_name() -> None:
    """The host's message, which asks for an argument that was passed to someone else."""
    declared = _declare()
    model = build_model(FAMILY)
    with enabled(model), pytest.raises(ConfigError, match="tokenizer=tokenizer"):
        generate(model, declared.prompt, self_speculation=declared.config(), stop_strings="aa")


class PrefixCriterion(StoppingCriteria):
    """Keeps every text it is asked about and stops after `limit` new tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        return torch.tensor([len(self.seen) >= self.limit])


@pytest.mark.parametrize("beyond", [-12, -1, 0, 1, 6, 15])
def test_custom_criterion_sees_every_committed_prefix_once(beyond: int) -> None:
    """A criterion asked once per block, about candidates, or after it said stop."""
    declared = _declare()
    criteria: list[PrefixCriterion] = []

    def fresh() -> dict[str, Any]:
        criteria.append(PrefixCriterion(limit=declared.n_thinking + beyond))
        return {"stopping_criteria": StoppingCriteriaList(criteria[-1:])}

    _run(declared, fresh=fresh)
    plain, fast = criteria
    assert fast.seen == plain.seen
    assert len(fast.seen) == declared.n_thinking + beyond


def test_criterion_gets_the_scores_so_far() -> None:
    """A criterion that reads `scores` and gets None, or those of candidates."""
    declared = _declare()
    lengths: list[list[int]] = []

    class ScoreCriterion(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            lengths[-1].append(len(scores))
            return torch.tensor([False])

    def fresh() -> dict[str, Any]:
        lengths.append([])
        return {"stopping_criteria": [ScoreCriterion()]}

    _run(declared, fresh=fresh)
    assert lengths[1] == lengths[0] == list(range(1, 49))


def test_flag_set_from_outside_stops_at_the_same_token() -> None:
    """A stop button that is looked at once per block."""
    declared = _declare()

    class Button(RecordingStreamer):
        def __init__(self, pressed: threading.Event) -> None:
            super().__init__()
            self.pressed = pressed

        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.events) == declared.n_thinking + 5:
                self.pressed.set()

    class Flag(StoppingCriteria):
        def __init__(self, pressed: threading.Event) -> None:
            self.pressed = pressed

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.tensor([self.pressed.is_set()])

    def fresh() -> dict[str, Any]:
        pressed = threading.Event()
        return {"streamer": Button(pressed), "stopping_criteria": [Flag(pressed)]}

    with scripted_drafts(true_up_to(declared.answer, 100)):
        pair = run_both(build_model(FAMILY), declared.prompt, declared.config(), fresh=fresh)
    assert_same(pair)
    assert pair.stats.new_tokens == declared.n_thinking + 5
    assert pair.stats.accepted_prefix > 0


def test_max_time_is_asked_after_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit that a long block of candidates overruns."""
    declared = _declare()
    ticks: list[float] = []

    def clock() -> float:
        ticks.append(0.0)
        return float(len(ticks))

    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=clock))
    limit = declared.n_thinking + 4

    def fresh() -> dict[str, Any]:
        ticks.clear()
        return {}

    pair = _run(declared, fresh=fresh, max_time=float(limit))
    assert pair.stats.thinking_ended
    assert pair.stats.new_tokens < 40


@pytest.mark.parametrize("argument", ["max_new_tokens", "max_length"])
@pytest.mark.parametrize("place", ["1", "2", "3", "in thinking", "marker", "1 behind", "in draft"])
@every_lane
def test_length_is_exact(lane: str, place: str, argument: str) -> None:
    """More tokens than allowed, in thinking, at the marker or inside the verified draft."""
    declared = _declare()
    n_thinking = declared.n_thinking
    places = {"in thinking": 12, "marker": n_thinking + 1, "1 behind": n_thinking + 2}
    n_new = places.get(place) or (n_thinking + 7 if place == "in draft" else int(place))
    limits = {argument: n_new}
    if argument == "max_length":
        limits = {"max_length": n_new + declared.prompt.shape[1], "max_new_tokens": None}
    pair = _run(declared, declared.config(lane=lane), **limits)
    assert pair.stats.new_tokens == n_new
    assert pair.stats.thinking_ended is (n_new > n_thinking)


def test_no_draft_where_too_few_tokens_remain() -> None:
    """A fork that is paid for although no answer can follow."""
    declared = _declare()
    pair = _run(declared, max_new_tokens=6, config=declared.config(draft_budget=4))
    assert not pair.stats.drafts


def test_draft_is_not_longer_than_what_remains() -> None:
    """Draft tokens written for an answer that the length limit cuts."""
    declared = _declare()
    config = declared.config(lane="sequential", max_draft_tokens=500)
    pair = _run(declared, config, max_new_tokens=declared.n_thinking + 4)
    (draft,) = pair.stats.drafts
    assert draft.n_tokens == declared.n_thinking + 4 - 5 - 1


@every_lane
def test_thinking_that_never_ends_costs_one_draft(lane: str) -> None:
    """Drafts without bound, or a fork that stays open, where the model never stops thinking."""
    declared = _declare()
    unused = {*range(1, 256)} - {*declared.new_ids} - {*declared.prompt[0].tolist()}
    config = SelfSpeculationConfig(
        end_of_thinking=[min(unused)],
        draft_budget=5,
        max_draft_tokens=8,
        lane=lane,
        adaptive=False,
    )
    pair = _run(declared, config)
    assert pair.stats.thinking_ended is False
    assert pair.stats.thinking_tokens == 48
    assert len(pair.stats.drafts) == 1
    assert pair.stats.forwards <= 48
    assert pair.stats.rounds[-1].rows == 1


def test_thinking_that_ends_before_the_budget() -> None:
    """A crash, or a draft, where the marker comes before the first branch point."""
    declared = declare(FAMILY, first=1, last=2)
    pair = _run(declared, declared.config(draft_budget=5))
    assert pair.stats.thinking_ended
    assert not pair.stats.drafts


@pytest.mark.parametrize("prompt_as", ["ids", "embeddings"])
def test_positions_never_pass_the_models_limit(prompt_as: str) -> None:
    """Candidates fed at positions that an absolute-position model does not have."""
    n_positions = 40
    model = FAMILIES["gpt2"].builder()
    model.generation_config.eos_token_id = None
    config = type(model.config)(**{**model.config.to_dict(), "n_positions": n_positions})
    torch.manual_seed(0)
    model = type(model)(config).eval()
    model.generation_config.pad_token_id = 0
    prompt = random_prompt(model, 9, seed=0)
    n_new = n_positions - 9 + 1  # the last token is never fed
    ids = generate(model, prompt, max_new_tokens=n_new).sequences[0, 9:].tolist()
    speculation = SelfSpeculationConfig(
        end_of_thinking=[ids[8]], draft_budget=2, max_draft_tokens=500, adaptive=False
    )
    # The limit of the call lies beyond that of the model.
    arguments: dict[str, Any] = {"max_new_tokens": 500}
    if prompt_as == "embeddings":
        arguments["inputs_embeds"] = model.get_input_embeddings()(prompt).detach()
        arguments["attention_mask"] = torch.ones_like(prompt)
    pair = run_both(
        model,
        prompt if prompt_as == "ids" else None,
        speculation,
        fresh=lambda: {"stopping_criteria": StoppingCriteriaList([PrefixCriterion(n_new)])},
        **arguments,
    )
    assert_same(pair)
    assert pair.stats.drafts
    assert pair.stats.suffix_accepted > 0
