"""From what the user passed to the parts of step speculation; what cannot work is refused here."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList

from .. import compat
from ..acceptance import draft_generator, draft_seed
from ..cache.support import Unsupported, cache_support, multi_token_support
from ..errors import ConfigError, UnsupportedError, message
from ..markers import TokenCodec
from .config import StepSpeculationConfig
from .controller import StepParts, StepSpeculation
from .guessing import GuessLength
from .prompts import score_prompt
from .reader import StepReader
from .room import StepRoom
from .scoring import SCORERS, Scorer
from .stats import StepRecorder
from .text import StepEnd
from .translation import SharedIds, TextHandOver, Translation
from .writer import StepWriter, WritingRules

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..commit import Committer
    from ..markers import PhaseTracker
    from ..target import Target

logger = logging.getLogger(__name__)

# Offered in a round of the base model for which nothing else was proposed.
DEFAULT_GUESSED = 4
NO_LIMIT = 2**62
# Steps are drawn with a seed of their own; drafts of answers count from 0.
SAMPLING_STAGE = -1


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
        `ConfigError`: The small model or a tokenizer is missing.
        `UnsupportedError`: The batch, an output, or one of the models.
    """
    assistant = request.assistant_model
    if assistant is None:
        raise _missing("assistant_model", "the small model that writes steps", "small")
    if tokenizer is None:
        raise _missing("tokenizer", "the base model's: steps are found in text", "tokenizer")
    sizes = (_vocab_size(model), _vocab_size(assistant))
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
            cache_support(compat.prepare_cache(assistant, generation_config, 1)),
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


def bind_steps(
    request: StepRequest,
    *,
    target: Target,
    committer: Committer,
    tracker: PhaseTracker,
    tokenizer: PreTrainedTokenizerBase | Any,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    eos_token_ids: frozenset[int],
    max_length: int,
    thinking_budget: int | None,
    attention_mask: torch.Tensor | None,
) -> StepSpeculation:
    """Assembles step speculation for one generation that `refuse_steps` let pass.

    Args:
        request (`StepRequest`): Settings and small model.
        target (`Target`): The base model.
        committer (`Committer`): Emits tokens.
        tracker (`PhaseTracker`): The phase of the text.
        tokenizer (`PreTrainedTokenizerBase`): The base model's.
        logits_processor (`LogitsProcessorList`): The user's, without the thinking budget.
        generation_config (`GenerationConfig`): Prepared by `generate`.
        eos_token_ids (`frozenset[int]`): The base model's.
        max_length (`int`): Longest text.
        thinking_budget (`int`, *optional*): Longest block of thinking.
        attention_mask (`torch.Tensor` of shape `(1, T)`, *optional*): Which prompt tokens are
            padding.

    Returns:
        `StepSpeculation`: Ready for the first round.

    Raises:
        `ConfigError`: A score prompt or a digit cannot be written.
    """
    config, text = request.config, target.sequence
    codec = TokenCodec(tokenizer)
    translation = _translation(request, tokenizer, tracker, target)
    prompt_ids = text.token_ids
    if attention_mask is not None:
        prompt_ids = prompt_ids[int((attention_mask[0] == 0).sum()) :]
    shares_ids = isinstance(translation, SharedIds)
    stops = eos_token_ids | tracker.markers.boundaries
    rules = _writing_rules(
        request, translation, logits_processor, generation_config, text.device, stops
    )
    score_ids: tuple[int, ...] = ()
    if config.reads_score_prompt:
        score_ids = codec.encode(config.score_prompt or score_prompt(tokenizer))
    return StepSpeculation(
        StepParts(
            config=config,
            reader=StepReader(target, _scorer(config, codec), score_ids),
            writer=StepWriter(request.assistant, translation, text, prompt_ids, rules),
            translation=translation,
            committer=committer,
            tracker=tracker,
            codec=codec,
            end=StepEnd(codec, config.delimiters),
            stops=stops,
            room=StepRoom(
                step=config.max_step_tokens,
                text=max_length,
                positions=_positions(target.model),
                score_prompt=len(score_ids),
                thinking=thinking_budget,
            ),
            guesses=GuessLength(_n_guessed(config, shares_ids)),
            recorder=StepRecorder(),
        )
    )


def _translation(
    request: StepRequest,
    tokenizer: PreTrainedTokenizerBase | Any,
    tracker: PhaseTracker,
    target: Target,
) -> Translation:
    other = request.assistant_tokenizer
    if other is None or other is tokenizer or other.get_vocab() == tokenizer.get_vocab():
        width = min(_vocab_size(target.model), _vocab_size(request.assistant))
        return SharedIds(TokenCodec(tokenizer), tracker, width)
    return TextHandOver(tokenizer, tracker.markers, other, request.config.assistant_prompt)


def _writing_rules(
    request: StepRequest,
    translation: Translation,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    device: torch.device,
    base_stops: frozenset[int],
) -> WritingRules:
    assistant = request.assistant
    shares_ids = isinstance(translation, SharedIds)
    usable = compat.SIDE_EFFECT_FREE_PROCESSORS if shares_ids else compat.VOCABULARY_FREE_PROCESSORS
    stops = translation.stops | _own_eos(assistant)
    vocab_size = _vocab_size(assistant)
    if isinstance(translation, SharedIds):
        stops |= base_stops
        vocab_size = translation.vocab_size
    generator = None
    if generation_config.do_sample:
        generator = draft_generator(draft_seed(device), SAMPLING_STAGE, assistant.device)
    return WritingRules(
        end=StepEnd(translation.codec, request.config.delimiters),
        stops=stops,
        logits_processor=LogitsProcessorList(p for p in logits_processor if type(p) in usable),
        generator=generator,
        generation_config=generation_config,
        max_length=_positions(assistant),
        vocab_size=vocab_size,
    )


def _own_eos(model: PreTrainedModel) -> frozenset[int]:
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _scorer(config: StepSpeculationConfig, codec: TokenCodec) -> Scorer:
    return SCORERS[config.scorer].build(codec) if isinstance(config.scorer, str) else config.scorer


def _n_guessed(config: StepSpeculationConfig, shares_ids: bool) -> int:
    if config.candidate_tokens is None:
        return DEFAULT_GUESSED if shares_ids else 0
    if config.candidate_tokens and not shares_ids:
        raise ConfigError(
            message(
                f"candidate_tokens is {config.candidate_tokens} and the tokenizers differ",
                "Tokens of the small model can be candidates where the vocabulary is the same",
                "Leave candidate_tokens out",
            )
        )
    return config.candidate_tokens


def _vocab_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().vocab_size)


def _positions(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    # Phi-3 rebuilds its whole cache where a text crosses the second length.
    names = ("max_position_embeddings", "original_max_position_embeddings")
    limits = [getattr(config, name, None) for name in names]
    return min((int(limit) for limit in limits if limit is not None), default=NO_LIMIT)
