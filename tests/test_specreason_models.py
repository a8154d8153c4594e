"""Step speculation with real decoders against a reference without caches, one token at a time."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from families import FAMILIES, build_model, random_prompt
from helpers import assert_same_cache, enabled, generate
from tiny_tokenizers import build_tokenizer
from transformers import PreTrainedModel

import ssr_hf
from ssr_hf import SelfSpeculationConfig, StepSpeculationConfig

NEW_TOKENS = 48
MAX_STEP = 7
DELIMITERS = tuple("acegikmoqsuwy")
SCORE_PROMPT = "rate it: "
# The models are small and random: every byte is one token.
TOKENIZER = build_tokenizer()
DIGIT_IDS = [TOKENIZER.encode(digit)[0] for digit in "0123456789"]
KINDS = (
    *("llama", "gpt2", "deepseek_v3", "mistral", "gemma3", "gemma4", "gpt_oss"),
    *("lfm2", "qwen3_next", "mamba2", "falcon_h1"),
)


def threshold(index: int, tokens: int) -> float:
    """Rejects every third step, as the scores of random models hardly differ."""
    return 10.0 if index % 3 == 1 else 0.0


def assistant_of(family: str) -> PreTrainedModel:
    """Another random model of the family."""
    return build_model(family, seed=1)


@dataclass
class Reference:
    """The protocol as a paper would write it down, with whole-text forwards.

    Args:
        base, small (`PreTrainedModel`): The models.
        text (`list[int]`): The prompt; grows.
        marker (`int`, *optional*): The token that ends thinking.
    """

    base: PreTrainedModel
    small: PreTrainedModel
    text: list[int]
    marker: int | None
    authors: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def run(self) -> list[int]:
        """The whole text."""
        end = len(self.text) + NEW_TOKENS
        thinking = True
        while len(self.text) < end:
            if not thinking:
                self.text.append(next_token(self.base, self.text))
                continue
            step = self.write_step(self.small, end)
            self.scores.append(self.score(step))
            accepted = self.scores[-1] >= threshold(len(self.authors), 0)
            self.authors.append("assistant" if accepted else "base")
            self.text += step if accepted else self.write_step(self.base, end)
            thinking = self.text[-1] != self.marker
        return self.text

    def write_step(self, model: PreTrainedModel, end: int) -> list[int]:
        """A step that ends at a delimiter, at the marker, or when it is full."""
        step: list[int] = []
        while len(step) < MAX_STEP and len(self.text) + len(step) < end:
            step.append(next_token(model, self.text + step))
            said = TOKENIZER.decode(step)
            if step[-1] == self.marker or any(d in said.lstrip() for d in DELIMITERS):
                break
        return step

    def score(self, step: list[int]) -> float:
        """The expected digit."""
        prompt = TOKENIZER.encode(SCORE_PROMPT)
        digits = logits_of(self.base, self.text + step + prompt)[DIGIT_IDS].softmax(0)
        return float((digits * torch.arange(10.0)).sum())


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits `[V]` of the next token."""
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def next_token(model: PreTrainedModel, ids: list[int]) -> int:
    return int(logits_of(model, ids).argmax())


@dataclass(frozen=True)
class Case:
    """A prompt and a marker that ends thinking after some steps."""

    prompt: torch.Tensor
    marker: int
    text: list[int]
    authors: list[str]
    scores: list[float]


@functools.cache
def find_case(family: str) -> Case:
    """The first prompt whose reference run writes a new token after some steps: the marker."""
    base, small = build_model(family), assistant_of(family)
    for seed in range(20):
        prompt = random_prompt(base, 9, seed)
        new_ids = Reference(base, small, prompt[0].tolist(), None).run()[9:]
        late = [i for i in range(20, 36) if new_ids[i] not in new_ids[:i]]
        if not late:
            continue
        reference = Reference(base, small, prompt[0].tolist(), new_ids[late[-1]])
        text = reference.run()
        return Case(prompt, new_ids[late[-1]], text, reference.authors, reference.scores)
    raise LookupError(f"no prompt of {family} has a new token there")


def run(family: str, case: Case, **arguments: Any) -> ssr_hf.SelfSpeculativeOutput:
    """`generate` with step speculation and the settings of the reference."""
    base = build_model(family)
    defaults: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS,
        "tokenizer": TOKENIZER,
        "assistant_model": assistant_of(family),
        "self_speculation": SelfSpeculationConfig(end_of_thinking=[case.marker], reuse="none"),
        "step_speculation": settings(),
    }
    with enabled(base):
        return generate(base, case.prompt, **{**defaults, **arguments})


def settings(**changes: Any) -> StepSpeculationConfig:
    """The settings of the reference."""
    defaults: dict[str, Any] = {
        "threshold": threshold,
        "scorer": "expected",
        "delimiter": DELIMITERS,
        "max_step_tokens": MAX_STEP,
        "score_prompt": SCORE_PROMPT,
        "candidate_tokens": 0,
        "max_repeats": 100,
    }
    return StepSpeculationConfig(**{**defaults, **changes})


