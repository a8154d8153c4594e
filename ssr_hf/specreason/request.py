"""What step speculation refuses before anything is read, each with its reason and a way out."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import compat
from ..cache.support import Unsupported, cache_support, multi_token_support
from ..errors import ConfigError, UnsupportedError, message
from .config import StepSpeculationConfig

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRequest:
    """What `generate` was given for step speculation.

    Args:
        config (`StepSpeculationConfig`): The settings.
        assistant_model (`PreTrainedModel`, *optional*): The small model.
        assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer; that of the base
            model when None.
    """

    config: StepSpeculationConfig
    assistant_model: PreTrainedModel | None
    assistant_tokenizer: PreTrainedTokenizerBase | None

    @property
    def assistant(self) -> PreTrainedModel:
        """The small model, which was checked to be there."""
        assert self.assistant_model is not None, "refuse_steps runs first"
        return self.assistant_model


def refuse_steps(
    request: StepRequest,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
) -> None:
    """Refuses a call that step speculation cannot serve, before anything is read.

    Raises:
        `ConfigError`: The small model or a tokenizer is missing, or the small model is none.
        `UnsupportedError`: The batch, an output, or one of the models.
    """
    assistant = request.assistant_model
    if assistant is None:
        raise _missing("assistant_model", "the small model that writes steps", "small")
    if not hasattr(assistant, "prepare_inputs_for_generation"):
        is_module = isinstance(assistant, torch.nn.Module)
        shown = f"a {type(assistant).__name__}" if is_module else repr(assistant)
        raise ConfigError(
            message(
                f"assistant_model is {shown}",
                "A loaded model that can generate is accepted",
                "Load it with AutoModelForCausalLM.from_pretrained",
            )
        )
    if tokenizer is None:
        raise _missing("tokenizer", "the base model's: steps are found in text", "tokenizer")
    sizes = (vocabulary_size(model), vocabulary_size(assistant))
    if request.assistant_tokenizer is None and sizes[0] != sizes[1]:
        what = f"the small model's, as its vocabulary has {sizes[1]} entries and not {sizes[0]}"
        raise _missing("assistant_tokenizer", what, "small_tokenizer")
    _refuse_shapes(input_ids, generation_config)
    _refuse_models(model, assistant, generation_config)


def _missing(name: str, what: str, value: str) -> ConfigError:
    return ConfigError(
        message(
            f"step_speculation is set without {name}",
            f"It needs {what}",
            f"Pass {name}={value} to the generate of an enabled model",
        )
    )


def _refuse_shapes(input_ids: torch.Tensor, generation_config: GenerationConfig) -> None:
    refusals = (
        (
            input_ids.shape[0] > 1,
            f"The batch has {input_ids.shape[0]} prompts",
            "One prompt per call is accepted",
            "Call generate once per prompt",
        ),
        (
            input_ids.shape[1] == 0,
            "The prompt was given as embeddings",
            "The small model reads token ids",
            "Pass input_ids",
        ),
        (
            bool(generation_config.output_hidden_states),
            "output_hidden_states is set",
            "output_scores and output_logits are accepted",
            "Leave output_hidden_states out",
        ),
    )
    for refused, what, accepted, next_step in refusals:
        if refused:
            what = f"{what} and step_speculation is set"
            raise UnsupportedError(message(what, accepted, next_step))


def _refuse_models(
    model: PreTrainedModel, assistant: PreTrainedModel, generation_config: GenerationConfig
) -> None:
    accepted = "Two decoder-only models that can read several tokens at once are accepted"
    if assistant.config.is_encoder_decoder:
        what = f"The small model, {type(assistant).__name__}, is an encoder-decoder model"
        raise UnsupportedError(message(what, accepted, "Pass a causal language model"))
    supports = {
        "base model": [multi_token_support(model, generation_config)],
        "small model": [
            cache_support(compat.prepare_cache(assistant, generation_config, 1, 1)),
            multi_token_support(assistant, generation_config),
        ],
    }
    for name, answers in supports.items():
        for support in answers:
            if isinstance(support, Unsupported):
                what = f"The {name} cannot speculate step by step: {support.reason}"
                raise UnsupportedError(message(what, accepted, "Use another model"))
    if assistant.num_parameters() > model.num_parameters():
        _warn_once(
            f"The small model has {assistant.num_parameters()} parameters and the base model "
            f"{model.num_parameters()}: steps will cost more than they save. Swap the two models."
        )


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the model's vocabulary, padding included."""
    return int(model.config.get_text_config().vocab_size)
