"""Several rows: exactly plain generate's, after one warning; beams are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from families import build_model, random_prompt
from helpers import (
    PROMPT_LENGTH,
    assert_same,
    assert_same_steps,
    declare,
    enabled,
    generate,
    plain_budget,
    run_both,
)
from torch import Tensor
from transformers import LogitsProcessorList

from ssr_hf import SelfSpeculationConfig, SelfSpeculativeOutput, UnsupportedError

FAMILY = "llama"


def _padded_rows() -> tuple[Tensor, Tensor]:
    """Ids and mask of two prompts, the second one shorter and padded on the left."""
    model = build_model(FAMILY)
    ids = torch.cat([random_prompt(model, PROMPT_LENGTH, seed=seed) for seed in (1, 2)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids * mask, mask


ROWS: dict[str, dict[str, Any]] = {
    "batch": {},
    "sampled batch": {"do_sample": True},
    "return sequences": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_those_of_plain_after_one_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A row that is wrong, missing or silently decoded in another way than asked for."""
    model = build_model(FAMILY)
    config = declare(FAMILY).config()
    ids, mask = _padded_rows()
    arguments = {**ROWS[name], "output_scores": True}
    with caplog.at_level(logging.WARNING, logger="ssr_hf"):
        pair = run_both(model, ids, config, attention_mask=mask, **arguments)
    n_rows = 4 if "num_return_sequences" in ROWS[name] else 2
    assert pair.fast.sequences.tolist() == pair.plain.sequences.tolist()
    assert_same_steps(pair.plain.scores, pair.fast.scores)
    warnings = [record.getMessage() for record in caplog.records if "ssr_hf" in record.name]
    assert len(warnings) == 1
    assert f"these {n_rows} are decoded plainly" in warnings[0]
    assert "once per prompt" in warnings[0]


def test_several_sequences_of_one_prompt() -> None:
    """`num_return_sequences` with a single prompt, which is a batch as well."""
    declared = declare(FAMILY)
    pair = run_both(
        build_model(FAMILY),
        declared.prompt,
        declared.config(),
        do_sample=True,
        num_return_sequences=3,
    )
    assert pair.fast.sequences.shape[0] == 3
    assert pair.fast.sequences.tolist() == pair.plain.sequences.tolist()


def test_output_of_a_batch_says_what_was_done() -> None:
    """Code that reads `output.speculation` and meets another class where there were two rows."""
    ids, mask = _padded_rows()
    pair = run_both(build_model(FAMILY), ids, declare(FAMILY).config(), attention_mask=mask)
    assert isinstance(pair.fast, SelfSpeculativeOutput)
    assert pair.stats.drafts == ()
    assert pair.stats.notes == ("2 rows were decoded plainly",)


@pytest.mark.parametrize("returned", [True, False])
def test_thinking_budget_holds_in_a_batch(returned: bool) -> None:
    """A setting that changes tokens dropped because the rows are decoded plainly."""
    model = build_model(FAMILY)
    config = SelfSpeculationConfig(
        end_of_thinking=[251, 252], thinking_budget=8, draft_budget=4, adaptive=False
    )
    ids, mask = _padded_rows()
    rows = {"attention_mask": mask, "return_dict_in_generate": returned}
    budget = LogitsProcessorList([plain_budget(config, PROMPT_LENGTH)])
    plain = generate(model, ids, **rows, logits_processor=budget)
    with enabled(model):
        fast = generate(model, ids, **rows, self_speculation=config)
    if returned:
        plain, fast = plain.sequences, fast.sequences
    assert fast.tolist() == plain.tolist()
    assert fast[:, PROMPT_LENGTH + 8 : PROMPT_LENGTH + 10].tolist() == [[251, 252]] * 2


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"num_beams": 3, "do_sample": True}])
def test_beams_are_refused_before_the_prompt_is_read(settings: dict[str, Any]) -> None:
    """Beams that are silently decoded as something else."""
    model = build_model(FAMILY)
    declared = declare(FAMILY)
    forwards: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        with enabled(model), pytest.raises(UnsupportedError, match=r"beam.*num_beams=1"):
            generate(model, declared.prompt, self_speculation=declared.config(), **settings)
    finally:
        handle.remove()
    assert not forwards


def test_one_row_among_batched_calls_still_speculates() -> None:
    """A batch that switches speculation off for the calls after it."""
    model = build_model(FAMILY)
    declared = declare(FAMILY)
    with enabled(model):
        ids, mask = _padded_rows()
        generate(model, ids, attention_mask=mask, self_speculation=declared.config())
    pair = run_both(model, declared.prompt, declared.config())
    assert_same(pair)
    assert pair.stats.drafts
