"""The replay script, on pairs whose rounds were counted by hand."""

from __future__ import annotations

import importlib
import json
import random
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from typer.testing import CliRunner

from ssr_hf.config import SuffixConfig


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("replay_classeval")


def pair_of(script, draft_ids, final_ids, prompt_ids=(), kind="pair"):
    return script.Pair(kind, tuple(prompt_ids), tuple(draft_ids), tuple(final_ids))


def one_token_spans(**changes) -> SuffixConfig:
    return SuffixConfig(factor=1.0, min_probability=0.0, **changes)


SUBSTITUTION = ([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6])


def test_plain_decoding_is_one_token_per_forward(script):
    """Bug: the last token is counted twice, or a forward without candidates emits nothing."""
    tally = script.replay(pair_of(script, *SUBSTITUTION), script.Setting("", False, script.NoSpans))
    assert tally == script.Tally(pairs=1, tokens=6, forwards=6)


def test_prefix_only(script):
    """Bug: the token that replaces the first rejected candidate is not emitted.

    Rounds: (1 2) 9 | 4 | 5 | 6.
    """
    tally = script.replay(pair_of(script, *SUBSTITUTION), script.Setting("", True, script.NoSpans))
    assert tally == script.Tally(pairs=1, tokens=6, forwards=4, accepted_prefix=2, proposed_draft=6)


def test_prefix_and_suffix(script):
    """Bug: the draft is forgotten once its prefix was verified.

    Rounds: (1 2) 9 | 4, nothing matches 9 | (5) 6, offered after 4.
    """
    setting = script.index_setting("", one_token_spans())
    tally = script.replay(pair_of(script, *SUBSTITUTION), setting)
    assert tally == script.Tally(
        pairs=1, tokens=6, forwards=3, accepted_prefix=2, proposed_draft=6, proposed_spans=1
    )


def test_suffix_only(script):
    """Bug: the whole draft is offered although its prefix is not to be verified.

    Rounds: 1, no context yet | (2) 9 | 4 | (5) 6.
    """
    setting = script.index_setting("", one_token_spans(), verifies_prefix=False)
    tally = script.replay(pair_of(script, *SUBSTITUTION), setting)
    assert tally == script.Tally(pairs=1, tokens=6, forwards=4, proposed_spans=2)


def test_final_text_that_ends_inside_the_draft(script):
    """Bug: more tokens are emitted than the final text has."""
    pair = pair_of(script, [1, 2, 3, 4], [1, 2, 3])
    tally = script.replay(pair, script.Setting("", True, script.NoSpans))
    assert tally == script.Tally(pairs=1, tokens=3, forwards=1, accepted_prefix=3, proposed_draft=4)


@pytest.mark.parametrize(
    ("sources", "forwards", "proposed"), [(("draft",), 6, 0), (("draft", "answer"), 5, 3)]
)
def test_answer_is_a_source_only_where_named(script, sources, forwards, proposed):
    """Bug: the answer so far is searched although the setting leaves it out, or never is.

    Rounds with the answer: 7 | 8 | 7 | (8) 7 | (8 7), of which the text ends after the 8.
    """
    setting = script.index_setting("", one_token_spans(sources=sources), verifies_prefix=False)
    tally = script.replay(pair_of(script, [1, 2], [7, 8, 7, 8, 7, 8]), setting)
    assert (tally.forwards, tally.proposed_spans) == (forwards, proposed)


def test_figures_are_ratios_of_totals(script):
    """Bug: ratios of single pairs are averaged, so that a short identical pair dominates."""
    pairs = [
        pair_of(script, [1, 2, 3, 4], [1, 2, 3, 4], kind="a"),
        pair_of(script, [5], [6, 7, 8], kind="a"),
        pair_of(script, [5], [6], kind="b"),
    ]
    tallies = script.replay_all(pairs, script.Setting("", True, script.NoSpans))
    assert list(tallies) == ["a", "b"]
    assert tallies["a"].figures == {
        "tokens_per_forward": 7 / 4,
        "accepted_prefix_per_pair": 4 / 2,
        "draft_tokens_proposed_per_token": 5 / 7,
        "span_tokens_proposed_per_token": 0.0,
    }


@pytest.mark.parametrize("seed", range(20))
def test_stock_lookup_is_the_hosts(script, seed):
    """Bug: the baseline is weaker than the host's own prompt lookup."""
    rng = random.Random(seed)
    token_ids = [rng.randrange(2 + seed) for _ in range(60)]
    host = PromptLookupCandidateGenerator(max_length=1000)
    for n in range(2, len(token_ids)):
        expected, _ = host.get_candidates(torch.tensor([token_ids[:n]]))
        spans = script.StockSpans(token_ids[:1])
        spans.commit(token_ids[1:n])
        assert list(spans.propose()) == expected[0, n:].tolist()


def test_command_prints_tables_and_ends_in_json(script, tmp_path):
    """Bug: the machine-readable line is missing, wrapped or lacks a setting."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate("?abcdefg")}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tokenizer")
    row = {"kind": "k", "model": "m", "prompt": "g", "draft": "a b c d", "final": "a b e d"}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    arguments = [str(tmp_path / "pairs.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]
    result = CliRunner().invoke(script.app, [*arguments, "--limit", "2"], catch_exceptions=False)
    document = json.loads(result.stdout.splitlines()[-1])
    by_setting = {row["setting"]: row for row in document["rows"]}
    assert list(by_setting) == [setting.name for setting in script.settings()]
    assert by_setting["prefix only"]["pairs"] == 2
    assert by_setting["prefix only"]["tokens_per_forward"] == 4 / 2
    assert by_setting["none"]["tokens_per_forward"] == 1.0
