"""The command line: wrong input, the demo, the check and the trace, on tiny random models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_models import (
    CONTEXT,
    Oracle,
    save_gguf,
    save_model_without_stream,
    save_thinking_model,
    save_unmarked_model,
)
from typer.testing import CliRunner, Result

import ssr_hf
from ssr_hf import SpeculationStats, cli
from ssr_hf.cache.support import Unsupported
from ssr_hf.cli.check import _tried
from ssr_hf.cli.options import SpeculationOptions

N_TOKENS, BUDGET = 48, 24
SHORT = ["-n", N_TOKENS, "--thinking-budget", BUDGET, "--draft-budget", 6, "--no-adaptive"]
PROMPT = "Count the ducks."


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_thinking_model(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def unmarked_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_unmarked_model(tmp_path_factory.mktemp("unmarked"))


def run(*arguments: object, stdin: str | None = None) -> Result:
    """Runs the command line in this process; a traceback is a failure of the test itself."""
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def alter_last_token(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Makes self-speculation end with another token than plain generate."""
    original = ssr_hf.cli.running.run_speculative

    def altered(*args: Any) -> Any:
        outcome = original(*args)
        *head, last = outcome.token_ids
        return replace(outcome, token_ids=(*head, last + 1))

    monkeypatch.setattr(f"ssr_hf.cli.{module}.run_speculative", altered)


def test_help_lists_every_command() -> None:
    """A sub-command that was written and never registered."""
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("demo", "generate", "check", "trace"))


def test_version() -> None:
    """A version that is asked for and starts a command, or is another one than the package's."""
    assert run("--version").stdout == f"ssr-hf {ssr_hf.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "generate", "check", "trace"])
def test_help_of_each_command(command: str) -> None:
    """Options whose declaration fails only when they are asked for."""
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--device" in result.stdout


WRONG_INPUT = {
    "missing directory": (["demo", "-m", "/no/such/model"], "no model at '/no/such/model'"),
    "missing GGUF file": (["demo", "-m", "missing.gguf"], "no model at 'missing.gguf'"),
    "empty model": (["trace", "-m", ""], "no model at ''"),
    "markers": (["demo", "-m", "UNMARKED"], "--end-of-thinking"),
    "markers, check": (["check", "UNMARKED"], "--end-of-thinking"),
    "empty prompt": (["demo", "-m", "MODEL", "-p", " \n"], "prompt is empty"),
    "long prompt": (["trace", "-m", "MODEL", "-p", "a" * CONTEXT], f"holds {CONTEXT}"),
    "long text": (["trace", "-m", "MODEL", "-p", "a", "-n", CONTEXT], "new tokens fit"),
    "two prompts": (["demo", "-p", "a", "--prompt-file", "b"], "--prompt and --prompt-file"),
    "no prompt file": (["demo", "--prompt-file", "/no/such/file"], "/no/such/file"),
    "no prompt": (["generate"], "--prompt, --prompt-file and --input"),
    "output directory": (["generate", "-p", "a", "-o", "/no/such/dir/a.txt"], "cannot be written"),
    "trace output": (["trace", "-o", "/no/such/dir/a.json"], "cannot be written"),
    "unknown option": (["demo", "--drafts", 3], "--drafts"),
    "unknown command": (["demonstrate"], "demonstrate"),
    "draft budget": (["demo", "--draft-budget", -5], "draft_budget is -5"),
    "draft budgets": (["demo", "--draft-budget", "64,32"], "draft_budget is (64, 32)"),
    "draft budget, text": (["demo", "--draft-budget", "many"], "--draft-budget is 'many'"),
    "thinking budget": (["demo", "--thinking-budget", -1], "thinking_budget is -1"),
    "draft length": (["demo", "--max-draft-tokens", 0], "max_draft_tokens is 0"),
    "span length": (["demo", "--suffix-max-tokens", -2], "suffix.max_tokens is -2"),
    "length": (["demo", "-n", -3], "'--max-new-tokens' / '-n'"),
    "temperature": (["demo", "-t", -0.5], "'--temperature' / '-t'"),
    "contradiction": (["demo", "-t", 0, "--top-p", 0.9], "--temperature 0"),
    "lane": (["demo", "--lane", "stram"], "lane='stream'"),
    "reuse": (["demo", "--reuse", "all"], "reuse is 'all'"),
    "dtype": (["demo", "--dtype", "int8"], "--dtype is 'int8'"),
    "device": (["demo", "--device", "abacus"], "--device 'abacus'"),
    "device without memory": (["demo", "--device", "meta"], "--device 'meta' cannot be used"),
    "device of an add-on": (["demo", "--device", "hpu"], "--device 'hpu' cannot be used"),
    "prompt, bytes": (["demo", "-m", "MODEL", "-p", "a\udcff"], "holds '\\udcff', half"),
    "prompt, bytes, raw": (["trace", "-m", "MODEL", "--raw", "-p", "a\udcff"], "'\\udcff', half"),
    "no config file": (["demo", "--config", "/no/such/file"], "/no/such/file cannot be read"),
    "two configs": (["demo", "--config", "a.json", "--reference"], "--reference and --config"),
    "picture format": (["trace", "--plot", "a.xyz"], "--plot"),
}


