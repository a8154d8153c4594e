"""Rejection sampling: the distribution is that of plain `generate`, proven by enumerating draws.

A generation is a tree: every draw is a branch with a known probability. Running it once per leaf
gives the distribution of its text exactly, with every draft, judgement and residual on the way.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from enumerated_draws import outcomes
from families import build_model
from helpers import assert_same, declare, enabled, generate, run_both
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor

from ssr_hf import SelfSpeculationConfig, ThinkingBudgetLogitsProcessor, ThinkingMarkers
from ssr_hf.acceptance import Proposal, draft_seed, judged_distribution
from ssr_hf.pacing import MeasuredPacer
from ssr_hf.profile import Profile
from ssr_hf.records import Candidates, ForwardShape

EOS, MARKER = 0, 2
TOLERANCE = 1e-5
# Chance that a right implementation fails the chi-square test with another seed.
FALSE_ALARM = 1e-6
N_SAMPLES = 400
LEAST_EXPECTED = 8.0


# Every distribution over three tokens whose probabilities are multiples of 1 / 5.
GRID = [torch.tensor(n) / 5 for n in itertools.product(range(6), repeat=3) if sum(n) == 5]


@pytest.mark.parametrize("p", GRID, ids=str)
def test_judged_candidates_have_the_target_distribution(p: Tensor) -> None:
    """A residual that is not normalised, a quotient upside down, a zero of p or q mishandled."""
    for q in GRID:
        mixture = torch.zeros(3)
        for token_id in q.nonzero()[:, 0].tolist():
            judged = judged_distribution(p, q, token_id)
            assert judged[token_id].item() == pytest.approx(min(1.0, (p / q)[token_id].item()))
            mixture += q[token_id] * judged
        torch.testing.assert_close(mixture, p, rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", GRID, ids=str)
def test_a_span_is_judged_by_drawing_from_the_target(p: Tensor) -> None:
    """Spans have no q. They stand for a point mass, where the rule is one plain draw from p."""
    for token_id in range(3):
        point_mass = torch.eye(3)[token_id]
        judged = judged_distribution(p, point_mass, token_id)
        torch.testing.assert_close(judged, p, rtol=0, atol=1e-6)


def test_rows_are_compressed_only_without_loss() -> None:
    """A truncated row judges by another distribution than the one it was drawn from."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 64, generator=generator)
    filtered = scores.masked_fill(scores < scores.topk(5).values[0, -1], -torch.inf)
    target = torch.randn(1, 64, generator=generator).softmax(dim=-1)
    for row, n_kept in ((scores, 64), (filtered, 5)):
        proposal = Proposal.draw(row, generator)
        assert len(proposal.probabilities) == n_kept
        expected = judged_distribution(target[0], row.softmax(dim=-1)[0], proposal.token_id)
        torch.testing.assert_close(proposal.judge(target)[0], expected)


def test_an_earlier_draft_is_kept_where_it_still_holds() -> None:
    """Bootstrapping that draws anew: right in distribution, and the earlier draft for nothing."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 16, generator=generator)
    for _ in range(20):
        earlier = Proposal.draw(scores, generator)
        assert Proposal.draw(scores, generator, earlier).token_id == earlier.token_id


def test_scores_without_a_token_do_not_end_the_generation() -> None:
    """A draft whose processors mask everything: plain `generate` never went there."""
    generator = torch.Generator().manual_seed(0)
    proposal = Proposal.draw(torch.full((1, 4), -torch.inf), generator)
    assert proposal.probabilities.tolist() == [0.25] * 4


def test_no_measurement_decides_how_much_of_a_sampled_draft_is_judged() -> None:
    """A number of candidates that follows the draft's length, and with it where the draft ended."""
    profile = Profile(step_seconds=1.0)
    for n_tokens in (2, 8) * 50:
        profile.observe_cost(n_tokens, seconds=90.0)
    pacer = MeasuredPacer(profile)
    proposal = Proposal(1, torch.ones(3) / 3)
    greedy = Candidates((1,) * 8, "draft")
    sampled = greedy._replace(proposals=(proposal,) * 8)
    assert len(pacer.trim(greedy, "answering", ForwardShape(1)).token_ids) < 8
    assert pacer.trim(sampled, "answering", ForwardShape(1)) == sampled


@functools.cache
def _three_token_model() -> GPT2LMHeadModel:
    """Its next token depends strongly on the position, so every branch point has another q."""
    config = GPT2Config(
        vocab_size=3,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(104)
        return GPT2LMHeadModel(config).eval()


# Prompt, new tokens, settings.
ENUMERATED: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    # The draft is verified as a whole.
    "one draft": ([1], 5, {"draft_budget": 1, "thinking_budget": 2, "lane": "sequential"}),
    # The second draft starts from the first; it must branch whether or not the first has ended.
    "bootstrapped": (
        [1, 0, 1],
        7,
        {"draft_budget": (1, 3), "thinking_budget": 4, "reuse": "prefix"},
    ),
    # Spans of the prompt run over the end of thinking; a round must not.
    "spans over the marker": (
        [1, 1, 1, 1, 2, 1, 1, 1, 1, 2, 1, EOS, 1, 1, 1, 1],
        6,
        {"draft_budget": 1, "thinking_budget": 4},
    ),
}


def _config(case: str, acceptance: str = "rejection_sampling") -> SelfSpeculationConfig:
    return SelfSpeculationConfig(
        acceptance=acceptance,
        end_of_thinking=[MARKER],
        max_draft_tokens=2,
        suffix={"max_match": 4, "factor": 4.0},
        adaptive=False,
        **ENUMERATED[case][2],
    )


