"""Rolling back, forking, joining and growing caches: exact, isolated and free of copies."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, SLIDING_WINDOW, build_model, random_prompt
from helpers import TOLERANCE, layer_states
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ssr_hf import compat
from ssr_hf.cache import growth, support
from ssr_hf.cache.checkpoint import Checkpoint, stop_recording
from ssr_hf.cache.fork import add_row, cache_tensors, fork, join, retire_row, strip_padding
from ssr_hf.cache.layers import kind_of

PREFIX = 11
EXACT = tuple(name for name, family in FAMILIES.items() if family.multi_token_exact)
# One family for each kind of cache layer, and one for each way to share or to drop states.
KINDS = (
    *("llama", "mistral", "gemma4", "gpt_oss", "deepseek_v3"),
    *("lfm2", "qwen3_next", "mamba2", "falcon_h1"),
)

every_kind = pytest.mark.parametrize("family", KINDS)
CPU = torch.device("cpu")


@torch.no_grad()
def _feed(model: PreTrainedModel, cache: Cache | None, ids: Tensor, **arguments: Any) -> Any:
    return model(ids, cache=cache, use_cache=True, **arguments)


def _filled(model: PreTrainedModel, ids: Tensor, grows: bool = True) -> Cache:
    cache: Cache = _feed(model, None, ids).cache
    if grows:
        growth.amortise(cache)
    return cache


def _states(cache: Cache) -> list[dict[str, Tensor]]:
    """Copies of everything that counts; buffers and origins of growing layers do not."""
    return [
        {
            name: state.clone()
            for name, state in layer_states(layer).items()
            if not name.startswith("buffers")
        }
        for layer in cache.layers
    ]


def _assert_equal_states(cache: Cache, expected: list[dict[str, Tensor]], exact: bool) -> None:
    for states, before in zip(_states(cache), expected, strict=True):
        assert states.keys() == before.keys()
        for name, state in states.items():
            assert state.shape == before[name].shape, name
            difference = (state - before[name]).abs().max().item() if state.numel() else 0.0
            allowed = 0.0 if exact else TOLERANCE * max(1.0, before[name].abs().max().item())
            assert difference <= allowed, name


@pytest.mark.parametrize("n_rejected", [0, 1, 4, 6])
@pytest.mark.parametrize("family", EXACT)
def test_rollback_equals_never_fed(family: str, n_rejected: int) -> None:
    """Rejected tokens that stay in a window, a convolution or a state."""
    model = build_model(family)
    ids = random_prompt(model, PREFIX + 6 + 5, seed=1)
    prefix, block, after = ids.split([PREFIX, 6, 5], dim=1)
    n_kept = 6 - n_rejected
    cache = _filled(model, prefix)
    checkpoint = Checkpoint(cache, 6)
    _feed(model, cache, block)
    n_in_cache = checkpoint.keep(n_kept)
    assert n_in_cache in (0, n_kept)
    assert n_in_cache == n_kept or not cache.is_croppable

    expected = _filled(model, prefix)
    if n_in_cache:
        _feed(model, expected, block[:, :n_in_cache])
    _assert_equal_states(cache, _states(expected), exact=False)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    rest = torch.cat([block[:, n_in_cache:n_kept], after], dim=1)
    logits = _feed(model, cache, rest).logits
    expected_logits = _feed(model, expected, rest).logits
    assert (logits - expected_logits).abs().max() < TOLERANCE * expected_logits.std()


@every_kind
def test_restore_after_a_forward_that_failed_half_way(family: str) -> None:
    """Layers before the failure that keep the tokens, and layers after it that do not."""
    model = build_model(family)
    prefix, block = random_prompt(model, PREFIX + 4, seed=2).split([PREFIX, 4], dim=1)
    cache = _filled(model, prefix)
    before = _states(cache)
    layers = getattr(model, "model", getattr(model, "backbone", None)).layers

    def fail(*args: Any) -> None:
        raise RuntimeError("half-way")

    handle = layers[-1].register_forward_pre_hook(fail)
    checkpoint = Checkpoint(cache, 4)
    with pytest.raises(RuntimeError, match="half-way"):
        _feed(model, cache, block)
    handle.remove()
    checkpoint.restore()
    stop_recording(cache)
    _assert_equal_states(cache, before, exact=True)


@every_kind
def test_fork_and_original_do_not_see_each_other(family: str) -> None:
    """A child that writes into its parent, or the other way round, in any order of steps."""
    model = build_model(family)
    generator = random.Random(0)
    parent = _filled(model, random_prompt(model, PREFIX, seed=3))
    # From here on there is a buffer with spare room, which both must not write.
    _feed(model, parent, random_prompt(model, 1, seed=4))
    twins = {"parent": copy.deepcopy(parent), "child": copy.deepcopy(parent)}
    caches = {"parent": parent, "child": fork(parent)}
    for step in range(12):
        name = generator.choice(("parent", "child"))
        ids = random_prompt(model, generator.randint(1, 4), seed=50 + step)
        kept = generator.randint(1, ids.shape[1])
        for owner in (caches[name], twins[name]):
            checkpoint = Checkpoint(owner, ids.shape[1])
            _feed(model, owner, ids)
            checkpoint.keep(kept)
        for which, cache in caches.items():
            _assert_equal_states(cache, _states(twins[which]), exact=True)


@pytest.mark.parametrize("grows", [True, False])
def test_fork_of_an_attention_cache_costs_nothing(grows: bool) -> None:
    """Twice the memory for a draft, where sharing is exact."""
    model = build_model("llama")
    cache = _filled(model, random_prompt(model, PREFIX, seed=4), grows)
    if grows:
        _feed(model, cache, random_prompt(model, 3, seed=5))
    held = {tensor.untyped_storage().data_ptr() for tensor in cache_tensors(cache)}
    child = fork(cache)
    assert child is not cache
    assert all(a is not b for a, b in zip(child.layers, cache.layers, strict=True))
    assert {tensor.untyped_storage().data_ptr() for tensor in cache_tensors(child)} <= held


def test_fork_of_recurrent_layers_copies_their_states() -> None:
    """A state that is written in place and shared."""
    model = build_model("qwen3_next")
    cache = _filled(model, random_prompt(model, PREFIX, seed=4))
    child = fork(cache)
    for layer, forked in zip(cache.layers, child.layers, strict=True):
        for name, state in layer_states(layer).items():
            if name.startswith(("conv_states", "recurrent_states")):
                assert layer_states(forked)[name].data_ptr() != state.data_ptr()


def test_layers_of_unknown_kinds_are_never_handled() -> None:
    """A subclass that is treated like its base, whatever it overrides."""

    class Strange(DynamicLayer):
        """Looks like a dynamic layer."""

    with pytest.raises(KeyError):
        kind_of(Strange())


@pytest.mark.parametrize("lead", [1, 3, SLIDING_WINDOW + 2])
@every_kind
def test_joined_rows_are_exact_and_part_without_a_trace(family: str, lead: int) -> None:
    """Padding that is attended to, or that stays behind in a window when the child has left."""
    model = build_model(family)
    prefix = random_prompt(model, PREFIX, seed=6)
    ahead = random_prompt(model, lead, seed=7)
    steps = [random_prompt(model, 1, seed=60 + step) for step in range(4)]
    child_steps = [random_prompt(model, 1, seed=80 + step) for step in range(4)]
    parent_alone, child_alone = _filled(model, prefix), _filled(model, prefix)
    _feed(model, child_alone, ahead)
    cache = _filled(model, prefix)
    child = fork(cache)
    _feed(model, child, ahead)
    join(cache, child, lead)
    for step, (ids, child_ids) in enumerate(zip(steps, child_steps, strict=True)):
        length = PREFIX + step + 1
        mask = torch.ones(2, length + lead, dtype=torch.long)
        mask[0, :lead] = 0
        positions = torch.tensor([[length - 1], [length + lead - 1]])
        arguments = {} if family == "mamba2" else {"position_ids": positions}
        logits = _feed(
            model, cache, torch.cat([ids, child_ids]), attention_mask=mask, **arguments
        ).logits
        for row, (alone, row_ids) in enumerate(((parent_alone, ids), (child_alone, child_ids))):
            expected = _feed(model, alone, row_ids).logits[0]
            assert (logits[row] - expected).abs().max() < TOLERANCE * expected.std()
    retire_row(cache, CPU)
    strip_padding(cache, lead)
    _assert_equal_states(cache, _states(parent_alone), exact=False)
    after = random_prompt(model, 5, seed=9)
    logits, expected = (_feed(model, owner, after).logits for owner in (cache, parent_alone))
    assert (logits - expected).abs().max() < TOLERANCE * expected.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_second_row_comes_and_goes_exactly(family: str) -> None:
    """A row that is not the parent's, or a layer that still has two."""
    model = build_model(family)
    cache = _filled(model, random_prompt(model, PREFIX, seed=6))
    before = _states(cache)
    add_row(cache, CPU)
    for layer in cache.layers:
        assert {state.shape[0] for state in layer_states(layer).values() if state.dim() > 2} <= {2}
    retire_row(cache, CPU)
    _assert_equal_states(cache, before, exact=True)


