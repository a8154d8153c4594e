"""Self-speculation as part of `model.generate`: enabling, early refusals and binding.

`generate` hands a callable `custom_generate` no streamer and no tokenizer, so `enable` wraps the
`generate` of one model instance, binds them, and builds what needs them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)

from . import compat
from .assembly import decode, decode_rows
from .config import SelfSpeculationConfig
from .errors import ConfigError, message
from .host_call import HostCall
from .outputs import SelfSpeculativeOutput
from .profile import Profile
from .refusals import refuse_arguments, refuse_call
from .specreason import StepRequest, StepSpeculationConfig, refuse_steps
from .suffix_index import History

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Enabled:
    """What was learnt about one enabled model, and what it wrote."""

    profile: Profile = field(default_factory=Profile)
    history: History = field(default_factory=History)


_enabled: weakref.WeakKeyDictionary[torch.nn.Module, _Enabled] = weakref.WeakKeyDictionary()
# Attribute of an enabled model: the `generate` that somebody else gave this instance before. Kept
# there because a table of bound methods would keep their models alive.
_REPLACED = "_generate_before_ssr_hf"


def enable(model: PreTrainedModel, profile: Profile | None = None) -> PreTrainedModel:
    """Lets `model.generate` take `self_speculation=...`. Only this instance changes.

    Args:
        model (`PreTrainedModel`): A decoder-only model, or a wrapper such as `PeftModel`.
        profile (`Profile`, *optional*): What earlier runs learnt about cost and acceptance. It is
            kept up to date; a new one is made when None. Enabling again replaces it.

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
    inner = _generating(model)
    if not _is_enabled(inner):
        own = vars(inner).get("generate")
        # It is ours where another thread was faster.
        if own is not None and not _is_ours(own):
            vars(inner)[_REPLACED] = own
        inner.generate = types.MethodType(generate, inner)
    state = _state_of(inner)
    if profile is not None:
        _enabled[inner] = replace(state, profile=profile)
    return model


def disable(model: PreTrainedModel) -> None:
    """Restores `model.generate` exactly; does nothing where it was not enabled.

    Args:
        model (`PreTrainedModel`): A model that was given to `enable`.

    Example:

    ```python
    >>> import ssr_hf
    >>> model, tokenizer = ssr_hf.load_tiny_reasoner()
    >>> ssr_hf.disable(ssr_hf.enable(model))
    >>> "generate" in vars(model)
    False

    ```
    """
    inner = _generating(model)
    if _is_enabled(inner):
        del vars(inner)["generate"]
    _enabled.pop(inner, None)
    if _REPLACED in vars(inner):
        vars(inner)["generate"] = vars(inner).pop(_REPLACED)


def _is_enabled(inner: Any) -> bool:
    """Whether `enable` was called, on the model or on the one that it is a copy of; somebody may
    have wrapped its method since, but has not removed it."""
    own = vars(inner).get("generate")
    return own is not None and (inner in _enabled or _is_ours(own))


def _is_ours(method: object) -> bool:
    return getattr(method, "__func__", None) is generate


def _state_of(inner: Any) -> _Enabled:
    """The state of an enabled model; a copy of one has its own from its first call on."""
    return _enabled.setdefault(inner, _enabled.get(inner) or _Enabled())


def _generating(model: Any) -> Any:
    """The module that `model.generate` runs on: `torch.compile` wraps a model without being one."""
    return compat.uncompiled(model)


@functools.wraps(GenerationMixin.generate)
def generate(
    self: Any,
    *args: Any,
    self_speculation: object = None,
    step_speculation: object = None,
    **kwargs: Any,
) -> Any:
    # Bound to an instance by `enable`; it keeps the name `generate` so that a pickled model refers
    # to the method of its class.
    original = vars(self).get(_REPLACED) or functools.partial(type(self).generate, self)
    config = SelfSpeculationConfig.coerce(self_speculation)
    step_config = StepSpeculationConfig.coerce(step_speculation)
    if config is None and step_config is None:
        return original(*args, **kwargs)
    kwargs.update(_by_name(original, args, kwargs))
    assistant = {}
    if step_config is not None:
        # The host must not see the small model: it would choose assisted decoding.
        names = ("assistant_model", "assistant_tokenizer")
        assistant = {name: kwargs.pop(name, None) for name in names}
    refuse_arguments(self, kwargs)
    streamer = kwargs.get("streamer")
    tokenizer = kwargs.pop("tokenizer", None)
    _bind_stop_strings(self, kwargs, tokenizer)
    ending = _EndOnce.around(streamer)
    state = _state_of(self)
    kwargs["custom_generate"] = functools.partial(
        self_speculative_decoding,
        self_speculation=config,
        tokenizer=tokenizer,
        streamer=ending,
        profile=state.profile,
        history=state.history,
        synced_gpus=kwargs.get("synced_gpus"),
        step_speculation=step_config,
        **assistant,
    )
    try:
        return original(**kwargs)
    except BaseException:
        if ending is not None:
            ending.end()
        raise