def _sample(case: str, config: SelfSpeculationConfig | None) -> Any:
    """The output of one generation, a plain one where `config` is None."""
    prompt_ids, n_tokens, settings = ENUMERATED[case]
    arguments: dict[str, Any] = {"self_speculation": config}
    if config is None:
        markers = ThinkingMarkers(start=(), end=((MARKER,),))
        budget = settings["thinking_budget"]
        processor = ThinkingBudgetLogitsProcessor(markers, budget, len(prompt_ids))
        arguments = {"logits_processor": [processor]}
    arguments |= {"do_sample": True, "top_k": 0, "max_new_tokens": n_tokens}
    with enabled(_three_token_model()) as model:
        return generate(model, torch.tensor([prompt_ids]), **arguments)


def _text(case: str, config: SelfSpeculationConfig | None) -> tuple[int, ...]:
    return tuple(_sample(case, config).sequences[0, len(ENUMERATED[case][0]) :].tolist())


@pytest.mark.parametrize("case", ENUMERATED)
def test_every_text_has_its_exact_probability(case: str) -> None:
    """A judgement, a residual or a decision that depends on tokens still to be judged."""
    plain = outcomes(lambda: _text(case, None))
    judged = outcomes(lambda: _text(case, _config(case)))
    distance = sum(abs(plain.get(text, 0.0) - judged.get(text, 0.0)) for text in plain | judged)
    assert len(plain) > 30
    assert distance / 2 < TOLERANCE


def test_real_draws_have_the_exact_distribution() -> None:
    """Drafts that repeat from call to call, or share their draws with the text."""
    exact = outcomes(lambda: _text("one draft", None))
    torch.manual_seed(1)
    counts = Counter(_text("one draft", _config("one draft")) for _ in range(N_SAMPLES))
    assert not counts.keys() - exact.keys()
    assert _chi_square_tail(exact, counts) > FALSE_ALARM


def _chi_square_tail(
    exact: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]]
) -> float:
    """Chance of a larger statistic than that of `counts`; rare texts are pooled."""
    bins: list[list[float]] = [[0.0, 0.0]]
    for text, probability in sorted(exact.items(), key=lambda item: item[1]):
        if bins[-1][0] >= LEAST_EXPECTED:
            bins.append([0.0, 0.0])
        bins[-1][0] += probability * counts.total()
        bins[-1][1] += counts[text]
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in bins)
    half_freedom = torch.tensor((len(bins) - 1) / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return torch.special.gammaincc(half_freedom, half).item()


def test_same_seed_same_text_and_other_drafts_in_the_next_call() -> None:
    """A run that cannot be repeated, or drafts that every call of a loop would share."""
    texts, seeds = [], []
    for _ in range(2):
        torch.manual_seed(5)
        for _ in range(4):
            seeds.append(draft_seed(torch.device("cpu")))
            texts.append(_text("bootstrapped", _config("bootstrapped")))
    assert texts[:4] == texts[4:]
    assert seeds[:4] == seeds[4:]
    assert len(set(seeds)) == 4


def test_text_is_that_of_plain_generate_until_a_draft_is_judged() -> None:
    """A draft that draws from the generator of the text, or one draw more or less per token."""
    declared = declare("llama", do_sample=True)
    config = declared.config(acceptance="rejection_sampling", reuse="prefix")
    n_tokens = declared.n_thinking + 1
    pair = run_both(
        build_model("llama"), declared.prompt, config, do_sample=True, max_new_tokens=n_tokens + 16
    )
    assert pair.stats.drafts[0].n_tokens > 0
    length = declared.prompt.shape[1] + n_tokens
    assert pair.fast.sequences[0, :length].tolist() == pair.plain.sequences[0, :length].tolist()


def test_greedy_ignores_it() -> None:
    """Greedy drafts that are judged by chance, or that keep rows nobody reads."""
    declared = declare("llama")
    model = build_model("llama")
    exact, rejection = (
        run_both(model, declared.prompt, declared.config(acceptance=rule, adaptive=False))
        for rule in ("exact_match", "rejection_sampling")
    )
    assert_same(rejection)
    rounds = [
        [(r.source, r.n_proposed, r.n_accepted) for r in pair.stats.rounds]
        for pair in (exact, rejection)
    ]
    assert rounds[0] == rounds[1]


class _Witness(LogitsProcessor):
    """Notes the text of every call."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        return scores


@pytest.mark.parametrize("schedule", [{}, {"draft_interval": 6, "max_draft_tokens": 5}])
def test_processors_see_every_emitted_token_once(schedule: dict[str, Any]) -> None:
    """User code that is called for a draft, or for a candidate that was rejected."""
    declared = declare("llama", do_sample=True)
    model, witness = build_model("llama"), _Witness()
    config = declared.config(acceptance="rejection_sampling", **schedule)
    with enabled(model):
        torch.manual_seed(0)
        output = generate(
            model,
            declared.prompt,
            do_sample=True,
            self_speculation=config,
            logits_processor=[witness],
        )
    text = output.sequences[0].tolist()
    assert witness.seen == [text[:n] for n in range(declared.prompt.shape[1], len(text))]


def test_sampled_drafts_are_accepted_more_often_than_greedy_ones() -> None:
    """The reason for the rule: sum(min(p, q)) instead of p at the likeliest token of q."""
    accepted = []
    for rule in ("exact_match", "rejection_sampling"):
        torch.manual_seed(0)
        runs = (_sample("one draft", _config("one draft", rule)) for _ in range(N_SAMPLES // 4))
        accepted.append(sum(run.speculation.accepted_prefix for run in runs))
    assert accepted[1] > accepted[0]
