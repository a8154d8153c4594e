"""Two texts in one cache that go at different paces: each row computes what it would alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from families import build_model, random_prompt
from helpers import TOLERANCE, assert_same_cache
from transformers import GenerationConfig, PreTrainedModel

from ssr_hf import compat
from ssr_hf.rows import TwoRows
from ssr_hf.target import Target
from ssr_hf.tokens import TokenSequence

PROMPT = 9
WITH_HOLES = ("llama", "qwen3", "gpt2", "deepseek_v3")
IN_STEP = ("mistral", "gemma3", "lfm2", "qwen3_next", "mamba2", "falcon_h1")


def _target(
    model: PreTrainedModel, prompt: torch.Tensor, next_id: int, masked: bool = True
) -> Target:
    """A target that has read the prompt, with one committed token to feed."""
    config = GenerationConfig(max_new_tokens=80)
    kwargs = compat.fresh_kwargs(model, prompt, config)
    if masked:
        kwargs["attention_mask"] = torch.ones_like(prompt)
    target = Target(model, TokenSequence(prompt), kwargs)
    with torch.no_grad():
        target.prefill(config)
    target.sequence.append((next_id,))
    target.keep(1)
    return target


def _assert_judges(model: PreTrainedModel, text: list[int], logits: torch.Tensor) -> None:
    """The logits are those of a forward of the whole text, at its last tokens."""
    with torch.no_grad():
        alone = model(torch.tensor([text])).logits[:, -logits.shape[1] :]
    scale = max(1.0, alone.abs().max().item())
    assert (logits - alone).abs().max().item() <= TOLERANCE * scale


def _ids(rng: random.Random, at_most: int) -> list[int]:
    return [rng.randrange(3, 200) for _ in range(rng.randint(0, at_most))]


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("family", WITH_HOLES)
@torch.no_grad()
def test_rows_at_their_own_pace_compute_what_they_would_alone(family: str, ahead: int) -> None:
    """Holes that are seen, or that shift positions; slots of one row given to the other."""
    rng = random.Random(f"{family} {ahead}")
    model = build_model(family)
    prompt = random_prompt(model, PROMPT, seed=1)
    target = _target(model, prompt, 7, masked=ahead > 0)
    child_text = [*target.sequence.token_ids]
    child: Target | None = None
    n_in_row = len(child_text) - 1
    if ahead:
        sequence = TokenSequence(target.sequence.ids)
        sequence.append(tuple(range(11, 11 + ahead)))
        child = target.fork(sequence)
        child.settle()
        child_text = [*sequence.token_ids]
        n_in_row += ahead
    rows = TwoRows(target, child)
    assert rows.takes_candidates
    for _ in range(12):
        text = [*target.sequence.token_ids]
        candidates, new = _ids(rng, 4), _ids(rng, 4)
        logits, child_logits = rows.forward(candidates, [*child_text[n_in_row:], *new], n_in_row)
        _assert_judges(model, [*text, *candidates], logits)
        _assert_judges(model, [*child_text, *new], child_logits)
        n_accepted, n_accepted_of_child = rng.randint(0, len(candidates)), rng.randint(0, len(new))
        rows.keep_of_child(len(child_text) - n_in_row + n_accepted_of_child)
        n_in_row = len(child_text) + n_accepted_of_child
        child_text += [*new[:n_accepted_of_child], rng.randrange(3, 200)]
        target.sequence.append((*candidates[:n_accepted], rng.randrange(3, 200)))
        target.keep(n_accepted + 1)
    rows.retire()
    target.close(keeps_cache=True)
    fed = target.sequence.ids[:, :-1]
    assert_same_cache(model(fed, use_cache=True).cache, target.cache)


@pytest.mark.parametrize("family", IN_STEP)
@torch.no_grad()
def test_windows_and_states_keep_rows_in_step(family: str) -> None:
    """Holes in a window that counts slots, or in a state that has no slots."""
    model = build_model(family)
    target = _target(model, random_prompt(model, PROMPT, seed=1), 7)
    rows = TwoRows(target)
    assert not rows.takes_candidates
    rows.retire()


@torch.no_grad()
def test_a_failed_forward_leaves_the_parent_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with candidates, or with the draft's row, after an error."""
    model = build_model("llama")
    target = _target(model, random_prompt(model, PROMPT, seed=1), 7)
    rows = TwoRows(target)
    rows.forward((5, 6), (7, 8), PROMPT)
    rows.keep_of_child(2)
    target.sequence.append((9,))
    target.keep(1)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(MemoryError):
        rows.forward((5, 6), (8,), PROMPT + 2)
    monkeypatch.undo()
    rows.retire()
    target.close(keeps_cache=True)
    assert_same_cache(model(target.sequence.ids[:, :-1], use_cache=True).cache, target.cache)
