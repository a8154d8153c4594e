"""Self-speculation as part of `model.generate`: enabling, early refusals and binding.

`generate` hands a callable `custom_generate` no streamer and no tokenizer, so `enable` wraps the
`generate` of one model instance, binds them, and builds what needs them.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoTokenizer,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode

from . import compat
from .budget import ThinkingBudgetLogitsProcessor
from .cache.support import Support, Unsupported, cache_support, multi_token_support
from .candidates import Proposer
from .commit import Committer
from .config import SelfSpeculationConfig
from .decoding import SelfSpeculativeDecoding
from .drafting import DraftSchedule
from .errors import ConfigError, MarkerError, UnsupportedError, message
from .lanes import LANE_TYPES, DraftRules
from .markers import PhaseTracker, ThinkingMarkers
from .outputs import SelfSpeculativeOutput
from .stats import Recorder
from .target import Target
from .tokens import TokenSequence

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

logger = logging.getLogger(__name__)

# What `generate` was on the instance before `enable`; None where it was the class's own.
_enabled: weakref.WeakKeyDictionary[torch.nn.Module, Callable[..., Any] | None] = (
    weakref.WeakKeyDictionary()
)


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Lets `model.generate` take `self_speculation=...`. Only this instance changes.

    Args:
        model (`PreTrainedModel`): A decoder-only model, or a wrapper such as `PeftModel`.

    Returns:
        `PreTrainedModel`: The same model.

    Example:

    ```python
    >>> import ssr_hf
    >>> model, tokenizer = ssr_hf.load_tiny_reasoner()
    >>> model = ssr_hf.enable(model)
    >>> ssr_hf.disable(model)

    ```
    """
    if model not in _enabled:
        _enabled[model] = model.__dict__.get("generate")
        model.generate = types.MethodType(generate, model)
    return model


def disable(model: PreTrainedModel) -> None:
    """Restores `model.generate` exactly; does nothing where it was not enabled.

    Args:
        model (`PreTrainedModel`): A model that was given to `enable`.
    """
    if model not in _enabled:
        return
    previous = _enabled.pop(model)
    if previous is None:
        del model.__dict__["generate"]
    else:
        model.generate = previous


@functools.wraps(GenerationMixin.generate)
def generate(self: Any, *args: Any, self_speculation: object = None, **kwargs: Any) -> Any:
    # Bound to an instance by `enable`; it keeps the name `generate` so that a pickled model refers
    # to the method of its class.
    original = _enabled.get(self) or functools.partial(type(self).generate, self)
    config = SelfSpeculationConfig.coerce(self_speculation)
    if config is None:
        return original(*args, **kwargs)
    _refuse_arguments(kwargs)
    streamer = kwargs.get("streamer")
    tokenizer = kwargs.pop("tokenizer", None)
    _bind_stop_strings(self, kwargs, tokenizer)
    ending = None if streamer is None else _EndOnce(streamer)
    kwargs["custom_generate"] = functools.partial(
        self_speculative_decoding,
        self_speculation=config,
        tokenizer=tokenizer,
        streamer=ending,
        synced_gpus=kwargs.get("synced_gpus"),
    )
    try:
        return original(*args, **kwargs)
    except BaseException:
        if ending is not None:
            ending.end()
        raise


class _EndOnce:
    """A streamer whose `end` reaches the user's streamer once, however the call ends."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._ended = False

    def put(self, value: torch.Tensor) -> None:
        self._streamer.put(value)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._streamer.end()


def _refuse_arguments(kwargs: dict[str, Any]) -> None:
    """Refuses arguments that `generate` would act on before the decoding function is called."""
    if kwargs.get("custom_generate") is not None:
        raise UnsupportedError(
            message(
                f"custom_generate={kwargs['custom_generate']!r} and self_speculation are both set",
                "One way to decode is accepted",
                "Leave one of them out",
            )
        )
    if kwargs.get("cache_implementation") == "paged":
        raise UnsupportedError(
            message(
                "cache_implementation='paged' switches generate to continuous batching",
                "A dynamic cache is accepted",
                "Leave cache_implementation out",
            )
        )
    if kwargs.get("assistant_model") is not None:
        raise UnsupportedError(
            message(
                "assistant_model and self_speculation are both set",
                "Self-speculation drafts with the model itself",
                "Leave assistant_model out",
            )
        )


def _bind_stop_strings(
    model: Any, kwargs: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Turns stop strings into a criterion: `generate` cannot build it without the tokenizer."""
    stop_strings = kwargs.get("stop_strings")
    for source in (kwargs.get("generation_config"), getattr(model, "generation_config", None)):
        if stop_strings is None and "stop_strings" not in kwargs:
            stop_strings = getattr(source, "stop_strings", None)
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ConfigError(
            message(
                f"stop_strings={stop_strings!r} is set without a tokenizer",
                "Stop strings need the tokenizer of the model",
                "Pass tokenizer=tokenizer to generate",
            )
        )
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    kwargs["stopping_criteria"] = criteria
    kwargs["stop_strings"] = None