@pytest.mark.parametrize("case", WRONG_INPUT)
def test_wrong_input(case: str, model_dir: Path, unmarked_dir: Path) -> None:
    """A traceback, a wrong exit code, or a message that does not name what was wrong."""
    arguments, expected = WRONG_INPUT[case]
    places = {"MODEL": model_dir, "UNMARKED": unmarked_dir}
    result = run(*(places.get(str(argument), argument) for argument in arguments))
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output
    assert result.stdout == "" or case == "markers, check"


def test_demo_shows_what_plain_generate_writes(model_dir: Path) -> None:
    """Text lost or doubled while it streams, and escape codes in a pipe."""
    result = run("demo", "-m", model_dir, "-p", PROMPT, *SHORT, "--runs", 2)
    assert result.exit_code == 0, result.output
    oracle = Oracle(model_dir)
    ids = oracle.new_tokens(PROMPT, N_TOKENS, BUDGET, do_sample=False)
    hidden = {oracle.tokenizer.eos_token_id, oracle.tokenizer.pad_token_id}
    expected = oracle.tokenizer.decode([token for token in ids if token not in hidden])
    plain, speculative = result.stdout.split("PLAIN GENERATE\n")[1].split("SELF-SPECULATION")
    speculative = speculative.split("\n", 1)[1].split("RESULT")[0]
    assert printable(plain) == printable(speculative) == printable(expected)
    assert "identical output: yes, 2 of 2" in result.stdout
    assert "\x1b" not in result.output


def printable(text: str) -> str:
    return "".join(character for character in text if character.isprintable()).strip()


def test_demo_json(model_dir: Path) -> None:
    """Figures that do not belong together, and anything but one JSON object on stdout."""
    result = run("demo", "-m", model_dir, *SHORT, "--runs", 3, "--json", "--seed", 5)
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["identical"] is True
    prompts = [problem.prompt for problem in ssr_hf.tiny_reasoner_prompts(3, seed=5)]
    assert [entry["prompt"] for entry in report["runs"]] == prompts
    assert report["dtype"] == "float32" and report["versions"]["ssr-hf"] == ssr_hf.__version__
    for entry in report["runs"]:
        plain, speculative = entry["plain"], entry["self_speculation"]
        assert plain["tokens"] == plain["forwards"] == N_TOKENS == speculative["tokens"]
        assert speculative["forwards"] == entry["speculation"]["forwards"] <= N_TOKENS
        ratio = plain["seconds"] / speculative["seconds"]
        assert entry["speed_up"]["seconds"] == pytest.approx(ratio, rel=0.02)
        parts = plain["thinking_seconds"] + plain["answer_seconds"]
        assert parts == pytest.approx(plain["seconds"], abs=1e-3)
    ratios = sorted(entry["speed_up"]["answer_seconds"] for entry in report["runs"])
    assert report["median"]["speed_up"]["answer_seconds"] == ratios[1]


def test_demo_of_one_prompt_replays_nothing(model_dir: Path) -> None:
    """Later runs of the user's prompt that copy the first, shown as the gain of the method."""

    def sources(*arguments: object) -> list[str]:
        result = run("demo", "-m", model_dir, "-n", 16, "--runs", 2, "--json", *arguments)
        return json.loads(result.stdout)["config"]["suffix"]["sources"]

    assert sources("-p", PROMPT) == ["draft", "prompt", "thinking", "answer"]
    assert "history" in sources()


@pytest.mark.parametrize(("reuse", "left"), [("prefix+suffix", "prefix"), ("suffix", "none")])
def test_without_history_nothing_may_be_left(reuse: str, left: str) -> None:
    """A refusal of settings whose only source is the history."""
    only = ssr_hf.SelfSpeculationConfig(reuse=reuse, suffix={"sources": "history"})
    assert only.without_history().reuse == left


