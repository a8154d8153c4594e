"""What cannot be exact is refused by name, with the next step, before the prompt is read."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import build_model
from helpers import declare, enabled, generate, pair_tokenizer
from peft import PromptTuningConfig, get_peft_model
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    QuantizedCache,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer
from transformers.utils import is_torch_greater_or_equal

from ssr_hf import ConfigError, MarkerError, SelfSpeculationConfig, UnsupportedError, compat

FAMILY = "llama"


@contextlib.contextmanager
def _no_forward(model: PreTrainedModel) -> Iterator[None]:
    """Fails if any forward runs inside."""
    calls: list[int] = []
    handles = [
        module.register_forward_pre_hook(lambda *_: calls.append(1)) for module in model.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    assert not calls


def _refuse(
    error: type[Exception],
    pattern: str,
    config: Any = None,
    model: PreTrainedModel | None = None,
    **arguments: Any,
) -> None:
    """Checks error, message and that nothing ran."""
    declared = declare(FAMILY)
    model = model or build_model(FAMILY)
    with enabled(model), _no_forward(model), pytest.raises(error, match=pattern) as raised:
        generate(model, declared.prompt, self_speculation=config or declared.config(), **arguments)
    text = str(raised.value)
    assert text.endswith((".", "?"))
    assert text.count(". ") >= 2, f"what happened, what is accepted, what to do: {text}"


OFFLOADING_NEEDS_CUDA = not (is_torch_greater_or_equal("2.7") or torch.cuda.is_available())
MODES: dict[str, tuple[dict[str, Any], str]] = {
    "beam search": ({"num_beams": 2}, "beam_search.*num_beams=1"),
    "beam sampling": ({"num_beams": 2, "do_sample": True}, "beam_sample.*num_beams=1"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "assisted.*prompt_lookup_num_tokens"),
    "attentions": ({"output_attentions": True}, "output_attentions.*Leave"),
    "no cache": ({"use_cache": False}, "use_cache is False.*use_cache=True"),
    "ranks": ({"synced_gpus": True}, "synced_gpus.*plain generate"),
    "paged": ({"cache_implementation": "paged"}, "paged.*Leave cache_implementation out"),
    "static": ({"cache_implementation": "static"}, "static cache.*DynamicCache"),
    "offloaded static": ({"cache_implementation": "offloaded_static"}, "cache.*DynamicCache"),
    "token healing": ({"token_healing": True}, "token_healing.*heal_tokens"),
    "custom_generate": ({"custom_generate": lambda **_: None}, "custom_generate.*Leave one"),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_of_generate(name: str) -> None:
    """A mode that is silently replaced by another, or fails late with a host message."""
    if name.startswith("offloaded") and OFFLOADING_NEEDS_CUDA:
        pytest.skip("before torch 2.7 the host opens a CUDA stream for such a cache")
    arguments, pattern = MODES[name]
    _refuse(UnsupportedError, pattern, **arguments)


def test_default_token_healing() -> None:
    """A default of the model is read by `generate`, which then fails with a message of its own."""
    model = build_model(FAMILY)
    model.generation_config.token_healing = True
    given = GenerationConfig(max_new_tokens=3)
    try:
        _refuse(UnsupportedError, "token_healing.*heal_tokens", model=model)
        _refuse(UnsupportedError, "token_healing", model=model, generation_config=given)
    finally:
        model.generation_config.token_healing = False


def test_model_that_hands_over_more_than_the_cache() -> None:
    """Cross-attention to an image, as in Mllama, whose masks and keys no rollback knows."""

    class Handing(LlamaForCausalLM):
        def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return super()._update_model_kwargs_for_generation(*args, **kwargs)

    model = Handing(build_model(FAMILY).config).eval()
    _refuse(UnsupportedError, "Handing hands more than the cache", model=model)


def test_assistant_model() -> None:
    """A draft model that is silently not used."""
    _refuse(UnsupportedError, "assistant_model.*itself", assistant_model=build_model(FAMILY))


class StrangeLayer(DynamicLayer):
    """A kind of layer that nobody has looked at."""


def _with_strange_layer(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers[0] = StrangeLayer()
    return cache


CACHES: dict[str, tuple[Callable[[PreTrainedModel], Any], str]] = {
    "static": (lambda model: StaticCache(config=model.config, max_cache_len=99), "static cache"),
    "encoder-decoder": (
        lambda model: EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "encoder-decoder cache",
    ),
    "offloaded": (
        lambda model: _offloaded(model),
        "offloaded cache",
    ),
    "quantized": (lambda model: object.__new__(QuantizedCache), "quantized cache"),
    "strange layer": (_with_strange_layer, "StrangeLayer"),
}


def _offloaded(model: PreTrainedModel) -> DynamicCache:
    """Such a cache wants a GPU when it is made."""
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    return cache


@pytest.mark.parametrize("reuse", ["none", "prefix+suffix"])
def test_a_model_without_a_cache_to_hand_back(reuse: str) -> None:
    """An `AttributeError` in the middle of the package."""
    config = RecurrentGemmaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        lru_width=32,
        attention_window_size=8,
        pad_token_id=0,
    )
    model = RecurrentGemmaForCausalLM(config).eval()
    speculation = {"end_of_thinking": [5], "reuse": reuse}
    with (
        enabled(model),
        pytest.raises(UnsupportedError, match="RecurrentGemmaForCausalLM returns no cache"),
    ):
        generate(model, torch.tensor([[2, 3, 4]]), self_speculation=speculation)


@pytest.mark.parametrize("name", CACHES)
def test_caches(name: str) -> None:
    """An `IndexError`, garbage, or a fork that writes into its parent."""
    from ssr_hf.cache.support import Unsupported, cache_support

    make, pattern = CACHES[name]
    support = cache_support(make(build_model(FAMILY)))
    assert isinstance(support, Unsupported)
    assert pattern in support.reason
    assert support.hint
    if name in ("static", "strange layer"):
        _refuse(UnsupportedError, pattern, cache=make(build_model(FAMILY)))


def test_cache_of_another_type() -> None:
    """A tuple, as older versions of the host had it."""
    from ssr_hf.cache.support import Unsupported, cache_support

    support = cache_support(((torch.zeros(1, 2, 3, 8),) * 2,))
    assert isinstance(support, Unsupported)
    assert "tuple" in support.reason
    assert "DynamicCache" in support.hint


def test_model_without_a_cache() -> None:
    """A model class that keeps no cache: nothing could be rolled back."""
    model = copy.deepcopy(build_model(FAMILY))
    model._supports_default_dynamic_cache = lambda: False
    _refuse(UnsupportedError, "no cache.*Use plain generate", model=model)


def test_switched_off_in_the_config_of_the_model() -> None:
    """`use_cache=False` left behind by training, and an error that does not say so."""
    model = copy.deepcopy(build_model(FAMILY))
    model.generation_config.use_cache = False
    _refuse(UnsupportedError, "use_cache is False.*use_cache=True", model=model)


def test_encoder_decoder() -> None:
    """The encoder runs, then a mask with another name is missing."""
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config).eval()
    _refuse(UnsupportedError, "encoder-decoder model.*plain generate", model=model)


def test_adapters_that_learn_a_prompt() -> None:
    """An error about tensor sizes from inside of the adapter, in the middle of a generation."""
    adapter = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(build_model(FAMILY)), adapter).eval()
    _refuse(UnsupportedError, "PromptTuningConfig.*LoRA.*plain generate", model=model)


def test_sharded_model_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP without `synced_gpus=`: the host notices, and does not tell a decoding function."""
    monkeypatch.setattr(compat, "_get_torch_distributed_world_size", lambda: 2)
    assert not compat.runs_on_several_ranks(build_model(FAMILY), None)
    monkeypatch.setattr(compat, "is_fsdp_managed_module", lambda model: True)
    _refuse(UnsupportedError, "FSDP.*one model per rank")


