"""Enabling, disabling and the host's own extension point; nothing global is touched."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import types
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from families import build_model, random_prompt
from helpers import (
    LANES,
    Declared,
    Pair,
    assert_same,
    declare,
    enabled,
    generate,
    pair_tokenizer,
)
from transformers import AutoTokenizer, GenerationMixin, StoppingCriteriaList

import ssr_hf
from ssr_hf import SelfSpeculativeOutput

FAMILY = "llama"


def _plain(declared: Declared, **arguments: Any) -> Any:
    return generate(build_model(FAMILY), declared.prompt, **arguments)


def test_disable_restores_exactly() -> None:
    """A wrapper, an attribute or a patched class that stays behind."""
    model = build_model(FAMILY)
    before = dict(vars(model))
    class_method = GenerationMixin.generate
    ssr_hf.enable(model)
    assert "generate" in vars(model)
    assert ssr_hf.enable(model) is model
    ssr_hf.disable(model)
    assert dict(vars(model)) == before
    assert GenerationMixin.generate is class_method
    ssr_hf.disable(model)
    assert dict(vars(model)) == before


def test_the_tokenizer_of_a_model_is_loaded_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files read, and the Hub asked, in every call that brings no tokenizer."""
    model, tokenizer = copy.deepcopy(build_model(FAMILY)), pair_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path))
    load = mock.Mock(wraps=AutoTokenizer.from_pretrained)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    speculation = {"end_of_thinking": tokenizer.decode([7])}
    with enabled(model):
        for _ in range(2):
            generate(model, random_prompt(model, 9, seed=1), self_speculation=speculation)
    assert load.call_count == 1


def test_tensors_are_made_on_the_device_of_the_model() -> None:
    """A default device of another kind: probes that fail, tokens that no streamer can read."""

    class Devices:
        def __init__(self) -> None:
            self.seen: set[str] = set()

        def put(self, value: torch.Tensor) -> None:
            self.seen.add(value.device.type)

        def end(self) -> None:
            pass

    model, declared = copy.deepcopy(build_model(FAMILY)), declare(FAMILY)
    plain = _plain(declared)
    torch.set_default_device("meta")
    try:
        with enabled(model):
            for lane in LANES:
                config, streamer = declared.config(lane=lane), Devices()
                fast = generate(model, declared.prompt, self_speculation=config, streamer=streamer)
                assert torch.equal(fast.sequences, plain.sequences)
                assert fast.speculation.drafts and streamer.seen == {"cpu"}
    finally:
        torch.set_default_device(None)


def test_a_generate_that_somebody_removed() -> None:
    """A wrapper that another tool took away: `disable` fails, and `enable` does nothing."""
    model = copy.deepcopy(build_model(FAMILY))
    before = dict(vars(model))
    for end in (ssr_hf.disable, ssr_hf.enable):
        ssr_hf.enable(model)
        del model.generate
        end(model)
    assert "generate" in vars(model)
    ssr_hf.disable(model)
    assert dict(vars(model)) == before


def test_a_generate_of_the_instance_is_kept() -> None:
    """Another add-on's wrapper that is lost, or not called."""
    model = copy.deepcopy(build_model(FAMILY))
    declared = declare(FAMILY)
    calls: list[str] = []
    original = model.generate

    def other(*args: Any, **kwargs: Any) -> Any:
        calls.append("other")
        return original(*args, **kwargs)

    model.generate = other
    with enabled(model):
        fast = generate(model, declared.prompt, self_speculation=declared.config())
        generate(model, declared.prompt)
    assert calls == ["other", "other"]
    assert fast.speculation.drafts
    assert model.generate is other