def self_speculative_decoding(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    self_speculation: object = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool | None = None,
    **model_kwargs: Any,
) -> SelfSpeculativeOutput | torch.LongTensor:
    """Decodes with self-speculation; the tokens are those of plain `generate`.

    This is the `custom_generate` callable of the host. `generate` gives such a callable neither
    streamer nor tokenizer: use `enable`, or bind them with `functools.partial`.

    Args:
        model (`PreTrainedModel`): The model.
        input_ids (`torch.LongTensor` of shape `(1, T)`): The prompt.
        logits_processor (`LogitsProcessorList`): Prepared by `generate`.
        stopping_criteria (`StoppingCriteriaList`): Prepared by `generate`.
        generation_config (`GenerationConfig`): Prepared by `generate`; not changed.
        self_speculation (`bool`, `dict` or `SelfSpeculationConfig`): The settings.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Finds the thinking markers; loaded from
            the model's own repository when None.
        streamer (`BaseStreamer`, *optional*): Gets every emitted token; `end` is always called.
        synced_gpus (`bool`, *optional*): Refused when true.

    Returns:
        `SelfSpeculativeOutput` or `torch.LongTensor`: As plain `generate`; the former with
        `return_dict_in_generate=True`.

    Raises:
        `UnsupportedError`: Before the prompt is read, where tokens could differ.
        `MarkerError`: The thinking markers are missing or ambiguous.

    Example:

    ```python
    >>> import ssr_hf
    >>> model, tokenizer = ssr_hf.load_tiny_reasoner()
    >>> problem = ssr_hf.tiny_reasoner_prompts(1, seed=0)[0]
    >>> inputs = tokenizer(problem.prompt, return_tensors="pt")
    >>> config = ssr_hf.SelfSpeculationConfig(end_of_thinking="</think>")
    >>> output = model.generate(
    ...     **inputs, max_new_tokens=8, self_speculation=config,
    ...     custom_generate=ssr_hf.self_speculative_decoding,
    ... )

    ```
    """
    config = SelfSpeculationConfig.coerce(self_speculation)
    plain = functools.partial(
        model._sample,
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        streamer=streamer,
        **model_kwargs,
    )
    if config is None:
        return plain(synced_gpus=bool(synced_gpus))
    _refuse_call(model, generation_config, model_kwargs, synced_gpus)
    if input_ids.shape[0] > 1:
        logger.warning(
            "Self-speculation runs one sequence at a time; these %d are decoded plainly. Call "
            "generate once per prompt to speculate.",
            input_ids.shape[0],
        )
        return plain()
    try:
        return _decode(
            model, input_ids, logits_processor, stopping_criteria, generation_config, config,
            tokenizer, streamer, model_kwargs,
        )
    finally:
        if streamer is not None:
            streamer.end()


def _refuse_call(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    synced_gpus: bool | None,
) -> None:
    """Refuses what cannot be the tokens of plain `generate`, before the prompt is read."""
    mode = generation_config.get_generation_mode()
    accepted = "Greedy search and sampling of decoder-only models are accepted"
    refusals = (
        (model.config.is_encoder_decoder, "The model is an encoder-decoder model", "Use plain generate"),
        (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
            f"The generation mode is {mode.value}",
            "Set num_beams=1 and leave out penalty_alpha, prompt_lookup_num_tokens and the like",
        ),
        (bool(synced_gpus), "synced_gpus is set", "Use plain generate with FSDP or ZeRO-3"),
        (
            generation_config.use_cache is False,
            "use_cache is False",
            "Pass use_cache=True to generate",
        ),
        (
            bool(generation_config.output_attentions),
            "output_attentions is set, and attention maps of several tokens at once differ in shape",
            "Leave output_attentions out",
        ),
    )
    for refused, what, next_step in refusals:
        if refused:
            raise UnsupportedError(message(what, accepted, next_step))
    _require_supported(model, cache_support(model_kwargs.get("cache")))


