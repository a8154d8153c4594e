"""`scripts/check_lossless.py` on a tiny saved model, on a sabotaged one, and on a true tie."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cli_models import (
    save_gguf,
    save_model_without_stream,
    save_thinking_model,
    save_unmarked_model,
)
from transformers import Qwen3ForCausalLM
from typer.testing import CliRunner, Result

from ssr_hf import SelfSpeculationConfig
from ssr_hf.lanes import LANE_TYPES

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_lossless.py"
N_TOKENS = 40
# The one-time probe of a model feeds fewer tokens, so it does not meet the sabotage.
PROBED = 16


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_lossless", SCRIPT)
    assert spec is not None and spec.loader is not None, f"no module at {SCRIPT}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_thinking_model(tmp_path_factory.mktemp("thinking"))


def run(script: ModuleType, *arguments: object) -> Result:
    """Runs the script in this process; a traceback is a failure of the test itself."""
    given = [str(argument) for argument in (*arguments, "--tokens", N_TOKENS, "--threads", 1)]
    result = CliRunner().invoke(script.app, given)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


@pytest.fixture
def sabotage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a forward over several tokens on a longer cache give other logits than single steps."""
    honest = Qwen3ForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = honest(self, *args, **kwargs)
        ids = kwargs.get("input_ids")
        n_fed = 0 if ids is None else ids.shape[1]
        n_held = outputs.cache.get_seq_length() - n_fed
        if n_fed > 1 and n_held > PROBED:
            outputs.logits = outputs.logits.roll(1, dims=-1)
        return outputs

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", forward)


def test_honest_model_passes(script: ModuleType, model_dir: Path) -> None:
    """A check that fails where nothing is wrong, or that compares nothing."""
    result = run(script, model_dir, "--prompt", "Count the ducks.", "--prompt", "Why?", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["lossless"] is True
    settings = script.settings(N_TOKENS, SelfSpeculationConfig(), LANE_TYPES)
    assert report["left_out"] == {}
    assert len(report["results"]) == 2 * 2 * len(settings)
    assert {r["verdict"] for r in report["results"]} == {"same"}
    assert {r["selection"] for r in report["results"]} == {"greedy", "sampled"}
    # Without accepted candidates there was nothing to get wrong.
    assert any(r["n_forwards"] < r["n_tokens"] for r in report["results"])


@pytest.mark.usefixtures("sabotage")
def test_sabotaged_model_fails(script: ModuleType, model_dir: Path) -> None:
    """A check that passes whatever the model does, or that calls every difference a tie."""
    result = run(script, model_dir, "--prompt", "Count the ducks.", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["lossless"] is False
    different = [r for r in report["results"] if r["verdict"] == "different"]
    assert {r["selection"] for r in different} == {"greedy", "sampled"}
    for found in (r["divergence"] for r in different):
        assert found["margin"] is None or found["margin"] > 2 * found["rounding"]


@pytest.mark.usefixtures("sabotage")
def test_people_are_told_where(script: ModuleType, model_dir: Path) -> None:
    """A failure without the place, or a last line that says something else than the exit code."""
    result = run(script, model_dir, "--prompt", "Count the ducks.")
    assert result.exit_code == 1
    assert "instead of" in result.stdout
    assert "margin" in result.stdout
    assert result.stdout.splitlines()[-1] == "NOT lossless"


@pytest.mark.parametrize("selection", ["greedy", "sampled"])
def test_only_a_tie_is_called_a_tie(script: ModuleType, model_dir: Path, selection: str) -> None:
    """A margin that is measured between other tokens, or with other draws, than those written."""
    session, request = _session(script, model_dir)
    arguments = script.GREEDY if selection == "greedy" else script.SAMPLED
    checker = script.Checker(session, request, arguments, seed=0)
    config = SelfSpeculationConfig()
    plain_ids = checker.plain(config)
    at = 20
    other_id = (plain_ids[at] + 1) % len(session.tokenizer)
    other_ids = (*plain_ids[:at], other_id)
    found = checker.compare(plain_ids, other_ids, config)
    assert found.position == at
    assert not found.is_tie

    if selection == "sampled":
        # The other token would need the same noise as well.
        return
    weights = session.model.lm_head.weight.data
    weights[other_id] = weights[plain_ids[at]]
    assert checker.compare(plain_ids, other_ids, config).is_tie


def _session(script: ModuleType, directory: Path) -> tuple[Any, Any]:
    options = script.ModelOptions(model=str(directory), threads=1)
    session = script.open_session(options, SelfSpeculationConfig())
    return session, script.make_request(session, "Count the ducks.", False, N_TOKENS)


def test_margin_of_a_sampled_token_is_that_of_its_own_draw(
    script: ModuleType, model_dir: Path
) -> None:
    """Noise of another draw: the written token would often seem to lose."""
    session, request = _session(script, model_dir)
    checker = script.Checker(session, request, script.SAMPLED, seed=3)
    config = SelfSpeculationConfig()
    plain_ids = checker.plain(config)
    for at in (0, 1, 7, 30):
        best = plain_ids[at]
        others = [token_id for token_id in range(len(session.tokenizer)) if token_id != best]
        for other_id in others[::20]:
            margin, _ = checker._measure(plain_ids[:at], best, other_id, config)
            assert margin is not None


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_prompts_of_a_file(script: ModuleType, tmp_path: Path, name: str) -> None:
    """Lines that are lost, or JSON that is taken for a prompt."""
    lines = ["Count the ducks.", "", "Why?"]
    if name.endswith("jsonl"):
        lines = [json.dumps({"prompt": line}) for line in lines if line]
    (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    assert script.read_prompts(None, tmp_path / name) == ["Count the ducks.", "Why?"]


def test_gguf_file(script: ModuleType, tmp_path: Path) -> None:
    """A quantised file is named as what it is: a model like any other."""
    path = save_gguf(tmp_path / "tiny.gguf")
    result = run(script, path, "--prompt", "Why?", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["lossless"] is True


def test_lane_that_the_model_cannot_use(script: ModuleType, tmp_path: Path) -> None:
    """A check that ends at the first lane that is refused, or passes over it in silence."""
    directory = save_model_without_stream(tmp_path)
    result = run(script, directory, "--prompt", "Why?", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["left_out"]) == ["stream"]
    lanes = {r["setting"] for r in report["results"] if r["setting"].endswith("lane")}
    assert lanes == {"capped, lockstep lane", "capped, sequential lane"}
    assert "lane stream is left out: its rotary" in run(script, directory, "--prompt", "a").stdout


def test_given_marker(script: ModuleType, tmp_path: Path) -> None:
    """A marker that finds the model usable and is forgotten where it is checked."""
    directory = save_unmarked_model(tmp_path)
    arguments = ("--prompt", "Why?", "--end-of-thinking", "</done>", "--json")
    result = run(script, directory, *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["lossless"] is True
    assert any(r["setting"].startswith("capped") for r in report["results"])


def test_wrong_input_is_exit_code_2(script: ModuleType, model_dir: Path, tmp_path: Path) -> None:
    """Wrong input that looks like a failed check."""
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for arguments in (
        (tmp_path / "missing",),
        (model_dir, "--prompts", empty),
        (model_dir, "--prompts", tmp_path / "missing.txt"),
        (save_unmarked_model(tmp_path / "unmarked"),),
    ):
        assert run(script, *arguments).exit_code == 2