def _by_name(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Positional arguments of `generate` under their names."""
    names = [
        parameter.name
        for parameter in inspect.signature(original).parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    # Wrappers such as `PeftModel` take `*args` and hand them to the host's `generate`.
    names = names or list(inspect.signature(GenerationMixin.generate).parameters)[1:]
    named = dict(zip(names, args, strict=False))
    twice = sorted(named.keys() & kwargs.keys())
    if twice or len(args) > len(names):
        given = f"{twice[0]!r} twice" if twice else f"{len(args)} positional arguments"
        raise TypeError(f"generate() was given {given}")
    return named


class _EndOnce:
    """A streamer whose `end` reaches the user's streamer once, however the call ends."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._ended = False
        self.on_round = getattr(streamer, "on_round", None)

    @classmethod
    def around(cls, streamer: BaseStreamer | _EndOnce | None) -> _EndOnce | None:
        """What to hand on instead of `streamer`."""
        return streamer if streamer is None or isinstance(streamer, cls) else cls(streamer)

    def put(self, value: torch.Tensor) -> None:
        self._streamer.put(value)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._streamer.end()


def _bind_stop_strings(
    model: Any, kwargs: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Turns stop strings into a criterion: `generate` cannot build it without the tokenizer."""
    stop_strings = kwargs.get("stop_strings")
    given = kwargs.get("generation_config")
    default = getattr(model, "generation_config", None)
    for source in (given, default):
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
    if given is None or getattr(default, "stop_strings", None) is not None:
        kwargs["stop_strings"] = None
        return
    # The host deprecates keyword arguments beside a config; the user's object stays as it is.
    kwargs["generation_config"] = copy.copy(given)
    kwargs["generation_config"].stop_strings = None
    kwargs.pop("stop_strings", None)


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
    profile: Profile | None = None,
    history: History | None = None,
    step_speculation: object = None,
    assistant_model: PreTrainedModel | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    **model_kwargs: Any,
) -> SelfSpeculativeOutput | torch.Tensor:
    """Decodes with self-speculation; the tokens are those of plain `generate`, except in reasoning
    steps that a small model wrote because `step_speculation` was asked for.

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
        streamer (`BaseStreamer`, *optional*): Gets every emitted token; `end` is always called. If
            it has a method `on_round`, that gets each `Round` after the tokens of the round.
        synced_gpus (`bool`, *optional*): Refused when true.
        profile (`Profile`, *optional*): What was learnt so far; a new one is made when None.
        history (`History`, *optional*): What the model wrote in earlier calls, as a source of
            spans; this call is added.
        step_speculation (`bool`, `dict` or `StepSpeculationConfig`, *optional*): Lets a small model
            write reasoning steps (lossy); without `self_speculation`, nothing else is speculated.
        assistant_model (`PreTrainedModel`, *optional*): The small model.
        assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer, where it is
            another one.

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
    step_config = StepSpeculationConfig.coerce(step_speculation)
    steps = None
    if step_config is not None:
        config = config or SelfSpeculationConfig(reuse="none")
        steps = StepRequest(step_config, assistant_model, assistant_tokenizer)
    ending = _EndOnce.around(streamer)
    call = HostCall(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        model_kwargs,
        tokenizer,
        ending,
    )
    try:
        if config is None:
            return call.decode_plainly(logits_processor, bool(synced_gpus))
        refuse_call(call, synced_gpus)
        if steps is not None:
            refuse_steps(steps, model, tokenizer, input_ids, generation_config)
        if input_ids.shape[0] > 1:
            logger.warning(
                "Self-speculation runs one sequence at a time; these %d are decoded plainly. Call "
                "generate once per prompt to speculate.",
                input_ids.shape[0],
            )
            return decode_rows(call, config)
        return decode(call, config, profile or Profile(), history, steps)
    finally:
        if ending is not None:
            ending.end()