def test_demo_refuses_another_text(tmp_path: Path) -> None:
    """Rejection sampling, which writes another text by design, reported as a failure."""
    path = tmp_path / "config.json"
    path.write_text('{"acceptance": "rejection_sampling"}')
    result = run("demo", "--config", path, "-t", 0.8)
    assert result.exit_code == 2 and "acceptance is 'rejection_sampling'" in result.stderr


def test_config_of_a_file(tmp_path: Path) -> None:
    """A setting without an option of its own that gets lost, or a file that beats an option."""
    settings = ssr_hf.SelfSpeculationConfig(
        acceptance="rejection_sampling",
        draft_budget=(32, 64),
        suffix=ssr_hf.SuffixConfig(factor=2.0, min_probability=0.5, sources=("prompt",)),
    )
    path = tmp_path / "config.json"
    path.write_text(settings.to_json())
    assert SpeculationOptions(config_file=path).config() == settings
    given = SpeculationOptions(config_file=path, lane="stream", suffix_max_match=3).config()
    suffix = replace(settings.suffix, max_match=3)
    assert given == replace(settings, lane="stream", suffix=suffix)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xff", "cannot be read"),
        (b"{", "not JSON"),
        (b"[]", "cannot be used"),
        (b'{"lanes": "stream"}', "Did you mean 'lane'?"),
        (b'{"suffix": {"factor": 0}}', "suffix.factor is 0"),
        (b'{"max_draft_tokens": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_unusable_config_file(data: bytes, expected: str, tmp_path: Path) -> None:
    """A traceback, or a message that names neither the file nor what is wrong in it."""
    path = tmp_path / "config.json"
    path.write_bytes(data)
    result = run("trace", "--config", path)
    assert result.exit_code == 2
    assert expected in result.stderr and f"--config {path}" in result.stderr


@pytest.mark.parametrize("damage", ["weights", "shapes", "tokenizer"])
def test_damaged_model(damage: str, tmp_path: Path) -> None:
    """A traceback of whatever reads the file, in place of a message."""
    directory = save_thinking_model(tmp_path)
    if damage == "weights":
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "shapes":
        path = directory / "config.json"
        path.write_text(path.read_text().replace('"hidden_size": 32', '"hidden_size": 64'))
    else:
        (directory / "tokenizer.json").write_text("{}")
    result = run("check", directory)
    assert result.exit_code == 2
    assert f"The model {str(directory)!r} cannot be loaded" in result.stderr


def test_demo_says_no(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict that is always yes."""
    alter_last_token(monkeypatch, "demo")
    result = run("demo", "-m", model_dir, "-p", PROMPT, *SHORT)
    assert result.exit_code == 1
    assert "identical output: no, 0 of 1" in result.stdout
    assert f"part at token {N_TOKENS - 1}" in result.stdout


@pytest.mark.parametrize("sampling", [[], ["-t", "0.8", "--top-p", "0.9"]])
def test_demo_with_the_model_inside(sampling: Sequence[str]) -> None:
    """The first command of a newcomer: the tiny reasoner missing from the package or broken."""
    result = run("demo", "--runs", 1, "--json", "-n", 160, *sampling)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["identical"] and report["threads"] in (1, 2)
    assert report["generation"] == (
        "sampled (temperature 0.8, top-p 0.9, seed 0)" if sampling else "greedy"
    )


def test_check(model_dir: Path) -> None:
    """A lane or a way to select tokens that the check leaves out."""
    result = run("check", model_dir, "--tokens", 48, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["supported"] is True
    findings = {finding["name"]: finding for finding in report["findings"]}
    lanes = ["lane lockstep", "lane sequential", "lane stream"]
    others = ["markers", "cache", "probe", "speculation", "sampling, seeded"]
    assert sorted(findings) == sorted([*others, *lanes])
    assert all(finding["passed"] for finding in findings.values())
    assert findings["cache"]["text"] == "2 DynamicLayer"
    assert "'</think>'" in findings["markers"]["text"]
    assert all("48 tokens the same" in findings[lane]["text"] for lane in lanes)


def test_check_passes_over_a_lane_that_the_model_cannot_use(tmp_path: Path) -> None:
    """A model that is accelerated, reported as wrong input because one lane is not for it."""
    result = run("check", save_model_without_stream(tmp_path), "--tokens", 48, "--json")
    assert result.exit_code == 0, result.output
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["lane stream"]["passed"] is None
    assert "its rotary positions" in findings["lane stream"]["text"]
    assert findings["lane sequential"]["passed"] and findings["sampling, seeded"]["passed"]


def test_check_judges_no_other_note(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A remark about the drafts that counts as a failed probe."""
    original = ssr_hf.cli.running.run_speculative

    def remarking(*args: Any) -> Any:
        outcome = original(*args)
        return replace(outcome, speculation=replace(outcome.stats, notes=("no draft was taken",)))

    monkeypatch.setattr("ssr_hf.cli.check.run_speculative", remarking)
    result = run("check", model_dir, "--tokens", 32, "--json")
    assert result.exit_code == 0, result.output
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["probe"]["passed"] is True
    assert findings["note"] == {"name": "note", "passed": None, "text": "no draft was taken"}


def test_check_tells_a_failed_probe(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is only decoded plainly, reported as accelerated."""
    refusal = Unsupported("it gives other logits", "Use plain generate")
    monkeypatch.setattr("ssr_hf.cache.support._probe", lambda *_: refusal)
    result = run("check", model_dir, "--tokens", 32, "--json")
    assert result.exit_code == 1
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["probe"]["passed"] is False
    assert "it gives other logits" in findings["probe"]["text"]
    assert "speculation" not in findings


def test_check_of_nothing_is_no_check() -> None:
    """A green verdict on a text that ended before anything was drafted or proposed."""
    nothing = SimpleNamespace(stats=SpeculationStats(), token_ids=[1, 2])
    finding = _tried(nothing)
    assert finding.passed is False
    assert "ended after 2 tokens" in finding.text


def test_check_takes_gguf(tmp_path: Path) -> None:
    """A GGUF file that is taken for a directory or a Hub id."""
    result = run("check", save_gguf(tmp_path / "tiny.gguf"), "--tokens", 32)
    assert result.exit_code == 0, result.output
    assert "accelerated, output unchanged" in result.stdout
    assert "\x1b" not in result.stdout


def test_check_finds_a_difference(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit code that does not say what was found."""
    alter_last_token(monkeypatch, "check")
    result = run("check", model_dir, "--tokens", 32, "--json")
    assert result.exit_code == 1
    findings = {f["name"]: f for f in json.loads(result.stdout)["findings"]}
    assert findings["lane stream"]["passed"] is False
    assert "part at token 31" in findings["lane stream"]["text"]


def test_check_of_an_unsupported_model(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is refused reported as wrong input, or as supported."""

    def refuse(*_: Any) -> Any:
        raise ssr_hf.UnsupportedError("its cache cannot be rolled back")

    monkeypatch.setattr("ssr_hf.cli.check.run_speculative", refuse)
    result = run("check", model_dir, "--tokens", 32)
    assert result.exit_code == 1
    assert "its cache cannot be rolled back" in result.stdout
    assert "not supported" in result.stdout


def test_trace(model_dir: Path, tmp_path: Path) -> None:
    """Spans that miss rounds or overlap, and a file that differs from what is printed."""
    path = tmp_path / "trace.json"
    result = run("trace", "-m", model_dir, "-p", PROMPT, *SHORT, "--json", "-o", path)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["spans"] and json.loads(path.read_text())["prompt"] == PROMPT
    spans = [span for span in record["spans"] if span["kind"] != "draft"]
    drafts = [span for span in record["spans"] if span["kind"] == "draft"]
    assert sum(span["tokens"] for span in spans) == N_TOKENS
    assert sum(span["rounds"] for span in spans) == record["speculation"]["forwards"]
    ends = [span["start"] + span["seconds"] for span in spans]
    assert all(end <= later["start"] + 1e-3 for end, later in zip(ends, spans[1:], strict=False))
    assert len(drafts) == len(record["speculation"]["drafts"]) >= 1
    assert all(0 < span["start"] <= record["answer_start"] for span in drafts)


def test_trace_chart(model_dir: Path) -> None:
    """A chart that leaves out a kind of work, or escape codes in a pipe."""
    result = run("trace", "-m", model_dir, "-p", PROMPT, *SHORT)
    assert result.exit_code == 0, result.output
    rows = ("prompt", "thinking", "draft", "verification", "suffix", "decoding")
    assert all(f"\n  {row}" in result.stdout for row in rows)
    assert "answer" in result.stdout and "\x1b" not in result.stdout


def test_trace_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError in the face of a user, after a long generation."""
    monkeypatch.setattr("ssr_hf.cli.plot.find_spec", lambda name: None)
    result = run("trace", "--plot", "a.png")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_trace_picture(model_dir: Path, tmp_path: Path, name: str, magic: bytes) -> None:
    """A picture that is not written, or in another format than its name says."""
    result = run("trace", "-m", model_dir, "-p", PROMPT, *SHORT, "--plot", tmp_path / name)
    assert result.exit_code == 0, result.output
    assert (tmp_path / name).read_bytes().startswith(magic)