def test_a_model_with_a_generate_of_its_own_is_freed_and_copied_with_it() -> None:
    """A table of bound methods that keeps its models alive; a copy that loses the other wrapper."""
    model = copy.deepcopy(build_model(FAMILY))

    def tagged(self: Any, *args: Any, **kwargs: Any) -> Any:
        return "tagged" if kwargs.pop("tag", False) else type(self).generate(self, *args, **kwargs)

    model.generate = types.MethodType(tagged, model)
    copied = copy.deepcopy(ssr_hf.enable(model))
    assert copied.generate(tag=True) == "tagged"
    ssr_hf.disable(copied)
    assert copied.generate.__func__ is tagged and copied.generate.__self__ is copied
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_enabling_again_around_a_wrapper() -> None:
    """A wrapper over our method that is stored as what lies under it: both call each other."""
    model = copy.deepcopy(build_model(FAMILY))
    declared = declare(FAMILY)
    before = dict(vars(model))
    ours = ssr_hf.enable(model).generate
    calls: list[str] = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append("wrapper")
        return ours(*args, **kwargs)

    model.generate = wrapper
    ssr_hf.enable(model)
    fast = generate(model, declared.prompt, self_speculation=declared.config())
    assert fast.speculation.drafts and calls == ["wrapper"]
    ssr_hf.disable(model)
    assert dict(vars(model)) == before


@pytest.mark.parametrize("off", [None, False])
def test_without_the_argument_nothing_changes(off: object) -> None:
    """An enabled model that decodes in another way although nobody asked for it."""
    declared = declare(FAMILY)
    model = build_model(FAMILY)
    with enabled(model):
        output = generate(model, declared.prompt, self_speculation=off, output_attentions=True)
    assert not isinstance(output, SelfSpeculativeOutput)
    assert output.attentions is not None
    assert output.sequences.tolist() == _plain(declared).sequences.tolist()


def test_other_instances_are_untouched() -> None:
    """A patch of the class."""
    model, other = build_model(FAMILY), copy.deepcopy(build_model(FAMILY))
    declared = declare(FAMILY)
    with enabled(model), pytest.raises(ValueError, match="self_speculation"):
        generate(other, declared.prompt, self_speculation=declared.config())


@pytest.mark.parametrize("how", ["partial", "function", "bound method"])
@pytest.mark.parametrize("lane", LANES)
def test_as_custom_generate(lane: str, how: str) -> None:
    """The host's contract for callables: arguments that are refused or silently dropped."""
    declared = declare(FAMILY)
    config = declared.config(lane=lane)

    class Holder:
        def decode(self, *args: Any, **kwargs: Any) -> Any:
            return ssr_hf.self_speculative_decoding(*args, self_speculation=config, **kwargs)

    decoding: Any = ssr_hf.self_speculative_decoding
    arguments: dict[str, Any] = {}
    if how == "partial":
        decoding = functools.partial(decoding, self_speculation=config)
    elif how == "bound method":
        decoding = Holder().decode
    else:
        arguments["self_speculation"] = config
    fast = _plain(declared, custom_generate=decoding, output_scores=True, **arguments)
    assert_same(Pair(_plain(declared, output_scores=True), fast))


@pytest.mark.parametrize("off", [None, False])
def test_as_custom_generate_switched_off(off: object) -> None:
    """A switch that only works with `enable`."""
    declared = declare(FAMILY)
    decoding = functools.partial(ssr_hf.self_speculative_decoding, self_speculation=off)
    fast = _plain(declared, custom_generate=decoding)
    assert fast.sequences.tolist() == _plain(declared).sequences.tolist()
    assert not isinstance(fast, SelfSpeculativeOutput)


def test_tokenizer_reaches_markers_and_stop_strings() -> None:
    """A tokenizer that the host drops on the way to the decoding function."""
    declared = declare("lfm2", n_new=11)
    tokenizer = pair_tokenizer()
    text = tokenizer.decode(declared.marker)
    stop = tokenizer.decode(list(declared.answer[3:5]))
    model = build_model("lfm2")
    arguments = {"tokenizer": tokenizer, "stop_strings": [stop]}
    settings = {"end_of_thinking": text, "draft_budget": 5, "adaptive": False}
    plain = generate(model, declared.prompt, **arguments)
    with enabled(model):
        fast = generate(model, declared.prompt, self_speculation=settings, **arguments)
    assert fast.sequences.tolist() == plain.sequences.tolist()
    assert fast.speculation.drafts
    assert fast.speculation.answer_tokens == 5


