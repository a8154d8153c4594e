"""The web demo: its stream of labelled text, and what it says without gradio."""

from __future__ import annotations

import re
import runpy
from importlib.util import find_spec
from typing import Any

import pytest
from cli_models import Oracle, save_thinking_model

import ssr_hf
from ssr_hf.demo import build_app
from ssr_hf.demo.app import coloured, respond
from ssr_hf.demo.streaming import stream

PROMPT = "Count the ducks."
N_TOKENS, BUDGET = 48, 24
CONFIG = ssr_hf.SelfSpeculationConfig(
    draft_budget=6, thinking_budget=BUDGET, max_draft_tokens=20, adaptive=False
)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    oracle = Oracle(save_thinking_model(tmp_path_factory.mktemp("thinking")))
    ssr_hf.enable(oracle.model)
    return oracle


def test_stream_equals_plain_generate(oracle: Oracle) -> None:
    """Text lost between rounds, labels that do not fit the statistics."""
    seen = []
    for progress in stream(oracle.model, oracle.tokenizer, PROMPT, CONFIG, N_TOKENS):
        seen.append(progress.n_tokens)
    ids = oracle.new_tokens(PROMPT, N_TOKENS, BUDGET, do_sample=False)
    shown = [token for token in ids if token != oracle.tokenizer.eos_token_id]
    expected = oracle.tokenizer.decode(shown)
    text = "".join(piece for piece, _ in progress.pieces)
    assert text == expected[: len(text)] and not expected[len(text) :].strip("\ufffd")
    stats = progress.output.speculation
    assert seen[-1] == N_TOKENS and len(seen) == stats.forwards + 1 and seen == sorted(seen)
    assert progress.accepted["draft"] == stats.accepted_prefix
    assert progress.accepted["suffix"] == stats.suffix_accepted
    labels = {label for _, label in progress.pieces}
    assert labels <= {None, "draft", "suffix", "marker"} and len(labels) > 1
    assert all(
        one[1] != other[1] for one, other in zip(progress.pieces, progress.pieces[1:], strict=False)
    )


def test_stream_raises_what_generate_raises(oracle: Oracle) -> None:
    """A browser that waits for ever, because the error stayed in the thread."""
    with pytest.raises(ssr_hf.ConfigError, match="prompt is empty"):
        next(stream(oracle.model, oracle.tokenizer, "  ", CONFIG, N_TOKENS))
    with pytest.raises(ValueError, match="max_new_tokens"):
        list(stream(oracle.model, oracle.tokenizer, PROMPT, CONFIG, 0))


def test_respond_compares_with_plain_generate(oracle: Oracle) -> None:
    """A comparison that is missing, or differs from what generate gives."""
    arguments = (oracle.model, oracle.tokenizer, PROMPT, 6, N_TOKENS)
    text, figures = list(respond(*arguments, True))[-1]
    assert "| identical output | yes |" in figures and "speed-up" in figures
    assert f"| tokens | {N_TOKENS} |" in figures
    _, figures = list(respond(*arguments, False))[-1]
    assert "identical" not in figures
    assert "<pre" in text


def test_text_is_escaped() -> None:
    """A model that writes HTML into the page."""
    page = coloured([("<script>a</script>", None), ("<b>", "draft")])
    assert "<script>" not in page and "<b>" not in page
    assert re.search(r"<span style='background: #\w+[^>]*>&lt;b&gt;</span>", page)


def test_missing_gradio(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """An ImportError that does not say what to install."""
    monkeypatch.setattr("ssr_hf.demo.app.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'ssr-hf\[demo\]'"):
        build_app()
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("ssr_hf.demo", run_name="__main__")
    assert ended.value.code == 2
    assert "pip install" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("gradio") is None, reason="needs gradio")
def test_app_is_built(oracle: Oracle) -> None:
    """A component whose arguments gradio no longer takes."""
    app = build_app(oracle.model, oracle.tokenizer)
    labels = {block.label for block in app.blocks.values() if hasattr(block, "label")}
    assert {"Prompt", "Longest generation", "Compare with plain generate"} <= labels
