"""Puts the parts of one generation together, runs the loop, and packs what `generate` returns."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, LogitsProcessorList

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
from .pacing import FixedPacer, MeasuredPacer, Pacer
from .profile import Profile
from .specreason import StepRequest, StepSpeculation, bind_steps
from .stats import Recorder, SpeculationStats
from .suffix_index import HISTORY, History
from .target import Target
from .tokens import TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .host_call import HostCall

logger = logging.getLogger(__name__)


def decode(
    call: HostCall,
    config: SelfSpeculationConfig,
    profile: Profile,
    history: History | None,
    steps: StepRequest | None,
) -> SelfSpeculativeOutput | torch.Tensor:
    """Assembles the parts of the loop, runs it, and packs what `generate` returns.

    Args:
        call (`HostCall`): What `generate` prepared.
        config (`SelfSpeculationConfig`): The settings.
        profile (`Profile`): What earlier calls learnt; it is updated.
        history (`History`, *optional*): What earlier calls wrote; this one is added.
        steps (`StepRequest`, *optional*): Lets a small model write reasoning steps.

    Returns:
        `SelfSpeculativeOutput` or `torch.Tensor`: As plain `generate`.
    """
    # Without adapting, nothing depends on earlier calls.
    if not config.adaptive or not config.proposes_spans or HISTORY not in config.suffix.sources:
        history = None
    if history is not None:
        history.bind(call.model.config.get_text_config(decoder=True).vocab_size)
    longest_text = call.longest_text
    loop = assemble(call, config, profile, history, steps, longest_text)
    loop.run(call.generation_config)
    if len(loop.target.sequence) > longest_text:
        loop.recorder.note(
            f"nothing was proposed behind {longest_text} tokens, where positions change or end"
        )
    stats = loop.recorder.stats(loop.tracker)
    if loop.steps is None:
        # Calls in which a small model wrote cost something else per token.
        loop.pacer.finish(stats)
    sequence = loop.target.sequence
    if history is not None:
        history.add(sequence.token_ids[sequence.prompt_length :])
    sequences = sequence.ids.clone()
    if not call.returns_dict:
        return sequences
    return SelfSpeculativeOutput(
        sequences=sequences,
        scores=loop.committer.scores,
        logits=loop.committer.logits,
        hidden_states=loop.target.hidden_states,
        cache=loop.target.cache,
        speculation=stats,
        step_speculation=None if loop.steps is None else loop.steps.stats(stats.rounds),
    )


def decode_rows(call: HostCall, config: SelfSpeculationConfig) -> Any:
    """Plain decoding of several rows, with the settings that change tokens.

    Args:
        call (`HostCall`): What `generate` prepared.
        config (`SelfSpeculationConfig`): Only its markers and its thinking budget matter here.

    Returns:
        `SelfSpeculativeOutput` or `torch.LongTensor`: As plain `generate`.
    """
    processors = call.logits_processor
    if config.thinking_budget is not None:
        processors = _processors(call, config, find_markers(call, config))
    output = call.decode_plainly(processors, synced_gpus=False)
    if not call.returns_dict:
        return output
    note = f"{call.input_ids.shape[0]} rows were decoded plainly"
    return SelfSpeculativeOutput(**output, speculation=SpeculationStats(notes=(note,)))


def assemble(
    call: HostCall,
    config: SelfSpeculationConfig,
    profile: Profile,
    history: History | None,
    steps: StepRequest | None,
    longest_text: int,
) -> SelfSpeculativeDecoding:
    """Puts the parts together; nothing is run but the one-time probe of the model."""
    recorder = Recorder(on_round=getattr(call.streamer, "on_round", None))
    pacer: Pacer = (
        MeasuredPacer(profile, config.lane) if config.adaptive else FixedPacer(config.lane)
    )
    lane_type = _supported_lane(call.model, pacer.lane)
    markers = find_markers(call, config)
    if config.reuse != "none":
        support = multi_token_support(call.model, call.generation_config)
        if isinstance(support, Unsupported):
            recorder.note(f"decoding without candidates: {support.reason}")
            _warn_once(support.reason)
            config = replace(config, reuse="none", acceptance="exact_match")
    if history is None and config.suffix.sources == (HISTORY,) and config.proposes_spans:
        recorder.note("no spans: a history needs an enabled model and adaptive=True")
    sequence = TokenSequence(call.input_ids)
    tracker = PhaseTracker(markers, sequence.token_ids)
    target = Target(call.model, sequence, call.model_kwargs, call.keeps_hidden_states)
    committer = Committer(
        sequence,
        _processors(call, config, markers),
        call.stopping_criteria,
        call.generation_config,
        call.streamer,
    )
    lane = lane_type(target)
    rules = _draft_rules(call, config, markers, pacer, history)
    return SelfSpeculativeDecoding(
        target=target,
        committer=committer,
        proposer=Proposer(config, tracker, sequence, longest_text, pacer, history),
        lane=lane,
        schedule=DraftSchedule(
            config, lane, tracker, sequence, rules, longest_text, pacer, recorder
        ),
        pacer=pacer,
        tracker=tracker,
        recorder=recorder,
        keeps_cache=call.keeps_cache,
        steps=(
            None
            if steps is None
            else _steps(steps, call, config, target, committer, tracker, longest_text)
        ),
    )


def _processors(
    call: HostCall, config: SelfSpeculationConfig, markers: ThinkingMarkers
) -> LogitsProcessorList:
    """The user's processors and, last, the thinking budget."""
    processors = LogitsProcessorList(call.logits_processor)
    if config.thinking_budget is not None:
        prompt_length = call.input_ids.shape[1]
        budget = ThinkingBudgetLogitsProcessor(markers, config.thinking_budget, prompt_length)
        processors.append(budget)
    return processors