@every_kind
def test_a_row_can_be_retired_without_memory(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is given up for lack of memory, and whose end needs some."""
    model = build_model(family)
    cache = _filled(model, random_prompt(model, PREFIX, seed=6))
    before = _states(cache)
    add_row(cache, CPU)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    for layer in cache.layers:
        monkeypatch.setattr(layer, "reorder_cache", fail, raising=False)
    retire_row(cache, CPU)
    _assert_equal_states(cache, before, exact=True)


def test_a_second_row_holds_no_buffers_of_the_first() -> None:
    """Two generations of every buffer while a cache is doubled."""
    model = build_model("llama")
    cache = _filled(model, random_prompt(model, PREFIX, seed=6))
    _feed(model, cache, random_prompt(model, 1, seed=7))
    buffers = [weakref.ref(b) for layer in cache.layers for b in layer.buffers.values()]
    add_row(cache, CPU)
    assert buffers and not any(reference() is not None for reference in buffers)


OPERATIONS: dict[str, Callable[[Cache, Cache], None]] = {
    "add_row": lambda cache, child: add_row(cache, CPU),
    "join": lambda cache, child: join(cache, child, 2),
    "strip_padding": lambda cache, child: strip_padding(cache, 2),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_change_all_layers_or_none(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out between two layers."""
    model = build_model("llama")
    cache = _filled(model, random_prompt(model, PREFIX, seed=6))
    child = fork(cache)
    _feed(model, child, random_prompt(model, 2, seed=7))
    before = _states(cache)

    def fail(*args: Any) -> None:
        raise MemoryError

    last = cache.layers[-1]
    monkeypatch.setattr(last, "reorder_cache", fail)
    kind = type(kind_of(last))
    for name in ("concatenate", "strip_left"):
        original = getattr(kind, name)
        monkeypatch.setattr(
            kind,
            name,
            lambda self, layer, *rest, original=original: (
                fail() if layer is last else original(self, layer, *rest)
            ),
        )
    with pytest.raises(MemoryError):
        OPERATIONS[operation](cache, child)
    _assert_equal_states(cache, before, exact=True)


def test_growth_is_amortised_and_leaves_an_ordinary_cache() -> None:
    """A copy of the whole cache for every token, or a buffer handed back with it."""
    model = build_model("llama")
    cache = _filled(model, random_prompt(model, PREFIX, seed=6), grows=False)
    classes = [type(layer) for layer in cache.layers]
    twin = copy.deepcopy(cache)
    growth.amortise(cache)
    storages = set()
    for step in range(60):
        ids = random_prompt(model, 1, seed=100 + step)
        _feed(model, cache, ids)
        _feed(model, twin, ids)
        storages.add(cache.layers[0].keys.untyped_storage().data_ptr())
    assert len(storages) < 12
    growth.settle(cache, keeps_content=True)
    assert [type(layer) for layer in cache.layers] == classes
    _assert_equal_states(cache, _states(twin), exact=True)
    for tensor in cache_tensors(cache):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_growth_holds_no_prompt_twice() -> None:
    """The tensors of the prompt that stay beside the buffers, for the whole generation."""
    model = build_model("llama")
    prompt, token = random_prompt(model, PREFIX + 1, seed=6).split([PREFIX, 1], dim=1)
    cache = _filled(model, prompt, grows=False)
    held = [weakref.ref(tensor) for tensor in cache_tensors(cache)]
    growth.amortise(cache)
    _feed(model, cache, token)
    assert held and not any(reference() is not None for reference in held)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen3_next"])
def test_blocks_are_causal_on_a_filled_cache(family: str, attention: str) -> None:
    """Logits of early candidates that see the later ones."""
    model = build_model(family)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        prefix = random_prompt(model, PREFIX, seed=6)
        block = random_prompt(model, 5, seed=7)
        changed = block.clone()
        changed[0, -1] = (block[0, -1] + 1) % 256
        logits, other = (
            _feed(model, _filled(model, prefix), ids).logits for ids in (block, changed)
        )
    finally:
        model.set_attn_implementation(before)
    difference = (logits - other).abs().amax(dim=(0, 2)) / logits.std()
    assert (difference[:-1] < TOLERANCE).all()
    assert difference[-1] > 0.1


def test_layers_may_lie_on_several_devices() -> None:
    """Index or padding tensors tied to the device of the first layer."""
    cache = DynamicCache()
    for index, device in enumerate(("cpu", "meta")):
        cache.update(*(torch.zeros(1, 2, 5, 8, device=device) for _ in range(2)), index)
    child = fork(cache)
    add_row(cache, CPU)
    retire_row(cache, CPU)
    for index, device in enumerate(("cpu", "meta")):
        child.update(*(torch.zeros(1, 2, 3, 8, device=device) for _ in range(2)), index)
    join(cache, child, 3)
    assert [layer.keys.shape[0] for layer in cache.layers] == [2, 2]
    retire_row(cache, CPU)
    strip_padding(cache, 3)
    growth.amortise(cache)
    growth.settle(cache, keeps_content=True)
    assert [layer.keys.device.type for layer in cache.layers] == ["cpu", "meta"]
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 2, 5, 8)] * 2


