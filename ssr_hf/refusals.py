"""What is refused before the prompt is read, each with its reason and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.generation import GenerationMode

from . import compat
from .cache.support import Support, Unsupported, cache_support
from .errors import UnsupportedError, message

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .host_call import HostCall

ENCODER_DECODER = (
    "The model is an encoder-decoder model",
    "Decoder-only models are accepted",
    "Use plain generate",
)


class Refusal(NamedTuple):
    """Whether it applies, what happened, what is accepted, and what to do next."""

    applies: bool
    what: str
    accepted: str
    next_step: str


def refuse(refusals: Iterable[Refusal]) -> None:
    """Raises the first refusal that applies."""
    for refusal in refusals:
        if refusal.applies:
            raise UnsupportedError(message(*refusal[1:]))


def refuse_arguments(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuses arguments that `generate` would act on before the decoding function is called."""
    adapter = getattr(model, "active_peft_config", None)
    refuse(
        (
            # `generate` runs the encoder before it calls the decoding function.
            Refusal(getattr(model.config, "is_encoder_decoder", False), *ENCODER_DECODER),
            Refusal(
                getattr(adapter, "is_prompt_learning", False),
                f"The adapter is a {type(adapter).__name__}, which learns a prompt",
                "Adapters that change weights, such as LoRA, are accepted",
                "Use plain generate with this adapter",
            ),
            Refusal(
                bool(_effective("token_healing", model, kwargs)),
                "token_healing is set",
                "A prompt whose last token is whole is accepted",
                "Call model.heal_tokens(input_ids, tokenizer) first",
            ),
            Refusal(
                kwargs.get("custom_generate") is not None,
                f"custom_generate={kwargs.get('custom_generate')!r} and self_speculation are both "
                "set",
                "One way to decode is accepted",
                "Leave one of them out",
            ),
            Refusal(
                kwargs.get("cache_implementation") == "paged",
                "cache_implementation='paged' switches generate to continuous batching",
                "A dynamic cache is accepted",
                "Leave cache_implementation out",
            ),
            Refusal(
                kwargs.get("assistant_model") is not None,
                "assistant_model and self_speculation are both set",
                "Self-speculation drafts with the model itself",
                "Leave assistant_model out, or set step_speculation to let it write steps (lossy)",
            ),
        )
    )


def _effective(name: str, model: Any, kwargs: dict[str, Any]) -> Any:
    """What `generate` will use: the argument, else the given config's, else the model's default."""
    sources = (kwargs.get("generation_config"), getattr(model, "generation_config", None))
    values = (kwargs.get(name), *(getattr(source, name, None) for source in sources))
    return next((value for value in values if value is not None), None)


def refuse_call(call: HostCall, synced_gpus: bool | None) -> None:
    """Refuses what cannot be the tokens of plain `generate`, before the prompt is read."""
    model, generation_config = call.model, call.generation_config
    mode = generation_config.get_generation_mode()
    refuse(
        (
            Refusal(model.config.is_encoder_decoder, *ENCODER_DECODER),
            Refusal(
                mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
                f"The generation mode is {mode.value}",
                "Greedy search and sampling are accepted",
                "Set num_beams=1 and leave out penalty_alpha, prompt_lookup_num_tokens and the "
                "like",
            ),
            Refusal(
                compat.hands_over_state(model),
                f"{type(model).__name__} hands more than the cache from one forward to the next",
                "Models whose only state is their cache are accepted",
                "Use plain generate",
            ),
            Refusal(
                compat.runs_on_several_ranks(model, synced_gpus),
                "The model is sharded over ranks (synced_gpus, FSDP, ZeRO-3 or tensor "
                "parallelism), whose forwards would no longer match",
                "One process per model is accepted, on several devices if need be",
                "Use plain generate, or one model per rank",
            ),
            Refusal(
                generation_config.use_cache is False,
                "use_cache is False",
                "A cache is needed, to verify candidates without reading the text again",
                "Pass use_cache=True to generate",
            ),
            Refusal(
                bool(generation_config.output_attentions) and call.returns_dict,
                "output_attentions is set, and attention maps of several tokens differ in shape",
                "output_scores, output_logits and output_hidden_states are accepted",
                "Leave output_attentions out",
            ),
        )
    )
    require_supported(model, cache_support(call.model_kwargs.get("cache")))


def require_supported(model: PreTrainedModel, support: Support) -> None:
    if isinstance(support, Unsupported):
        what = f"{type(model).__name__} cannot be accelerated: {support.reason}"
        accepted = "Caches with full, sliding, convolutional or recurrent layers are accepted"
        raise UnsupportedError(message(what, accepted, support.hint))