def _draft_rules(
    call: HostCall,
    config: SelfSpeculationConfig,
    markers: ThinkingMarkers,
    pacer: Pacer,
    history: History | None,
) -> DraftRules:
    """What holds for every draft. Drafts are greedy unless their probabilities are needed."""
    samples = (
        config.acceptance == "rejection_sampling"
        and config.verifies_prefix
        and bool(call.generation_config.do_sample)
    )
    guesser = functools.partial(DraftGuesser, config.suffix, pacer, history=history)
    return DraftRules(
        closing_ids=markers.closing,
        eos_token_ids=call.eos_token_ids,
        logits_processor=call.pure_processors,
        seed=draft_seed(call.input_ids.device) if samples else None,
        make_guesser=guesser if config.proposes_spans else None,
    )


def _steps(
    request: StepRequest,
    call: HostCall,
    config: SelfSpeculationConfig,
    target: Target,
    committer: Committer,
    tracker: PhaseTracker,
    longest_text: int,
) -> StepSpeculation:
    return bind_steps(
        request,
        target=target,
        committer=committer,
        tracker=tracker,
        tokenizer=call.tokenizer,
        logits_processor=call.logits_processor,
        generation_config=call.generation_config,
        eos_token_ids=call.eos_token_ids,
        max_length=longest_text,
        thinking_budget=min(_thinking_budgets(call, config), default=None),
        attention_mask=call.model_kwargs.get("attention_mask"),
    )


def _thinking_budgets(call: HostCall, config: SelfSpeculationConfig) -> Iterator[int]:
    """The thinking budget of the settings and those of processors that the user passed."""
    if config.thinking_budget is not None:
        yield config.thinking_budget
    for processor in call.logits_processor:
        if isinstance(processor, ThinkingBudgetLogitsProcessor):
            yield processor.thinking_budget


def find_markers(call: HostCall, config: SelfSpeculationConfig) -> ThinkingMarkers:
    """The thinking markers: from the config as ids, else with the tokenizer.

    Args:
        call (`HostCall`): Holds the tokenizer, or a model that names its own repository.
        config (`SelfSpeculationConfig`): May give the markers.

    Returns:
        `ThinkingMarkers`: The markers.

    Raises:
        `MarkerError`: There is no tokenizer to be found, it has no known markers, or the model does
            not know them.
    """
    markers = _find_markers(call, config)
    size = call.model.config.get_text_config(decoder=True).vocab_size
    unknown = [index for ids in (*markers.start, *markers.end) for index in ids if index >= size]
    if unknown:
        what = f"A thinking marker holds the token id {unknown[0]}"
        accepted = f"Ids from 0 to {size - 1}, the vocabulary of the model, are accepted"
        raise MarkerError(message(what, accepted, "Use the markers of this model's own tokenizer"))
    return markers


def _find_markers(call: HostCall, config: SelfSpeculationConfig) -> ThinkingMarkers:
    end, start = config.end_of_thinking, config.start_of_thinking
    if call.tokenizer is None and isinstance(end, tuple) and not isinstance(start, str):
        starts = (tuple(start),) if start else ()
        return ThinkingMarkers(start=starts, end=(end,), boundaries=call.eos_token_ids)
    tokenizer = call.tokenizer or _tokenizer_of(call.model)
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


# Loading takes longer than a short generation, and may ask the Hub.
_tokenizers: weakref.WeakKeyDictionary[PreTrainedModel, PreTrainedTokenizerBase] = (
    weakref.WeakKeyDictionary()
)


def _tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of the model's own repository, loaded once."""
    if model not in _tokenizers:
        _tokenizers[model] = _load_tokenizer(model)
    return _tokenizers[model]


def _load_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    repository = compat.repository(model)
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


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("Self-speculation decodes without candidates: %s.", text)