def test_models_are_probed_again_with_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that was true before the model was moved, cast or given another attention."""
    model = copy.deepcopy(build_model("llama"))
    probes: list[Any] = []
    probe = support._probe

    def counted(*args: Any) -> Any:
        probes.append(args)
        return probe(*args)

    monkeypatch.setattr(support, "_probe", counted)
    for _ in range(2):
        assert support.multi_token_support(model, model.generation_config).supported
    assert len(probes) == 1
    model.set_attn_implementation("eager")
    support.multi_token_support(model, model.generation_config)
    support.multi_token_support(model.to(torch.bfloat16), model.generation_config)
    assert len(probes) == 3


def test_an_answer_of_training_mode_ends_with_it() -> None:
    """Dropout that is found once and believed for ever, or a probe that draws random numbers."""
    model = copy.deepcopy(build_model("llama"))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert not support.multi_token_support(model.train(), model.generation_config).supported
    assert torch.equal(torch.rand(1), expected)
    assert support.multi_token_support(model.eval(), model.generation_config).supported


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_told_apart_in_16_bit(family: str, dtype: torch.dtype) -> None:
    """Rounding taken for an error, or an error for rounding: other tokens, and no note."""
    model = copy.deepcopy(build_model(family)).to(dtype)
    answer = support.multi_token_support(model, model.generation_config)
    assert answer.supported is FAMILIES[family].multi_token_exact


def test_a_model_that_fails_on_several_tokens_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that dies in the probe, where plain `generate` feeds one token at a time."""
    model = copy.deepcopy(build_model("llama"))
    forward = compat.forward

    def single(model: Any, ids: Any, n_tokens: int, kwargs: Any) -> Any:
        if n_tokens == support.PROBE_TOKENS:
            raise RuntimeError("size mismatch")
        return forward(model, ids, n_tokens, kwargs)

    monkeypatch.setattr(compat, "forward", single)
    answer = support.multi_token_support(model, model.generation_config)
    assert "cannot read several tokens at once (RuntimeError: size mismatch)" in answer.reason


def test_no_removed_name_of_the_host_is_used() -> None:
    """Names of the cache that the host has dropped or is dropping."""
    removed = ("key_cache", "value_cache", "from_legacy_cache", "past_key_values", "cache_params")
    sources = list(Path(growth.__file__).parents[1].rglob("*.py"))
    assert len(sources) > 20
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert not [name for name in removed if name in text], path
