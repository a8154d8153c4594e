"""Every form of input: padding, embeddings, images, odd vocabularies, wrapped models."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from families import build_model, random_prompt
from helpers import (
    LANES,
    PROMPT_LENGTH,
    STEADY_LANES,
    Declared,
    assert_same,
    declare,
    enabled,
    find_marker,
    generate,
    run_both,
    run_fast,
    scripted_drafts,
    true_up_to,
)
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.models.gemma3 import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

JOINED = {"draft_budget": (3, 10), "max_draft_tokens": 7}
every_lane = pytest.mark.parametrize("lane", LANES)


def _declare(model: PreTrainedModel, input_ids: Tensor | None, **arguments: Any) -> Declared:
    """A marker from what plain `generate` writes for these inputs."""
    length = 0 if input_ids is None else input_ids.shape[1]
    sequences = generate(model, input_ids, **arguments).sequences
    prompt_ids, new_ids = sequences[0, :length].tolist(), tuple(sequences[0, length:].tolist())
    position = find_marker(new_ids, first=13, prompt_ids=prompt_ids)
    assert position is not None
    return Declared(sequences[:, :length], new_ids, position)


def _check(
    model: PreTrainedModel, input_ids: Tensor | None, lane: str = "lockstep", **arguments: Any
) -> None:
    """Both ways, with a draft that is joined as a longer row and one that is true for a while."""
    declared = _declare(model, input_ids, **arguments)
    config = declared.config(lane=lane, **JOINED)
    with scripted_drafts(true_up_to(declared.answer, 4)):
        pair = run_both(model, input_ids, config, **arguments)
    assert_same(pair)
    if lane in STEADY_LANES:
        assert len(pair.stats.drafts) == 2
        assert pair.stats.accepted_prefix > 0


def _random_embeds(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Embeddings that no token has."""
    with torch.no_grad():
        embeds: Tensor = model.get_input_embeddings()(input_ids)
    noise = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0))
    return embeds + 0.1 * embeds.std() * noise


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen3_next", "falcon_h1"])
@every_lane
def test_left_padded_prompt(lane: str, family: str) -> None:
    """Padding that a draft or a block of candidates attends to, or positions counted over it."""
    model = build_model(family)
    mask = torch.ones(1, PROMPT_LENGTH, dtype=torch.long)
    mask[:, :4] = 0
    prompt = random_prompt(model, PROMPT_LENGTH, seed=7) * mask
    _check(model, prompt, lane, attention_mask=mask)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3_next"])
@every_lane
def test_embeddings_as_prompt(lane: str, family: str, with_ids: bool) -> None:
    """Masks, positions and limits that count ids where the prompt has none."""
    model = build_model(family)
    prompt = random_prompt(model, PROMPT_LENGTH, seed=7)
    embeds = _random_embeds(model, prompt)
    mask = torch.ones(embeds.shape[:2], dtype=torch.long)
    _check(model, prompt if with_ids else None, lane, inputs_embeds=embeds, attention_mask=mask)


@pytest.mark.parametrize("length", [1, 2])
@every_lane
def test_shortest_prompts(lane: str, length: int) -> None:
    """A prompt shorter than a match, a window or a convolution."""
    for family in ("mistral", "lfm2"):
        model = build_model(family)
        _check(model, random_prompt(model, length, seed=3), lane)


def test_no_token_repeats_and_drafts_are_empty() -> None:
    """An empty draft that still enters the speculative path."""
    declared = declare("gpt_oss")
    model = build_model("gpt_oss")
    eos = (set(range(1, 256)) - set(declared.new_ids)).pop()
    with scripted_drafts(lambda position, stage: eos):
        pair = run_both(model, declared.prompt, declared.config(), eos_token_id=eos)
    assert_same(pair)
    assert [draft.n_tokens for draft in pair.stats.drafts] == [1]
    assert pair.stats.accepted_prefix == 0


@pytest.mark.parametrize("given", ["position_ids", "prefill_chunk_size"])
@every_lane
def test_other_arguments_of_the_prefill(lane: str, given: str) -> None:
    """Positions of the user's that go on from another number; a prompt read in pieces."""
    model = build_model("mistral")
    prompt = random_prompt(model, PROMPT_LENGTH, seed=7)
    value = 4 if given == "prefill_chunk_size" else torch.arange(5, 5 + PROMPT_LENGTH)[None]
    _check(model, prompt, lane, **{given: value})


