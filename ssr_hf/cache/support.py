"""Which caches and models can be accelerated without changing a token, and why the others cannot.

A check returns `Supported` or `Unsupported(reason, hint)`; the error message, the README table and
the tests all use that text.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import Cache, EncoderDecoderCache, QuantizedCache, StaticCache

from .. import compat
from .layers import LAYER_KINDS

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

PROBE_TOKENS = 5
PROBE_PREFIX = 4
# Rounding explains differences of logits up to this many times what was measured of it, and at
# least so many standard deviations of the logits.
ROUNDING_MARGIN = 4
LEAST_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Supported:
    """The check passed."""

    supported: bool = True


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The check failed: `reason` says why, `hint` what to do instead."""

    reason: str
    hint: str
    supported: bool = False


Support = Supported | Unsupported

DEFAULT_CACHE_HINT = "Leave cache_implementation and cache unset, or pass a DynamicCache"
UNSUPPORTED_CACHES: dict[type, str] = {
    EncoderDecoderCache: "an encoder-decoder cache has no chain of thought to fork",
    QuantizedCache: "a quantized cache cannot drop rejected tokens without re-quantizing others",
    StaticCache: "a static cache has no room for candidates and cannot be forked in place",
}


def cache_support(cache: object) -> Support:
    """Whether a cache can be rolled back and forked exactly.

    Args:
        cache (`Cache` or `None`): What the model's forward will be given.

    Returns:
        `Supported` or `Unsupported`: The latter names the cache class or the layer classes.
    """
    if cache is None:
        reason = "generate prepares no cache for this model"
        return Unsupported(reason, "Use plain generate for this model")
    if not isinstance(cache, Cache):
        reason = f"a cache of type {type(cache).__name__} is not a transformers Cache"
        return Unsupported(reason, DEFAULT_CACHE_HINT)
    for cache_type, reason in UNSUPPORTED_CACHES.items():
        if isinstance(cache, cache_type):
            return Unsupported(reason, DEFAULT_CACHE_HINT)
    if cache.offloading:
        reason = "an offloaded cache moves layers between devices during the forward"
        return Unsupported(reason, DEFAULT_CACHE_HINT)
    unknown = {type(layer).__name__ for layer in cache.layers if type(layer) not in LAYER_KINDS}
    if unknown:
        reason = (
            f"cache layers of type {', '.join(sorted(unknown))} cannot be rolled back and forked"
        )
        return Unsupported(reason, "Use plain generate for this model")
    return Supported()


# By model, then by the question and what decides which kernels the model runs.
_probed: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], Any]] = (
    weakref.WeakKeyDictionary()
)
Answer = TypeVar("Answer")


def asked_once(model: PreTrainedModel, question: str, probe: Callable[[], Answer]) -> Answer:
    """The answer of a probe that runs once per model and what decides about its kernels.

    A probe runs in the middle of a call of `generate`. It leaves the model and the random
    generators as they were: some models keep state of a text in their modules.

    Args:
        model (`PreTrainedModel`): The model.
        question (`str`): What is probed.
        probe (`Callable`): Runs the probe.

    Returns:
        What `probe` returned the first time.
    """
    known = _probed.setdefault(model, {})
    key = (question, *kernels_of(model))
    if key not in known:
        with torch.no_grad(), _undisturbed(model):
            known[key] = probe()
    answer: Answer = known[key]
    return answer


@contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Puts back which objects the modules of `model` held, and the random generators.

    What is written into a tensor or a list in place is not undone.
    """
    held = [
        (owned, dict(owned)) for module in model.modules() for owned in compat.attributes(module)
    ]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        try:
            yield
        finally:
            for owner, values in held:
                for name in owner.keys() - values.keys():
                    del owner[name]
                for name, value in values.items():
                    if owner.get(name) is not value:
                        owner[name] = value


def multi_token_support(model: PreTrainedModel, generation_config: GenerationConfig) -> Support:
    """Whether feeding several tokens on a filled cache equals feeding them one by one.

    Some model classes restart or approximate a state when several tokens meet a filled cache. The
    first call per model, type, device and attention implementation compares 5 tokens at once with
    5 single steps; later calls reuse it. In 16 bit the known ones are named instead, because
    rounding can be as large as their error.

    Args:
        model (`PreTrainedModel`): The model.
        generation_config (`GenerationConfig`): Says which cache `generate` would use.

    Returns:
        `Supported` or `Unsupported`: The latter states the largest difference.
    """
    return asked_once(model, "several tokens", lambda: _probe(model, generation_config))


def kernels_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """What decides which kernels a model runs, dropout included."""
    return model.dtype, model.device, compat.attention_implementation(model), model.training


def probe_ids(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Arbitrary token ids `[1, length]`, always the same."""
    generator = torch.Generator("cpu").manual_seed(0)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    shape = (1, length)
    ids = torch.randint(1, min(vocab_size, 1000), shape, generator=generator, device="cpu")
    return ids.to(model.device)


