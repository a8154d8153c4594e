"""From what the user passed to the parts of step speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import LogitsProcessorList

from .. import compat
from ..acceptance import draft_generator, draft_seed
from ..errors import ConfigError, message
from ..markers import TokenCodec
from .config import StepSpeculationConfig
from .controller import StepParts, StepSpeculation
from .guessing import GuessLength
from .prompts import score_prompt
from .reader import StepReader
from .request import StepRequest, vocabulary_size
from .room import StepRoom
from .scoring import SCORERS, Scorer
from .stats import StepRecorder
from .text import StepEnd
from .translation import SharedIds, TextHandOver, Translation
from .writer import StepWriter, WritingRules

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..commit import Committer
    from ..markers import PhaseTracker
    from ..target import Target

# Offered in a round of the base model for which nothing else was proposed.
DEFAULT_GUESSED = 4
# Steps are drawn with a seed of their own; drafts of answers count from 0.
SAMPLING_STAGE = -1


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
        `ConfigError`: A score prompt or a digit cannot be written, or a setting does not suit the
            tokenizers.
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
                positions=compat.longest_uniform_text(target.model, len(text)),
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
        if request.config.assistant_prompt is not None:
            raise ConfigError(
                message(
                    "assistant_prompt is set and the tokenizers do not differ",
                    "A prompt of its own is accepted for a small model with another tokenizer",
                    "Leave assistant_prompt out",
                )
            )
        width = min(vocabulary_size(target.model), vocabulary_size(request.assistant))
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
    vocab_size = vocabulary_size(assistant)
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
        max_length=compat.longest_uniform_text(assistant),
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