@pytest.mark.parametrize("length", [3, 9])
def test_token_types_go_on_with_the_last_one(length: int) -> None:
    """Types of a block that repeat the last types of the prompt instead of the very last."""
    model = build_model("gpt2")
    prompt = random_prompt(model, length, seed=4)
    types = torch.arange(length)[None] * 20
    new_ids = generate(model, prompt, token_type_ids=types).sequences[0, length:].tolist()
    # The block is longer than what was written before it, so that it reaches into the prompt.
    declared = Declared(prompt, tuple(new_ids), 2)
    config = declared.config(draft_budget=1, max_draft_tokens=12, reuse="prefix", lane="sequential")
    with scripted_drafts(true_up_to(declared.answer, 20)):
        pair = run_both(model, prompt, config, token_type_ids=types)
    assert_same(pair)
    assert pair.stats.accepted_prefix == 12


_TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 4}
IMAGE_TOKEN = 250


def _build_qwen() -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {
        **_VISION,
        "depth": 1,
        "num_heads": 2,
        "window_size": 16,
        "fullatt_block_indexes": [0],
        "out_hidden_size": 32,
    }
    config = Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=251,
        vision_start_token_id=252,
        vision_end_token_id=253,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _build_gemma() -> PreTrainedModel:
    text = {
        **_TEXT,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=False,
        boi_token_index=251,
        eoi_token_index=252,
    )
    return Gemma3ForConditionalGeneration(config)


