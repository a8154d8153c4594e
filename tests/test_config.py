"""Settings: every default, every range, every message; nothing unknown is accepted."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from ssr_hf import ConfigError, SelfSpeculationConfig, SuffixConfig

DEFAULTS = {
    "end_of_thinking": None,
    "start_of_thinking": None,
    "draft_budget": None,
    "draft_interval": None,
    "max_draft_tokens": 500,
    "thinking_budget": None,
    "reuse": "prefix+suffix",
    "lane": "auto",
    "suffix": SuffixConfig(),
    "acceptance": "exact_match",
    "adaptive": True,
}
SUFFIX_DEFAULTS = {
    "max_match": 16,
    "max_tokens": 64,
    "factor": 8.0,
    "min_probability": 0.05,
    "sources": ("draft", "prompt", "thinking", "answer", "history"),
}


def test_defaults_are_the_documented_ones() -> None:
    """A default that changes without anyone noticing."""
    config = SelfSpeculationConfig()
    assert {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} == DEFAULTS
    assert config.draft_budgets == (128,)
    assert dataclasses.asdict(SuffixConfig()) == SUFFIX_DEFAULTS


@pytest.mark.parametrize("cls", [SelfSpeculationConfig, SuffixConfig])
def test_every_setting_is_documented_with_its_default(cls: type) -> None:
    """A setting that nobody can find."""
    for field in dataclasses.fields(cls):
        assert f"{field.name} (`" in (cls.__doc__ or "")


def test_published_setting() -> None:
    """Reference figures that are compared with other settings than the published ones."""
    config = SelfSpeculationConfig.reference()
    assert (config.draft_budgets, config.max_draft_tokens, config.thinking_budget) == (
        (500,),
        500,
        2000,
    )
    assert dataclasses.asdict(config.suffix) == {
        "max_match": 4,
        "max_tokens": 16,
        "factor": 4.0,
        "min_probability": 0.0,
        "sources": ("draft",),
    }
    assert not config.adaptive


def test_budget_of_drafts_follows_that_of_thinking() -> None:
    """A default draft budget that no thinking ever reaches."""
    assert SelfSpeculationConfig(thinking_budget=100).draft_budgets == (50,)
    assert SelfSpeculationConfig(thinking_budget=1000).draft_budgets == (128,)
    assert SelfSpeculationConfig(thinking_budget=0).draft_budgets[0] >= 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"draft_budget": 0}, "draft_budget is 0.*at least 1"),
    ({"draft_budget": -3}, "draft_budget is -3"),
    ({"draft_budget": True}, "draft_budget is True"),
    ({"draft_budget": 2.5}, "draft_budget is 2.5"),
    ({"draft_budget": "5"}, "draft_budget is '5'"),
    ({"draft_budget": ()}, r"draft_budget is \(\)"),
    ({"draft_budget": (5, 5)}, r"draft_budget is \(5, 5\).*increasing"),
    ({"draft_budget": (9, 5)}, r"draft_budget is \(9, 5\).*increasing"),
    ({"draft_interval": 0}, "draft_interval is 0"),
    ({"max_draft_tokens": 1}, "max_draft_tokens is 1"),
    ({"max_draft_tokens": None}, "max_draft_tokens is None"),
    ({"thinking_budget": -1}, "thinking_budget is -1.*at least 0"),
    ({"draft_budget": 9, "thinking_budget": 9}, "draft_budget is 9 and thinking_budget is 9"),
    ({"draft_budget": (2, 9), "thinking_budget": 9}, "draft_budget is .2, 9. and thinking_budget"),
    (
        {"acceptance": "rejection_sampling", "reuse": "suffix"},
        "acceptance is 'rejection_sampling' and reuse is 'suffix'.*prefix",
    ),
    ({"reuse": "sufix"}, "reuse is 'sufix'.*'suffix'"),
    ({"lane": "lock-step"}, "lane is 'lock-step'.*'lockstep'"),
    ({"acceptance": "typical"}, "acceptance is 'typical'.*'exact_match'"),
    ({"adaptive": 1}, "adaptive is 1"),
    ({"end_of_thinking": ""}, "end_of_thinking is empty"),
    ({"end_of_thinking": []}, r"end_of_thinking is \[\]"),
    ({"end_of_thinking": 7}, "end_of_thinking is 7"),
    ({"start_of_thinking": ()}, r"start_of_thinking is \(\)"),
    ({"suffix": 3}, "suffix is 3"),
    ({"suffix": {"max_match": 0}}, "suffix.max_match is 0"),
    ({"suffix": {"max_tokens": 0}}, "suffix.max_tokens is 0"),
    ({"suffix": {"factor": 0}}, "suffix.factor is 0"),
    ({"suffix": {"factor": float("nan")}}, "suffix.factor is nan"),
    ({"suffix": {"min_probability": 1.5}}, "suffix.min_probability is 1.5"),
    ({"suffix": {"min_probability": True}}, "suffix.min_probability is True"),
    ({"suffix": {"sources": ()}}, "suffix.sources is empty"),
    ({"suffix": {"sources": None}}, "suffix.sources is None"),
    ({"suffix": {"sources": 5}}, "suffix.sources is 5"),
    ({"suffix": {"sources": ("draft", "promt")}}, "suffix.sources is 'promt'.*'prompt'"),
    ({"draft_budgets": 5}, "no setting 'draft_budgets'.*'draft_budget'"),
    ({"suffix": {"depth": 5}}, "SuffixConfig has no setting 'depth'"),
]


@pytest.mark.parametrize(("settings", "pattern"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_values_are_refused_by_name(settings: dict[str, Any], pattern: str) -> None:
    """A value that is clipped, ignored or fails far from where it was given."""
    with pytest.raises(ConfigError, match=pattern):
        SelfSpeculationConfig.coerce(settings)


@pytest.mark.parametrize("equal", [1, 4, 16])
def test_equal_limits_are_fine(equal: int) -> None:
    """Capacity equal to depth, which aborts elsewhere."""
    suffix = SuffixConfig(max_match=equal, max_tokens=equal, factor=1)
    SelfSpeculationConfig(suffix=suffix, draft_budget=equal, draft_interval=equal)


def test_coerce() -> None:
    """Something falsy that switches speculation on, or a config that is copied or changed."""
    config = SelfSpeculationConfig(draft_budget=7)
    assert SelfSpeculationConfig.coerce(None) is None
    assert SelfSpeculationConfig.coerce(False) is None
    assert SelfSpeculationConfig.coerce(True) == SelfSpeculationConfig()
    assert SelfSpeculationConfig.coerce(config) is config
    assert SelfSpeculationConfig.coerce({"draft_budget": 7}) == config
    assert SelfSpeculationConfig.coerce({}) == SelfSpeculationConfig()
    for wrong in (0, 1, "True", [], 3.5):
        with pytest.raises(ConfigError, match="self_speculation is"):
            SelfSpeculationConfig.coerce(wrong)


def test_a_dict_is_not_changed() -> None:
    """Settings of the caller that lose a key, as a nested dict that is popped from."""
    settings = {"draft_budget": [3, 6], "suffix": {"sources": ["draft"]}}
    before = pickle.dumps(settings)
    first = SelfSpeculationConfig.coerce(settings)
    assert pickle.dumps(settings) == before
    assert SelfSpeculationConfig.coerce(settings) == first


def test_it_is_frozen_keyword_only_and_hashable() -> None:
    """One call's settings changed by another, or arguments given in the wrong order."""
    config = SelfSpeculationConfig(draft_budget=[3, 6], end_of_thinking=[1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lane = "stream"  # type: ignore[misc]
    with pytest.raises(TypeError):
        SelfSpeculationConfig("</think>")  # type: ignore[misc]
    assert hash(config) == hash(SelfSpeculationConfig(draft_budget=(3, 6), end_of_thinking=(1, 2)))
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    "config",
    [
        SelfSpeculationConfig(),
        SelfSpeculationConfig.reference(),
        SelfSpeculationConfig(end_of_thinking=(1, 2), draft_budget=(3, 6), lane="stream"),
    ],
    ids=["defaults", "reference", "other"],
)
def test_json_round_trip(config: SelfSpeculationConfig) -> None:
    """Tuples that come back as lists, or a nested config as a dict."""
    assert SelfSpeculationConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("text", ["", "[]", "3", '{"draft_bugdet": 5}', "{"])
def test_json_that_is_none(text: str) -> None:
    """A traceback from the JSON module where a settings file is wrong."""
    with pytest.raises(ConfigError):
        SelfSpeculationConfig.from_json(text)


@pytest.mark.parametrize(
    ("reuse", "sources", "drafts", "verifies", "proposes"),
    [
        ("prefix+suffix", ("prompt",), True, True, True),
        ("prefix", ("draft",), True, True, False),
        ("suffix", ("draft",), True, False, True),
        ("suffix", ("prompt", "answer"), False, False, True),
        ("none", ("draft",), False, False, False),
    ],
)
def test_what_follows_from_reuse(
    reuse: str, sources: tuple[str, ...], drafts: bool, verifies: bool, proposes: bool
) -> None:
    """Drafts that are paid for and used by nobody."""
    config = SelfSpeculationConfig(reuse=reuse, suffix=SuffixConfig(sources=sources))
    assert (config.drafts, config.verifies_prefix, config.proposes_spans) == (
        drafts,
        verifies,
        proposes,
    )
