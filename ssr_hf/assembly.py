"""Puts the parts of one generation together, runs the loop, and packs what `generate` returns."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, LogitsProcessorList, StoppingCriteriaList

from . import compat
from .acceptance import draft_seed
from .budget import ThinkingBudgetLogitsProcessor
from .cache.support import Unsupported, multi_token_support
from .candidates import DraftGuesser, Proposer
from .commit import Committer
from .config import SelfSpeculationConfig
from .decoding import SelfSpeculativeDecoding
from .drafting import DraftSchedule
from .errors import MarkerError, UnsupportedError, message
from .lanes import LANE_TYPES, DraftRules, Lane
from .markers import PhaseTracker, ThinkingMarkers
from .outputs import SelfSpeculativeOutput
from .pacing import FixedPacer, MeasuredPacer, Pacer, Profile
from .specreason import StepRequest, StepSpeculation, bind_steps
from .stats import Recorder
from .target import Target
from .tokens import TokenSequence

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

logger = logging.getLogger(__name__)


def decode(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    config: SelfSpeculationConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    streamer: BaseStreamer | None,
    profile: Profile,
    steps: StepRequest | None,
    model_kwargs: dict[str, Any],
) -> SelfSpeculativeOutput | torch.LongTensor:
    """Assembles the parts of the loop, runs it, and packs what `generate` returns."""
    recorder = Recorder(on_round=getattr(streamer, "on_round", None))
    lane_type = _supported_lane(model, "lockstep" if config.lane == "auto" else config.lane)
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
    pacer: Pacer = MeasuredPacer(profile) if config.adaptive else FixedPacer()
    target = Target(model, sequence, model_kwargs, _keeps_hidden_states(generation_config))
    committer = Committer(sequence, processors, stopping_criteria, generation_config, streamer)
    longest_text = _longest_text(model, stopping_criteria)
    rules = DraftRules(
        closing_ids=markers.closing,
        eos_token_ids=_eos_token_ids(generation_config),
        logits_processor=LogitsProcessorList(
            p for p in logits_processor if type(p) in compat.SIDE_EFFECT_FREE_PROCESSORS
        ),
        seed=draft_seed(sequence.device) if _samples_drafts(config, generation_config) else None,
        make_guesser=(
            functools.partial(DraftGuesser, config.suffix, pacer) if config.proposes_spans else None
        ),
    )
    lane = lane_type(target)
    user_cache = getattr(model_kwargs.get("cache"), "_is_user_defined", False)
    step_speculation: StepSpeculation | None = None
    if steps is not None:
        step_speculation = bind_steps(
            steps,
            target=target,
            committer=committer,
            tracker=tracker,
            tokenizer=tokenizer,
            logits_processor=logits_processor,
            generation_config=generation_config,
            eos_token_ids=rules.eos_token_ids,
            max_length=longest_text,
            thinking_budget=config.thinking_budget,
            attention_mask=model_kwargs.get("attention_mask"),
        )
    loop = SelfSpeculativeDecoding(
        target=target,
        committer=committer,
        proposer=Proposer(config, tracker, sequence, longest_text, pacer),
        lane=lane,
        schedule=DraftSchedule(
            config, lane, tracker, sequence, rules, longest_text, pacer, recorder
        ),
        pacer=pacer,
        tracker=tracker,
        recorder=recorder,
        keeps_cache=bool(generation_config.return_dict_in_generate) or user_cache,
        steps=step_speculation,
    )
    loop.run(generation_config)
    stats = recorder.stats(tracker)
    pacer.finish(stats)
    if not generation_config.return_dict_in_generate:
        return sequence.ids.clone()
    return SelfSpeculativeOutput(
        sequences=sequence.ids.clone(),
        scores=committer.scores,
        logits=committer.logits,
        hidden_states=target.hidden_states,
        cache=target.cache,
        speculation=stats,
        step_speculation=None if step_speculation is None else step_speculation.stats(stats.rounds),
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


def _supported_lane(model: PreTrainedModel, name: str) -> type[Lane]:
    support = LANE_TYPES[name].support(model)
    if isinstance(support, Unsupported):
        what = f"lane={name!r} is not safe with this {type(model).__name__}: {support.reason}"
        others = (
            repr(other)
            for other, lane_type in LANE_TYPES.items()
            if not isinstance(lane_type.support(model), Unsupported)
        )
        accepted = f"The lanes {' and '.join(others)} are accepted here"
        raise UnsupportedError(message(what, accepted, support.hint))
    return LANE_TYPES[name]


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
    """Most tokens of a text that may hold candidates or drafts, prompt included."""
    config = model.config.get_text_config()
    limits = [
        stopping_criteria.max_length,
        getattr(config, "max_position_embeddings", None),
        # Phi-3 rebuilds its whole cache where a text crosses this length.
        getattr(config, "original_max_position_embeddings", None),
    ]
    return min((limit for limit in limits if limit is not None), default=2**62)


def _keeps_hidden_states(generation_config: GenerationConfig) -> bool:
    recorded = generation_config.return_dict_in_generate
    return bool(recorded and generation_config.output_hidden_states)


def _samples_drafts(config: SelfSpeculationConfig, generation_config: GenerationConfig) -> bool:
    """Whether drafts are sampled; greedy ones are the better source where only spans are used."""
    rejects = config.acceptance == "rejection_sampling"
    return rejects and config.verifies_prefix and bool(generation_config.do_sample)


def _eos_token_ids(generation_config: GenerationConfig) -> frozenset[int]:
    eos = getattr(generation_config, "_eos_token_tensor", None)
    return frozenset() if eos is None else frozenset(eos.flatten().tolist())


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("Self-speculation decodes without candidates: %s.", text)