def authors_of(output: ssr_hf.SelfSpeculativeOutput) -> list[str]:
    assert output.step_speculation is not None
    return [step.author for step in output.step_speculation.steps]


@pytest.mark.parametrize("family", KINDS)
def test_equals_the_reference(family: str) -> None:
    """A cache that keeps a rejected step or a score prompt changes logits, scores and text."""
    case = find_case(family)
    output = run(family, case)
    assert output.sequences[0].tolist() == case.text
    assert authors_of(output) == case.authors
    assert output.step_speculation.scores == pytest.approx(case.scores, abs=1e-2)


@pytest.mark.parametrize("family", KINDS)
def test_the_cache_is_that_of_plain_generate(family: str) -> None:
    """A continued conversation would read leftovers of steps that were dropped."""
    case = find_case(family)
    output = run(family, case)
    base = build_model(family)
    ids = output.sequences
    plain = generate(base, ids[:, :-1], max_new_tokens=1)
    assert_same_cache(plain.cache, output.cache)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_one_forward_per_round(family: str) -> None:
    """Scores and roll-backs must not cost forwards that the statistics do not count."""
    case = find_case(family)
    base = build_model(family)
    run(family, case)
    count = 0

    def counting(*_: object) -> None:
        nonlocal count
        count += 1

    handle = base.register_forward_hook(counting)
    try:
        output = run(family, case)
    finally:
        handle.remove()
    rounds = output.speculation.rounds
    n_settled = int(family == "qwen3_next" and rounds[-1].n_fed > 1)
    assert count - len(rounds) in (0, n_settled)
    judged = [r for r in rounds if r.source == "step"]
    assert len(judged) == len(case.scores)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
@pytest.mark.parametrize("n_tokens", [1, 4, 12])
def test_candidates_of_the_small_model_are_lossless(family: str, n_tokens: int) -> None:
    """Token-level speculation inside base steps must not move their ends or their tokens."""
    case = find_case(family)
    output = run(family, case, step_speculation=settings(candidate_tokens=n_tokens))
    assert output.sequences[0].tolist() == case.text
    assert authors_of(output) == case.authors
    assert any(r.source == "assistant" for r in output.speculation.rounds)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
@pytest.mark.parametrize("lane", ["lockstep", "sequential", "stream"])
@pytest.mark.parametrize("interval", [None, 4])
def test_self_speculation_is_lossless_on_top(family: str, lane: str, interval: int | None) -> None:
    """Drafts and spans in the same call must give the text of step speculation alone."""
    case = find_case(family)
    config = SelfSpeculationConfig(
        end_of_thinking=[case.marker],
        draft_budget=3,
        draft_interval=interval,
        max_draft_tokens=12,
        lane=lane,
        adaptive=False,
    )
    output = run(family, case, self_speculation=config)
    assert output.sequences[0].tolist() == case.text
    assert authors_of(output) == case.authors
    assert output.speculation.drafts
    assert output.cache.get_seq_length() == len(case.text) - 1


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("threshold", [0.0, 10.0])
def test_sampling_with_the_same_seed(family: str, threshold: float) -> None:
    """The small model must not draw from the global generator, and must repeat its own draws."""
    case = find_case(family)
    base = build_model(family)
    sampling = {"do_sample": True, "temperature": 0.9, "top_k": 20}
    torch.manual_seed(7)
    plain = generate(base, case.prompt, max_new_tokens=NEW_TOKENS, **sampling)
    outputs = []
    for _ in range(2):
        torch.manual_seed(7)
        steps = settings(threshold=threshold, candidate_tokens=3)
        outputs.append(run(family, case, step_speculation=steps, **sampling).sequences.tolist())
    assert outputs[0] == outputs[1]
    assert (outputs[0] == plain.sequences.tolist()) == (threshold == 10.0)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_runs_or_is_refused(family: str) -> None:
    """A family whose cache cannot go back must not be decoded wrongly, but refused by name."""
    model = build_model(family)
    prompt = random_prompt(model, 9, 0)
    new_ids = generate(model, prompt, max_new_tokens=20).sequences[0, 9:].tolist()
    arguments = {
        "max_new_tokens": 20,
        "tokenizer": TOKENIZER,
        "assistant_model": build_model("llama", seed=3),
        "self_speculation": SelfSpeculationConfig(end_of_thinking=new_ids[-1:], reuse="none"),
        "step_speculation": settings(threshold=10.0),
    }
    with enabled(model):
        if not FAMILIES[family].multi_token_exact:
            with pytest.raises(ssr_hf.UnsupportedError, match="base model cannot"):
                generate(model, prompt, **arguments)
            return
        output = generate(model, prompt, **arguments)
    assert output.sequences[0, 9:].tolist() == new_ids