def _require_supported(model: PreTrainedModel, support: Support) -> None:
    if isinstance(support, Unsupported):
        what = f"{type(model).__name__} cannot be accelerated: {support.reason}"
        accepted = "Caches with full, sliding, convolutional or recurrent layers are accepted"
        raise UnsupportedError(message(what, accepted, support.hint))


def _decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    config: SelfSpeculationConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> SelfSpeculativeOutput | torch.LongTensor:
    """Assembles the parts of the loop, runs it, and packs what `generate` returns."""
    recorder = Recorder()
    markers = find_markers(model, tokenizer, config)
    support = multi_token_support(model, generation_config)
    if isinstance(support, Unsupported):
        recorder.note(f"decoding without candidates: {support.reason}")
        _warn_once(support.reason)
        config = replace(config, reuse="none")
    sequence = TokenSequence(input_ids)
    tracker = PhaseTracker(markers, sequence.token_ids)
    processors = LogitsProcessorList(logits_processor)
    if config.thinking_budget is not None:
        processors.append(
            ThinkingBudgetLogitsProcessor(markers, config.thinking_budget, len(sequence))
        )
    target = Target(model, sequence, model_kwargs)
    committer = Committer(sequence, processors, stopping_criteria, generation_config, streamer)
    longest_text = _longest_text(model, stopping_criteria)
    rules = DraftRules(
        closing_ids=markers.closing,
        eos_token_ids=_eos_token_ids(generation_config),
        logits_processor=LogitsProcessorList(
            p for p in logits_processor if type(p) in compat.SIDE_EFFECT_FREE_PROCESSORS
        ),
    )
    lane = LANE_TYPES["lockstep" if config.lane == "auto" else config.lane](target)
    user_cache = getattr(model_kwargs.get("cache"), "_is_user_defined", False)
    loop = SelfSpeculativeDecoding(
        target=target,
        committer=committer,
        proposer=Proposer(config, tracker, sequence, longest_text),
        lane=lane,
        schedule=DraftSchedule(config, lane, tracker, sequence, rules, longest_text, recorder),
        tracker=tracker,
        recorder=recorder,
        keeps_cache=bool(generation_config.return_dict_in_generate) or user_cache,
    )
    loop.run(generation_config)
    if not generation_config.return_dict_in_generate:
        return sequence.ids.clone()
    return SelfSpeculativeOutput(
        sequences=sequence.ids.clone(),
        scores=committer.scores,
        logits=committer.logits,
        cache=target.cache,
        speculation=recorder.stats(tracker),
    )


def find_markers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    config: SelfSpeculationConfig,
) -> ThinkingMarkers:
    """The thinking markers: from the config as ids, else with the tokenizer.

    Args:
        model (`PreTrainedModel`): Names its own repository.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Loaded from that repository when None.
        config (`SelfSpeculationConfig`): May give the markers.

    Returns:
        `ThinkingMarkers`: The markers.

    Raises:
        `MarkerError`: There is no tokenizer to be found, or it has no known markers.
    """
    end, start = config.end_of_thinking, config.start_of_thinking
    if tokenizer is None and isinstance(end, tuple) and not isinstance(start, str):
        return ThinkingMarkers(start=(start,) if start else (), end=(end,))
    if tokenizer is None:
        tokenizer = _load_tokenizer(model)
    return ThinkingMarkers.from_tokenizer(tokenizer, end, start)


def _load_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    repository = model.config._name_or_path
    next_step = "Pass tokenizer=tokenizer to generate, or end_of_thinking as token ids"
    if not repository:
        what = "No tokenizer was passed and the model does not name its repository"
        raise MarkerError(message(what, "A tokenizer finds the thinking markers", next_step))
    try:
        return AutoTokenizer.from_pretrained(repository)
    except (OSError, ValueError) as error:
        what = f"No tokenizer was passed and none could be loaded from {repository!r}"
        raise MarkerError(
            message(what, "A tokenizer finds the thinking markers", next_step)
        ) from error


def _longest_text(model: PreTrainedModel, stopping_criteria: StoppingCriteriaList) -> int:
    """Most tokens of the text, prompt included: the length criterion and the model's positions."""
    limits = [2**62]
    if stopping_criteria.max_length is not None:
        limits.append(stopping_criteria.max_length)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None:
        limits.append(positions)
    return min(limits)


def _eos_token_ids(generation_config: GenerationConfig) -> frozenset[int]:
    eos = getattr(generation_config, "_eos_token_tensor", None)
    return frozenset() if eos is None else frozenset(eos.flatten().tolist())


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("Self-speculation decodes without candidates: %s.", text)
