"""Rejection sampling: the distribution is that of plain `generate`, proven by enumerating draws.

A generation is a tree: every draw is a branch with a known probability. Running it once per leaf
gives the distribution of its text exactly, with every draft, judgement and residual on the way.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from families import build_model
from helpers import declare, enabled, generate, run_both
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor

from ssr_hf import SelfSpeculationConfig, ThinkingBudgetLogitsProcessor, ThinkingMarkers
from ssr_hf.acceptance import Proposal, draft_seed, judged_distribution

EOS, MARKER = 0, 2
PRUNED = 1e-7  # branches of rounding errors
TOLERANCE = 1e-5
# Chance that a right implementation fails the chi-square test with another seed.
FALSE_ALARM = 1e-6


def _grid(vocab_size: int, steps: int) -> list[Tensor]:
    """Every distribution whose probabilities are multiples of `1 / steps`."""
    counts = itertools.product(range(steps + 1), repeat=vocab_size)
    return [torch.tensor(c) / steps for c in counts if sum(c) == steps]


@pytest.mark.parametrize("p", _grid(3, 5), ids=str)
def test_judged_candidates_have_the_target_distribution(p: Tensor) -> None:
    """A residual that is not normalised, a quotient upside down, a zero of p or q mishandled."""
    for q in _grid(3, 5):
        mixture = torch.zeros(3)
        for token_id in q.nonzero()[:, 0].tolist():
            judged = judged_distribution(p, q, token_id)
            assert judged[token_id].item() == pytest.approx(min(1.0, (p / q)[token_id].item()))
            mixture += q[token_id] * judged
        torch.testing.assert_close(mixture, p, rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", _grid(3, 5), ids=str)
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


def test_scores_without_a_token_do_not_end_the_generation() -> None:
    """A draft whose processors mask everything: plain `generate` never went there."""
    generator = torch.Generator().manual_seed(0)
    proposal = Proposal.draw(torch.full((1, 4), -torch.inf), generator)
    assert proposal.probabilities.tolist() == [0.25] * 4


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


def _texts(run: Callable[[], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """The exact distribution of what `run` returns, over all its draws."""
    distribution: dict[tuple[int, ...], float] = defaultdict(float)
    pending: list[tuple[int, ...]] = [()]
    while pending:
        path = pending.pop()
        taken: list[int] = []
        weight = 1.0

        def multinomial(
            probabilities: Tensor,
            num_samples: int,
            generator: torch.Generator | None = None,
            path: tuple[int, ...] = path,
            taken: list[int] = taken,
        ) -> Tensor:
            nonlocal weight
            row = probabilities.double().flatten()
            row = (row / row.sum()).tolist()
            if len(taken) < len(path):
                token_id = path[len(taken)]
            else:
                token_id, *others = (i for i, share in enumerate(row) if share > PRUNED)
                pending.extend((*taken, other) for other in others)
            taken.append(token_id)
            weight *= row[token_id]
            return torch.tensor([token_id]).view(*probabilities.shape[:-1], num_samples)

        with mock.patch.object(torch, "multinomial", multinomial):
            text = run()
        distribution[text] += weight
    return distribution


def _config(**settings: Any) -> SelfSpeculationConfig:
    defaults = {"acceptance": "rejection_sampling", "end_of_thinking": [MARKER], "adaptive": False}
    return SelfSpeculationConfig(**{**defaults, **settings})


def _sample(
    prompt: Tensor, n_tokens: int, config: SelfSpeculationConfig | None, thinking_budget: int
) -> tuple[int, ...]:
    """New tokens, sampled plainly where `config` is None."""
    model = _three_token_model()
    arguments: dict[str, Any] = {"self_speculation": config}
    if config is None:
        markers = ThinkingMarkers(start=(), end=((MARKER,),))
        budget = ThinkingBudgetLogitsProcessor(markers, thinking_budget, prompt.shape[1])
        arguments = {"logits_processor": [budget]}
    with enabled(model):
        output = generate(
            model, prompt, do_sample=True, top_k=0, max_new_tokens=n_tokens, **arguments
        )
    return tuple(output.sequences[0, prompt.shape[1] :].tolist())


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
        [1, 1, 1, 1, 2, 1, 0, 1, 1, 1, 1, 2, 1, 1, 1, 1],
        6,
        {"draft_budget": 1, "thinking_budget": 4},
    ),
}


@pytest.mark.parametrize("case", ENUMERATED)
def test_every_text_has_its_exact_probability(case: str) -> None:
    """A judgement, a residual or a decision that depends on tokens still to be judged."""
    prompt_ids, n_tokens, settings = ENUMERATED[case]
    prompt = torch.tensor([prompt_ids])
    budget = settings["thinking_budget"]
    suffix = {"max_match": 4, "factor": 4.0}
    config = _config(**{"max_draft_tokens": 2, "suffix": suffix, **settings})
    plain = _texts(lambda: _sample(prompt, n_tokens, None, budget))
    judged = _texts(lambda: _sample(prompt, n_tokens, config, budget))
    distance = sum(abs(plain.get(text, 0.0) - judged.get(text, 0.0)) for text in plain | judged)
    assert len(plain) > 30
    assert distance / 2 < TOLERANCE
