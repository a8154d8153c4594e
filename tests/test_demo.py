"""The web demo: its stream of labelled text, and what it says without gradio."""

from __future__ import annotations

import re
import runpy
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from cli_models import Oracle, save_thinking_model

import ssr_hf
from ssr_hf import rows
from ssr_hf.cache import support
from ssr_hf.demo import build_app
from ssr_hf.demo.app import coloured, respond
from ssr_hf.demo.streaming import Pieces, _end_tokens, _LabelledText, stream

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
    assert text == expected
    stats = progress.output.speculation
    assert seen[-1] == N_TOKENS and len(seen) == len(stats.rounds) + 1 and seen == sorted(seen)
    assert progress.accepted["draft"] == stats.accepted_prefix
    assert progress.accepted["suffix"] == stats.suffix_accepted
    labels = {label for _, label in progress.pieces}
    assert labels <= {None, "draft", "suffix", "marker"} and len(labels) > 1
    assert all(
        one[1] != other[1] for one, other in zip(progress.pieces, progress.pieces[1:], strict=False)
    )


def test_a_late_reader_costs_no_time(oracle: Oracle) -> None:
    """A slow page shown as slow generation."""
    began = time.perf_counter()
    for progress in stream(oracle.model, oracle.tokenizer, PROMPT, CONFIG, N_TOKENS):
        if progress.n_tokens == 1:
            while progress.output is None and time.perf_counter() - began < 60:
                time.sleep(0.01)
            done = time.perf_counter() - began
            time.sleep(0.5)
    assert 0 < progress.seconds < done + 0.25
    assert progress.seconds >= progress.output.speculation.rounds[-1].start


def test_a_closed_page_ends_its_generation(oracle: Oracle) -> None:
    """A generation that nobody reads and that slows the next one down."""
    before = threading.active_count()
    progress = stream(oracle.model, oracle.tokenizer, PROMPT, CONFIG, 400)
    first = next(progress)
    progress.close()
    assert threading.active_count() == before
    assert first.output is None


def test_end_tokens_and_last_characters(oracle: Oracle) -> None:
    """Text that loses what no token completed, or shows tokens that only end it."""
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[65, 66]))
    hidden = _end_tokens(model, oracle.tokenizer)
    assert {65, 66, oracle.tokenizer.eos_token_id} <= hidden and None not in hidden
    pieces: Pieces = []
    text = _LabelledText(oracle.tokenizer, pieces, hidden)
    unfinished = oracle.tokenizer.encode("é", add_special_tokens=False)[0]
    for token_id in (67, 65, *oracle.tokenizer.encode("\n"), 67, unfinished, 66):
        text.push(token_id, "draft")
    text.finish()
    letter = oracle.tokenizer.decode([67])
    assert pieces == [(f"{letter}\n{letter}\ufffd", "draft")]


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


def test_second_click_replays_nothing(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer copied from the first click, shown as the gain of the method."""
    configs = []

    def watched(*arguments: Any) -> Any:
        configs.append(arguments[3])
        return stream(*arguments)

    monkeypatch.setattr("ssr_hf.demo.app.stream", watched)
    list(respond(oracle.model, oracle.tokenizer, PROMPT, 6, N_TOKENS, False))
    assert [config.suffix.sources for config in configs] == [
        ("draft", "prompt", "thinking", "answer")
    ]


def test_text_is_escaped() -> None:
    """A model that writes HTML into the page."""
    page = coloured([("<script>a</script>", None), ("<b>", "draft")])
    assert "<script>" not in page and "<b>" not in page
    assert re.search(r"<span style='background: #\w+[^>]*>&lt;b&gt;</span>", page)


def test_missing_gradio(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """An ImportError that does not say what to install."""
    monkeypatch.setattr("ssr_hf.demo.app.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install gradio"):
        build_app()
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("ssr_hf.demo", run_name="__main__")
    assert ended.value.code == 2
    assert "pip install" in capsys.readouterr().err


def test_first_click_does_not_pay_for_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first click that looks slow, because the model is probed while the clock runs."""
    monkeypatch.setitem(sys.modules, "gradio", MagicMock())
    monkeypatch.setattr("ssr_hf.demo.app.find_spec", lambda name: name)
    probes = []
    for module in (support, rows):
        probes.append(MagicMock(side_effect=module._probe))
        monkeypatch.setattr(module, "_probe", probes[-1])
    fresh = Oracle(save_thinking_model(tmp_path))
    build_app(fresh.model, fresh.tokenizer)
    assert [probe.call_count for probe in probes] == [1, 1]
    list(respond(fresh.model, fresh.tokenizer, PROMPT, 6, N_TOKENS, False))
    assert [probe.call_count for probe in probes] == [1, 1]


@pytest.mark.skipif(find_spec("gradio") is None, reason="needs gradio")
def test_app_is_built(oracle: Oracle) -> None:
    """A component whose arguments gradio no longer takes."""
    app = build_app(oracle.model, oracle.tokenizer)
    labels = {block.label for block in app.blocks.values() if hasattr(block, "label")}
    assert {"Prompt", "Longest generation", "Compare with plain generate"} <= labels