def deviation(expected: torch.Tensor, logits: torch.Tensor) -> float:
    """Largest difference of logits, in standard deviations of the expected ones."""
    difference = (expected.float() - logits.float()).abs().max()
    return (difference / expected.float().std().clamp_min(1e-6)).item()


def tolerance(model: PreTrainedModel, generation_config: GenerationConfig) -> float:
    """The largest deviation that rounding explains.

    Measured on the model itself: a forward over `n` rows rounds as one over `n` tokens does, and
    its rows cannot differ in anything else.

    Args:
        model (`PreTrainedModel`): The model.
        generation_config (`GenerationConfig`): Says which cache `generate` would use.

    Returns:
        `float`: Standard deviations of the logits.
    """
    return asked_once(model, "rounding", lambda: _measure_rounding(model, generation_config))


def _measure_rounding(model: PreTrainedModel, generation_config: GenerationConfig) -> float:
    ids = probe_ids(model, PROBE_PREFIX + PROBE_TOKENS)
    alone = _probe_logits(model, generation_config, ids, [1] * PROBE_TOKENS)
    rows = ids.repeat(PROBE_TOKENS, 1)
    try:
        beside = _probe_logits(model, generation_config, rows, [1] * PROBE_TOKENS)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a model of one row, whose rounding stays unknown
        beside = alone
    last_place = torch.finfo(model.dtype).eps * (alone.abs().max() / alone.std().clamp_min(1e-6))
    measured = deviation(alone, beside) + last_place.item()
    return max(LEAST_TOLERANCE, ROUNDING_MARGIN * measured)


def _probe(model: PreTrainedModel, generation_config: GenerationConfig) -> Support:
    hint = "Use plain generate for this model"
    name = type(model).__name__
    is_16_bit = torch.finfo(model.dtype).bits == 16
    model_type = model.config.get_text_config(decoder=True).model_type
    if is_16_bit and model_type in compat.RESTARTING_MODELS:
        return Unsupported(f"{name} restarts a state where several tokens are read at once", hint)
    ids = probe_ids(model, PROBE_PREFIX + PROBE_TOKENS)
    single = _probe_logits(model, generation_config, ids, [1] * PROBE_TOKENS)
    try:
        block = _probe_logits(model, generation_config, ids, [PROBE_TOKENS])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = f"{name} cannot read several tokens at once ({type(error).__name__}: {error})"
        return Unsupported(reason, hint)
    if model.training:
        again = _probe_logits(model, generation_config, ids, [1] * PROBE_TOKENS)
        if not torch.equal(single, again):
            return Unsupported(f"{name} drops out at random in training mode", "Call model.eval()")
    difference = deviation(single, block)
    if difference <= tolerance(model, generation_config):
        return Supported()
    reason = (
        f"{name} gives other logits for {PROBE_TOKENS} tokens at once than for {PROBE_TOKENS} "
        f"single steps (difference {difference:.2g} standard deviations)"
    )
    return Unsupported(reason, hint)


def _probe_logits(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    ids: torch.Tensor,
    blocks: list[int],
) -> torch.Tensor:
    """Logits [PROBE_TOKENS, V] of the last tokens of the first row of `ids` [B, T], fed in blocks
    of the given sizes."""
    model_kwargs: dict[str, Any] = {"use_cache": True}
    cache = compat.prepare_cache(model, generation_config, *ids.shape)
    if cache is not None:
        model_kwargs["cache"] = cache
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    logits = []
    end = 0
    for n_tokens in [PROBE_PREFIX, *blocks]:
        end += n_tokens
        kwargs = {**model_kwargs, "position_ids": positions[:, :end]}
        outputs = compat.forward(model, ids[:, :end], n_tokens, kwargs)
        model_kwargs["cache"] = compat.returned_cache(model, outputs)
        logits.append(outputs.logits[0, -n_tokens:].float())
    return torch.cat(logits[1:])