def test_copies_and_pickles_of_an_enabled_model() -> None:
    """A copy whose `generate` still runs on the original, or that cannot be saved."""
    # The host's own hooks for hidden states, set by other tests, cannot be pickled.
    model = build_model(FAMILY, seed=9)
    declared = declare(FAMILY)
    with enabled(model):
        clone = copy.deepcopy(model)
        restored = pickle.loads(pickle.dumps(model))
    for copied in (clone, ssr_hf.enable(restored)):
        with torch.no_grad():
            copied.lm_head.weight.mul_(-1)
        fast = generate(copied, declared.prompt, self_speculation=declared.config())
        assert fast.sequences.tolist() == generate(copied, declared.prompt).sequences.tolist()
        assert fast.sequences.tolist() != generate(model, declared.prompt).sequences.tolist()


@pytest.mark.parametrize("lane", LANES)
def test_cpu_models_touch_no_cuda(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA started in the main process, where a Space must not start it."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("CUDA was touched")

    for name in ("init", "_lazy_init", "Stream", "current_stream", "synchronize", "device"):
        monkeypatch.setattr(torch.cuda, name, fail)
    declared = declare(FAMILY)
    with enabled(build_model(FAMILY)) as model:
        output = generate(model, declared.prompt, self_speculation=declared.config(lane=lane))
    assert output.speculation.drafts


def test_enabling_from_threads() -> None:
    """The wrapper stored as what has to be restored."""
    model = copy.deepcopy(build_model(FAMILY))
    threads = [threading.Thread(target=ssr_hf.enable, args=(model,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ssr_hf.disable(model)
    assert "generate" not in vars(model)


def test_criteria_list_of_the_user_is_not_extended() -> None:
    """Stop strings of one call that stop the next one, through a list that both were given."""
    declared = declare(FAMILY)
    model = build_model(FAMILY)
    criteria = StoppingCriteriaList()
    with enabled(model):
        generate(
            model,
            declared.prompt,
            self_speculation=declared.config(),
            stop_strings=["aa"],
            tokenizer=pair_tokenizer(),
            stopping_criteria=criteria,
        )
    assert criteria == []


SETTINGS = {"end_of_thinking": [5]}


def test_a_copy_of_an_enabled_model_is_enabled_and_can_be_disabled() -> None:
    """A method that came with a copy calls itself, or stays for ever."""
    model = build_model("llama")
    prompt = random_prompt(model, 9, seed=0)
    ssr_hf.enable(model)
    try:
        copied = copy.deepcopy(model)
    finally:
        ssr_hf.disable(model)
    plain = model.generate(prompt, max_new_tokens=12, do_sample=False)
    arguments = {"max_new_tokens": 12, "do_sample": False, "self_speculation": SETTINGS}
    assert copied.generate(prompt, **arguments).equal(plain)
    ssr_hf.enable(copied)
    assert copied.generate(prompt, max_new_tokens=12, do_sample=False).equal(plain)
    assert copied.generate(prompt, **arguments).equal(plain)
    ssr_hf.disable(copied)
    assert "generate" not in vars(copied)
    again = copy.deepcopy(ssr_hf.enable(copied))
    ssr_hf.disable(again)
    assert "generate" not in vars(again)


def test_a_history_does_not_outlive_its_vocabulary() -> None:
    """Ids that the embeddings do not have any more."""
    model = copy.deepcopy(build_model("llama"))
    prompts = [random_prompt(model, 9, seed) for seed in range(4)]
    ssr_hf.enable(model)
    arguments = {"max_new_tokens": 60, "do_sample": False, "self_speculation": SETTINGS}
    for prompt in prompts:
        model.generate(prompt, **arguments)
    model.resize_token_embeddings(100)
    for prompt in prompts:
        plain = model.generate(prompt % 100, max_new_tokens=60, do_sample=False)
        assert model.generate(prompt % 100, **arguments).equal(plain)
