"""Running a fuzz case plainly and self-speculatively, and comparing all that a caller can see."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
from families import VOCAB_SIZE, build_model
from fuzz_cases import Arguments, Case
from helpers import (
    RecordingStreamer,
    assert_same_cache,
    assert_same_hidden_states,
    assert_same_steps,
    scripted_drafts,
    true_up_to,
)
from transformers import LogitsProcessor, StoppingCriteria

import ssr_hf

# In standard deviations of the scores; single precision stays far below.
LARGEST_ROUNDING = 1e-4


class Witness(LogitsProcessor):
    """A processor with a state: it bans a token that depends on how often it was called."""

    def __init__(self, period: int) -> None:
        self.seen: list[list[int]] = []
        self._period = period

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        if len(self.seen) % self._period == 0:
            scores = scores.clone()
            scores[:, (7 * len(self.seen)) % VOCAB_SIZE] = -torch.inf
            scores[:, scores.argmax(dim=-1)] -= 1.0
        return scores


class Counted(StoppingCriteria):
    """A criterion with a state: it stops after `limit` tokens that are divisible by three."""

    def __init__(self, limit: int) -> None:
        self.seen: list[list[int]] = []
        self._limit = limit
        self._n_found = 0

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        self._n_found += int(input_ids[0, -1].item() % 3 == 0)
        stop = self._n_found >= self._limit
        return torch.full((input_ids.shape[0],), stop, device=input_ids.device)


@dataclass
class Outcome:
    """What one run gave, or how it failed."""

    output: Any = None
    error: BaseException | None = None
    trace: str = ""
    random_state: torch.Tensor | None = None
    processor_calls: list[list[int]] | None = None
    criterion_calls: list[list[int]] | None = None
    events: list[tuple[Any, ...]] | None = None
    cache: Any = None


def run(case: Case, config: ssr_hf.SelfSpeculationConfig | None, **changes: Any) -> Outcome:
    """Runs a case plainly (`config=None`) or self-speculatively.

    Args:
        changes: Arguments of `generate` that replace those of the case.
    """
    model = build_model(case.family, case.weights)
    arguments = {**case.arguments, **_inputs(case, model), **changes}
    witness = None if case.witness is None else Witness(case.witness)
    counted = None if case.counted is None else Counted(case.counted)
    processors: list[LogitsProcessor] = [] if witness is None else [witness]
    if config is None and "thinking_budget" in case.settings:
        processors.append(_budget(case))
    arguments["logits_processor"] = processors
    arguments["stopping_criteria"] = [] if counted is None else [counted]
    streamer = RecordingStreamer() if case.streams else None
    arguments["streamer"] = streamer
    outcome = Outcome(cache=arguments.get("cache"))
    if config is not None:
        ssr_hf.enable(model, profile=ssr_hf.Profile())
        arguments["self_speculation"] = config
    torch.manual_seed(case.seed)
    try:
        outcome.output = model.generate(**arguments)
    except Exception as error:
        outcome.error, outcome.trace = error, traceback.format_exc()
    finally:
        ssr_hf.disable(model)
    outcome.random_state = torch.get_rng_state()
    outcome.processor_calls = None if witness is None else witness.seen
    outcome.criterion_calls = None if counted is None else counted.seen
    outcome.events = None if streamer is None else streamer.events
    return outcome


def _inputs(case: Case, model: Any) -> Arguments:
    prompt = torch.cat([case.prompt.new_zeros(1, case.n_padding), case.prompt], dim=1)
    mask = torch.ones_like(prompt)
    mask[:, : case.n_padding] = 0
    inputs: Arguments = {"input_ids": prompt, "attention_mask": mask}
    if case.n_cached:
        with torch.no_grad():
            inputs["cache"] = model(prompt[:, : case.n_cached], use_cache=True).cache
    return inputs


def _budget(case: Case) -> ssr_hf.ThinkingBudgetLogitsProcessor:
    """Gives plain `generate` the thinking budget that self-speculation has as a setting."""
    end = tuple(case.settings["end_of_thinking"])
    start = tuple(case.settings.get("start_of_thinking", ()))
    if "tokenizer" in case.arguments:
        tokenizer = case.arguments["tokenizer"]
        markers = ssr_hf.ThinkingMarkers.from_tokenizer(tokenizer, end, start or None)
    else:
        ends = frozenset(case.arguments.get("eos_token_id", ()))
        markers = ssr_hf.ThinkingMarkers((start,) if start else (), (end,), boundaries=ends)
    length = case.n_padding + case.prompt.shape[1]
    return ssr_hf.ThinkingBudgetLogitsProcessor(markers, case.settings["thinking_budget"], length)


@dataclass(frozen=True)
class Report:
    """The verdict on a case: `"same"`, `"both failed"`, `"tie"` or `"different"`, and why.

    `figures` counts what speculation did: a series in which nothing was accepted shows nothing.
    """

    verdict: str
    reason: str = ""
    figures: dict[str, int] = field(default_factory=dict)


def check(case: Case) -> Report:
    """Runs a case both ways and compares."""
    plain = run(case, None)
    with _drafts(case, plain):
        fast = run(case, ssr_hf.SelfSpeculationConfig(**case.settings))
    if plain.error is not None or fast.error is not None:
        return _compare_errors(plain, fast)
    try:
        _compare(case, plain, fast)
    except AssertionError as error:
        if _is_tie(case, plain, fast):
            return Report("tie")
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Report("different", f"{error or frame.line}")
    stats = getattr(fast.output, "speculation", None)
    if stats is None:
        return Report("same")
    figures = {
        "tokens": stats.new_tokens,
        "forwards": stats.forwards,
        "drafts": len(stats.drafts),
        "accepted_prefix": stats.accepted_prefix,
        "suffix_accepted": stats.suffix_accepted,
    }
    return Report("same", figures=figures)


def _drafts(case: Case, plain: Outcome) -> contextlib.AbstractContextManager[None]:
    """Makes drafts say what comes after the marker in the plain text, as far as the case wants."""
    if case.n_true is None or plain.error is not None:
        return contextlib.nullcontext()
    text = _ids(plain)[0, case.n_padding + case.prompt.shape[1] :].tolist()
    marker = case.settings["end_of_thinking"]
    ends = range(len(marker), len(text) + 1)
    answer_at = next((at for at in ends if text[at - len(marker) : at] == marker), len(text))
    return scripted_drafts(true_up_to(text[answer_at:], case.n_true))


def _compare_errors(plain: Outcome, fast: Outcome) -> Report:
    if type(plain.error) is type(fast.error):
        return Report("both failed", repr(plain.error)[:200])
    return Report(
        "different",
        f"plain raised {plain.error!r}, self-speculation raised {fast.error!r}\n"
        f"{fast.trace or plain.trace}",
    )


def _compare(case: Case, plain: Outcome, fast: Outcome) -> None:
    assert _ids(fast).tolist() == _ids(plain).tolist(), "tokens"
    assert type(fast.output) is type(plain.output) or hasattr(fast.output, "speculation"), "type"
    assert fast.events == plain.events, "streamed events"
    assert fast.processor_calls == plain.processor_calls, "what a processor was shown"
    assert fast.criterion_calls == plain.criterion_calls, "what a criterion was shown"
    assert torch.equal(fast.random_state, plain.random_state), "state of the random generator"
    if case.arguments["return_dict_in_generate"]:
        for name in ("scores", "logits"):
            assert_same_steps(getattr(plain.output, name), getattr(fast.output, name))
        assert_same_hidden_states(plain.output.hidden_states, fast.output.hidden_states)
        assert_same_cache(plain.output.cache, fast.output.cache)
    if plain.cache is not None:
        assert_same_cache(plain.cache, fast.cache)


def _ids(outcome: Outcome) -> torch.Tensor:
    output = outcome.output
    return output if isinstance(output, torch.Tensor) else output.sequences


def _is_tie(case: Case, plain: Outcome, fast: Outcome) -> bool:
    """Whether the texts part where rounding decides: the lead of the token is within rounding."""
    pairs = zip(_ids(plain)[0].tolist(), _ids(fast)[0].tolist(), strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return False
    length = case.n_padding + case.prompt.shape[1]
    changes: Arguments = {"return_dict_in_generate": True, "output_scores": True}
    changes["streamer"] = None
    again = run(case, None, **changes)
    with _drafts(case, plain):
        fast_again = run(case, ssr_hf.SelfSpeculationConfig(**case.settings), **changes)
    if again.error is not None or fast_again.error is not None:
        return False
    step = at - length
    scores = [o.output.scores[step][0] for o in (again, fast_again)]
    shared = scores[0].isfinite() & scores[1].isfinite()
    rounding = (scores[0] - scores[1])[shared].abs().max()
    if rounding > LARGEST_ROUNDING * scores[0][shared].std():
        return False
    if case.arguments["do_sample"]:
        torch.manual_seed(case.seed)
        if step:
            run(case, None, max_new_tokens=step)
        noise = torch.empty_like(scores[0]).exponential_().log()
        scores = [s.log_softmax(dim=-1) - noise for s in scores]
    ours, theirs = _ids(plain)[0, at], _ids(fast)[0, at]
    return bool(scores[0][ours] - scores[0][theirs] <= 2 * rounding)