def test_tensor_parallel_model_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that measure different times, offer different candidates and wait for ever."""
    monkeypatch.setattr(compat, "_get_torch_distributed_world_size", lambda: 2)
    model = copy.deepcopy(build_model(FAMILY))
    model._tp_size = 2
    _refuse(UnsupportedError, "tensor parallelism", model=model)


def test_no_tokenizer_and_no_markers() -> None:
    """A guess where the model names no repository."""
    config = SelfSpeculationConfig()
    _refuse(MarkerError, "does not name its repository.*tokenizer=tokenizer", config)


def test_tokenizer_without_markers() -> None:
    """Thinking that is never found, without a word."""
    config = SelfSpeculationConfig()
    _refuse(MarkerError, "</think>.*end_of_thinking=", config, tokenizer=pair_tokenizer())


@pytest.mark.parametrize("name", ["end_of_thinking", "start_of_thinking"])
def test_marker_outside_of_the_vocabulary(name: str) -> None:
    """An index error in an embedding, long after the draft budget was reached."""
    markers = {"end_of_thinking": [5], name: [3, 256]}
    _refuse(MarkerError, "id 256.*0 to 255", SelfSpeculationConfig(**markers))


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"draft_bugdet": 5}, "draft_bugdet.*draft_budget"),
        ({"draft_budget": -1}, "draft_budget is -1"),
        ({"suffix": {"max_mtach": 3}}, "max_mtach.*max_match"),
        ("yes", "self_speculation is 'yes'"),
    ],
)
def test_settings(settings: Any, pattern: str) -> None:
    """A typo that is ignored."""
    _refuse(ConfigError, pattern, settings)


def test_typo_in_the_name_of_the_argument() -> None:
    """`self_specluation=` that is dropped instead of raised."""
    model = build_model(FAMILY)
    declared = declare(FAMILY)
    with enabled(model), pytest.raises(ValueError, match="self_specluation"):
        generate(model, declared.prompt, self_specluation=declared.config())


@pytest.mark.parametrize("given", ["twice", "too many"])
def test_positional_arguments(given: str) -> None:
    """An argument that overwrites another one."""
    model = build_model(FAMILY)
    declared = declare(FAMILY)
    arguments = [declared.prompt, *[None] * (30 if given == "too many" else 0)]
    keywords = {"inputs": declared.prompt} if given == "twice" else {}
    with enabled(model), _no_forward(model), pytest.raises(TypeError, match=r"generate\(\)"):
        model.generate(*arguments, self_speculation=declared.config(), **keywords)
