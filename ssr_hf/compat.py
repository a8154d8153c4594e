"""The only file that knows versions and private names of transformers and torch.

Everything the decoding loop needs of the host beyond its public surface is named here once, so that
a new release of transformers is met by changing this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.distributed.utils import _get_torch_distributed_world_size
from transformers.generation import logits_process
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .errors import UnsupportedError, message

if TYPE_CHECKING:
    from torch import nn
    from transformers import Cache, GenerationConfig, PreTrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput

    ModelKwargs = dict[str, Any]

# Stands for a limit that there is not.
UNLIMITED = 2**62

# Keyword arguments with one entry per token; every other argument of a forward has no length.
PER_TOKEN_KWARGS = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")

# Models that prepare the next forward in a way of their own, but from the tokens alone.
STATELESS_MODELS = ("PaliGemmaForConditionalGeneration",)

# Models that restart a state where several tokens meet a filled cache. Rounding to 16 bit can hide
# that from a probe.
RESTARTING_MODELS = ("jamba", "nemotron_h")

# Processors whose result depends on their arguments alone, so that a draft may call them, too.
SIDE_EFFECT_FREE_PROCESSORS: tuple[type[LogitsProcessor], ...] = (
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
)

# Those of them that know nothing about a vocabulary, so that they apply to any model.
VOCABULARY_FREE_PROCESSORS: tuple[type[LogitsProcessor], ...] = (
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
)


def attention_implementation(model: PreTrainedModel) -> str | None:
    """Which kernels of attention the model runs."""
    return model.config._attn_implementation


def repository(model: PreTrainedModel) -> str:
    """Where the model was loaded from; empty if it was not."""
    return model.config._name_or_path


def is_given_by_user(cache: Cache | None) -> bool:
    """Whether the user passed this cache to `generate`."""
    return bool(getattr(cache, "_is_user_defined", False))


def eos_token_ids(generation_config: GenerationConfig) -> frozenset[int]:
    """Tokens that end the text, of a config that `generate` has prepared."""
    eos = getattr(generation_config, "_eos_token_tensor", None)
    return frozenset() if eos is None else frozenset(eos.flatten().tolist())


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether the model keeps a state that cannot be cropped."""
    return bool(model._is_stateful)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` was called on the module, on its forward or in place."""
    wraps_original = "_orig_mod" in module._modules
    compiled_call = module._compiled_call_impl is not None
    forward = module.__dict__.get("forward")
    return wraps_original or compiled_call or hasattr(forward, "_torchdynamo_orig_callable")


def uncompiled(module: nn.Module) -> Any:
    """The module inside the one that `torch.compile` returned, or the module itself."""
    return getattr(module, "_orig_mod", module)


def accelerate_hook(module: nn.Module) -> Any:
    """What `accelerate` runs around the module's forward; None where nothing."""
    return getattr(module, "_hf_hook", None)


def attributes(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """The dicts that hold the attributes of a module and its buffers."""
    return vars(module), module._buffers


def sample(model: PreTrainedModel, input_ids: torch.LongTensor, **arguments: Any) -> Any:
    """What `generate` does without a decoding function, for one row or several."""
    return model._sample(input_ids, **arguments)


def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: ModelKwargs,
) -> ModelOutput:
    """Runs the prompt exactly as `generate` does: prefilled caches, embeddings, chunks, images."""
    return model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)


def grow_kwargs(
    model: PreTrainedModel, model_kwargs: ModelKwargs, n_tokens: int, outputs: ModelOutput | None
) -> ModelKwargs:
    """`model_kwargs` for `n_tokens` more tokens: mask, positions and token types."""
    grown = dict(model_kwargs)
    if n_tokens == 0:
        return grown
    grown = model._update_model_kwargs_for_generation(
        {} if outputs is None else outputs, grown, num_new_tokens=n_tokens
    )
    types = model_kwargs.get("token_type_ids")
    if types is not None and n_tokens > 1:
        # One token at a time, the host repeats the last type; for several, the last several.
        new_types = types[:, -1:].expand(-1, n_tokens)
        grown["token_type_ids"] = torch.cat([types, new_types], dim=1)
    return grown


def forward(
    model: PreTrainedModel, input_ids: torch.Tensor, n_tokens: int, model_kwargs: ModelKwargs
) -> ModelOutput:
    """One forward of the last `n_tokens` of `input_ids` on the cache, logits at each of them."""
    inputs = model.prepare_inputs_for_generation(
        input_ids, next_sequence_length=n_tokens, **model_kwargs
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = n_tokens
    return model(**inputs, return_dict=True)


def returned_cache(model: PreTrainedModel, outputs: ModelOutput) -> Cache:
    """The cache that a forward has filled.

    Raises:
        `UnsupportedError`: There is none, as in models that keep their state in their modules.
    """
    cache: Cache | None = getattr(outputs, "cache", None)
    if cache is None:
        what = f"{type(model).__name__} returns no cache and keeps its state to itself"
        accepted = "Models that return their cache are accepted"
        raise UnsupportedError(message(what, accepted, "Use plain generate"))
    return cache


def hands_over_state(model: PreTrainedModel) -> bool:
    """Whether a forward needs what the one before returned, other than the cache."""
    own = type(model)._update_model_kwargs_for_generation
    is_own = own is not GenerationMixin._update_model_kwargs_for_generation
    return is_own and type(model).__name__ not in STATELESS_MODELS


def longest_uniform_text(model: PreTrainedModel, n_positions: int = 0) -> int:
    """Positions that a forward may reach without changing what it computes for earlier ones.

    Beyond the longest text of a model, dynamic rotary positions are scaled anew for each length.
    Where a text crosses the first length of longrope, all positions change at once, and Phi-3
    rebuilds its cache; a text that begins beyond it is past that.

    Args:
        model (`PreTrainedModel`): The model.
        n_positions (`int`, *optional*, defaults to 0): Positions of the text so far.
    """
    config = model.config.get_text_config(decoder=True)
    crossings = [limit for limit in _longrope_lengths(config) if limit >= n_positions]
    longest = getattr(config, "max_position_embeddings", None)
    return min([*crossings, *([] if longest is None else [int(longest)])], default=UNLIMITED)


def _longrope_lengths(config: PreTrainedConfig) -> Iterator[int]:
    """Lengths up to which a model with rescaled rotary positions computes as it was trained."""
    own = getattr(config, "original_max_position_embeddings", None)
    if own is not None:
        yield int(own)
    parameters = getattr(config, "rope_parameters", None) or {}
    for candidate in (parameters, *parameters.values()):
        if isinstance(candidate, Mapping) and candidate.get("rope_type") == "longrope":
            yield int(candidate["original_max_position_embeddings"])


def prepare_cache(
    model: PreTrainedModel, generation_config: GenerationConfig, n_rows: int, max_length: int
) -> Cache | None:
    """The cache that `generate` would make for this model; None where the model makes its own."""
    model_kwargs: ModelKwargs = {}
    mode = generation_config.get_generation_mode()
    model._prepare_cache_for_generation(generation_config, model_kwargs, mode, n_rows, max_length)
    return model_kwargs.get("cache")


def fresh_kwargs(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig
) -> ModelKwargs:
    """What `generate` prepares for the forwards of a model that reads `input_ids`, unpadded."""
    model_kwargs: ModelKwargs = {"use_cache": True}
    cache = prepare_cache(model, generation_config, *input_ids.shape)
    if cache is not None:
        model_kwargs["cache"] = cache
    # Without the cache, which is empty: not every one can tell its length.
    if "position_ids" in inspect.signature(model.forward).parameters:
        positions = model._prepare_position_ids_for_generation(input_ids, {})
        model_kwargs["position_ids"] = positions
    return model_kwargs


def decode_optimisation(model: PreTrainedModel) -> AbstractContextManager[None]:
    """The host's own switch to kernels for decoding (mixture-of-experts models)."""
    return model._optimize_model_for_decode()


def runs_on_several_ranks(model: PreTrainedModel, synced_gpus: bool | None) -> bool:
    """Whether ranks must run the same forwards: FSDP, ZeRO-3 or tensor parallelism.

    The host finds out itself where `synced_gpus` is None, and does not tell a decoding function.
    """
    if synced_gpus is not None:
        return synced_gpus
    if _get_torch_distributed_world_size() <= 1:
        return False
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return bool(sharded or (getattr(model, "tp_size", None) or 1) > 1)


def end_and_length_only(criteria: StoppingCriteriaList) -> tuple[frozenset[int], int] | None:
    """End-of-sequence ids and maximum length, if `criteria` ask for nothing else.

    Returns:
        `tuple[frozenset[int], int]` or `None`: None where another criterion has to be called for
        every token.
    """
    eos_token_ids: set[int] = set()
    max_length = UNLIMITED
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos_token_ids.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is MaxLengthCriteria:
            max_length = min(max_length, criterion.max_length)
        else:
            return None
    return frozenset(eos_token_ids), max_length