@functools.cache
def _vision_model(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = _build_qwen() if name == "qwen2_5_vl" else _build_gemma()
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _vision_inputs(name: str) -> dict[str, Any]:
    pixels = torch.Generator().manual_seed(0)
    input_ids = torch.tensor([[5, 6, 251, *[IMAGE_TOKEN] * 4, 252, 7, 8, 9]])
    is_image = (input_ids == IMAGE_TOKEN).long()
    if name == "qwen2_5_vl":
        return {
            "input_ids": input_ids,
            "mm_token_type_ids": is_image,
            "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=pixels),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        }
    return {
        "input_ids": input_ids,
        "token_type_ids": is_image,
        "pixel_values": torch.randn(1, 3, 16, 16, generator=pixels),
    }


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3_vl"])
@every_lane
def test_images(lane: str, name: str, masked: bool) -> None:
    """Images read again with candidates, three-dimensional positions, or image masks too short."""
    inputs = _vision_inputs(name)
    if not masked:
        inputs["attention_mask"] = None
    _check(_vision_model(name), inputs.pop("input_ids"), lane, **inputs)


@every_lane
def test_the_turn_after_an_image(lane: str) -> None:
    """A probe in the middle of a call that forgets where the text behind an image goes on."""
    model = _vision_model("qwen2_5_vl")
    inputs = _vision_inputs("qwen2_5_vl")
    input_ids = inputs.pop("input_ids")

    def next_turn(first: Any) -> list[int]:
        text = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)
        types = torch.zeros_like(text)
        turn = generate(model, text, cache=first.cache, mm_token_type_ids=types)
        return turn.sequences[0].tolist()

    declared = _declare(model, input_ids, **inputs)
    plain = next_turn(generate(model, input_ids, **inputs))
    fast = run_fast(model, input_ids, declared.config(lane=lane, **JOINED), **inputs)
    assert fast.speculation.drafts
    assert next_turn(fast) == plain


@functools.cache
def _odd_vocabulary(n_logits: int) -> PreTrainedModel:
    """A model with `n_logits` logits and 256 embeddings."""
    model = copy.deepcopy(build_model("llama"))
    head = torch.nn.Linear(32, n_logits, bias=False)
    with torch.no_grad():
        n_shared = min(n_logits, 256)
        head.weight.zero_()
        head.weight[:n_shared] = model.lm_head.weight[:n_shared]
    model.lm_head = head
    return model


@pytest.mark.parametrize("n_logits", [200, 320])
@every_lane
def test_logits_wider_or_narrower_than_the_vocabulary(lane: str, n_logits: int) -> None:
    """Ids beyond one of the two that are fed, scored or counted as if both were equal."""
    model = _odd_vocabulary(n_logits)
    _check(model, random_prompt(model, PROMPT_LENGTH, seed=2), lane, output_scores=True)


def test_lora() -> None:
    """A wrapper whose `generate` takes `*args`, patches the model inside and restores it."""
    base = copy.deepcopy(build_model("llama"))
    declared = declare("llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model: PeftModel = get_peft_model(base, lora).eval()
    _check(model, declared.prompt)
    assert "generate" not in vars(model)
    with model.disable_adapter():
        _check(model, declared.prompt)
    positional = []
    for config in (None, declared.config()):
        with enabled(model):
            ids = model.generate(
                declared.prompt, GenerationConfig(max_new_tokens=20), self_speculation=config
            )
        positional.append(ids.tolist())
    assert positional[1] == positional[0]


@every_lane
def test_dispatched_model(lane: str) -> None:
    """A forward that goes past the hooks of accelerate, or a model that is copied with them."""
    model = copy.deepcopy(build_model("llama"))
    dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    declared = declare("llama")
    run_fast(model, declared.prompt, declared.config(lane=lane))
    assert calls
    _check(model, declared.prompt, lane)
    remove_hook_from_submodules(model)


def test_compiled_wrapper_has_no_generate_of_its_own() -> None:
    """`torch.compile` hands attributes on to the model inside, which must be the one enabled."""
    model = copy.deepcopy(build_model("llama"))
    declared = declare("llama")
    wrapper = torch.compile(model, backend="eager")
    _check(wrapper, declared.prompt)
    assert "generate" not in vars(model)
    with enabled(wrapper) as returned:
        assert returned is wrapper


def test_model_compiled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that is called past the compiled one."""
    model = copy.deepcopy(build_model("llama"))
    declared = declare("llama")
    calls: list[int] = []

    def compile_function(function: Any) -> Any:
        def compiled(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return function(*args, **kwargs)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_function)
    model.compile()
    fast = run_fast(model, declared.prompt, declared.config())
    assert fast.sequences[0, PROMPT_LENGTH:].tolist() == list(declared.new_ids)
    assert fast.speculation is not None
    assert len(calls) >= fast.speculation.forwards


def test_nothing_that_was_passed_is_changed() -> None:
    """Settings that leak into the next call through an object of the user or of the model."""
    declared = declare("llama")
    model = build_model("llama")
    processors, criteria = LogitsProcessorList(), StoppingCriteriaList()
    given = GenerationConfig(max_new_tokens=48, repetition_penalty=1.1)
    speculation = declared.config(thinking_budget=9)
    before = (given.to_dict(), model.generation_config.to_dict(), model.config.to_dict())
    names = set(dir(model))
    with enabled(model):
        settings = vars(model).keys()
        model.generate(
            declared.prompt,
            attention_mask=torch.ones_like(declared.prompt),
            generation_config=given,
            logits_processor=processors,
            stopping_criteria=criteria,
            self_speculation=speculation,
        )
        assert vars(model).keys() == settings
    assert (given.to_dict(), model.generation_config.to_dict(), model.config.to_dict()) == before
    assert not [name for name in vars(given) if name.startswith("_") and "tensor" in name]
    assert set(dir(model)) == names
    assert len(processors) == len(criteria) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_sixteen_bit_differs_at_ties_only(family: str, dtype: torch.dtype) -> None:
    """A wrong token that is excused as rounding: the two best must have been a tie."""
    model = copy.deepcopy(build_model(family)).to(dtype)
    declared = declare(family)
    prompt, config = declared.prompt, declared.config()
    with scripted_drafts(true_up_to(declared.answer, 4)):
        pair = run_both(model, prompt, config, output_scores=True)
    plain, fast = (out.sequences[0, PROMPT_LENGTH:].tolist() for out in (pair.plain, pair.fast))
    different = [at for at, (a, b) in enumerate(zip(plain, fast, strict=True)) if a != b]
    if different:
        scores = pair.plain.scores[different[0]][0]
        best, second = scores.topk(2).values.tolist()
        assert (best - second) / scores.std().item() < 0.1
    assert len(fast) == len(plain)


def test_rounding_that_depends_on_the_number_of_rows() -> None:
    """Kernels that round a block in another way than a step: it ends, and counts what it did."""
    model = copy.deepcopy(build_model("llama"))
    linear = model.lm_head.forward

    def noisy(states: Tensor) -> Tensor:
        n_rows = states.numel() // states.shape[-1]
        noise = torch.randn(256, generator=torch.Generator().manual_seed(n_rows))
        logits: Tensor = linear(states)
        return logits + 0.3 * logits.std() * noise

    model.lm_head.forward = noisy
    declared = declare("llama")
    with scripted_drafts(true_up_to(declared.answer, 30)):
        fast = run_fast(model, declared.prompt, declared.config())
    assert fast.speculation is not None
    assert fast.sequences.shape[1] == PROMPT_LENGTH + 48
    assert fast.speculation.new_tokens == 48
    assert fast.cache.get_seq_length() == PROMPT_LENGTH + 47
