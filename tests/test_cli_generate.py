"""`ssr-hf generate`: text and JSONL, bad lines, resuming, and Ctrl-C in a real process."""

from __future__ import annotations

import importlib
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_models import CONTEXT, Oracle, save_thinking_model
from test_cli import BUDGET, N_TOKENS, PROMPT, SHORT, run
from typer.testing import Result

PROMPTS = {"a": "One.", "b": "Two.", "c": "Three."}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_thinking_model(tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Oracle:
    return Oracle(model_dir)


def write_lines(path: Path, *lines: object) -> Path:
    """A JSONL file; text is written as it is."""
    rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every record, each on a whole line of its own."""
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "in.jsonl", *({"id": key, "prompt": text} for key, text in PROMPTS.items())
    )


@pytest.mark.parametrize("greedy", [[], ["-t", 0]])
def test_text_equals_plain_generate(model_dir: Path, oracle: Oracle, greedy: list[object]) -> None:
    """Text changed on its way to a pipe, statistics mixed into it, escape codes, sampling at 0."""
    result = run("generate", "-m", model_dir, "-p", PROMPT, *SHORT, *greedy)
    assert result.exit_code == 0, result.output
    assert result.stdout == oracle.text(PROMPT, N_TOKENS, BUDGET, do_sample=False) + "\n"
    assert f"{N_TOKENS} tokens" in result.stderr and "suffix matches" in result.stderr
    assert "\x1b" not in result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_standard_output_that_takes_nothing() -> None:
    """A traceback, and the exit code of a negative answer."""
    command = [sys.executable, "-c", "from ssr_hf.cli import main; main()", "--version"]
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("error  standard output cannot be written: ")
    assert len(run.stderr.splitlines()) == 1


def test_sampled_text_equals_plain_generate(model_dir: Path, oracle: Oracle) -> None:
    """A seed set at another moment than plain generate has it, or sampling options dropped."""
    import torch

    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
    torch.manual_seed(11)
    expected = oracle.text(PROMPT, N_TOKENS, BUDGET, **sampling)
    options = ["-t", 0.7, "--top-p", 0.9, "--top-k", 20, "--seed", 11]
    result = run("generate", "-m", model_dir, "-p", PROMPT, *SHORT, *options)
    assert result.stdout == expected + "\n"
    assert expected != oracle.text(PROMPT, N_TOKENS, BUDGET, do_sample=False)


def test_prompt_from_a_pipe(model_dir: Path, oracle: Oracle) -> None:
    """Standard input that is not read."""
    result = run("generate", "-m", model_dir, "--prompt-file", "-", *SHORT, stdin=PROMPT)
    assert result.stdout == oracle.text(PROMPT, N_TOKENS, BUDGET, do_sample=False) + "\n"


def test_prompt_from_a_pipe_is_utf8(
    model_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt read in the locale's encoding, line breaks of Windows, bytes that are no text."""
    prompt = "Zähle\ndie Enten."

    def piped(data: bytes) -> Result:
        stdin = io.TextIOWrapper(io.BytesIO(data), encoding="latin-1")
        monkeypatch.setattr("ssr_hf.cli.prompts.sys", SimpleNamespace(stdin=stdin))
        return run("generate", "-m", model_dir, "--prompt-file", "-", *SHORT)

    expected = oracle.text(prompt, N_TOKENS, BUDGET, do_sample=False) + "\n"
    assert piped(prompt.encode()).stdout == expected
    assert piped(prompt.replace("\n", "\r\n").encode()).stdout == expected
    result = piped(b"\xff")
    assert result.exit_code == 2 and "--prompt-file - cannot be read" in result.stderr


def test_raw_prompt(model_dir: Path, oracle: Oracle) -> None:
    """A chat template that is applied where it was declined."""
    result = run("generate", "-m", model_dir, "-p", PROMPT, "--raw", "-n", 8, "--json")
    ids = oracle.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    output = oracle.model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    expected = oracle.tokenizer.decode(output, skip_special_tokens=True)
    assert json.loads(result.stdout)["text"] == expected


def test_record_of_a_prompt(model_dir: Path, oracle: Oracle, tmp_path: Path) -> None:
    """Thinking and answer that overlap or lose tokens, and a record that replaces older ones."""
    path = tmp_path / "out.jsonl"
    arguments = ["generate", "-m", model_dir, "-p", PROMPT, *SHORT, "--json"]
    record = json.loads(run(*arguments).stdout)
    ids = oracle.new_tokens(PROMPT, N_TOKENS, BUDGET, do_sample=False)
    end = oracle.tokenizer.convert_tokens_to_ids("</think>")
    at = ids.index(end)
    decode = oracle.tokenizer.decode
    assert record["thinking"] == decode(ids[:at], skip_special_tokens=True)
    assert record["answer"] == decode(ids[at + 1 :], skip_special_tokens=True)
    assert record["prompt"] == PROMPT
    statistics = record["statistics"]
    assert statistics["thinking_tokens"] == at + 1 and statistics["new_tokens"] == N_TOKENS
    for _ in range(2):
        assert run(*arguments, "-o", path).exit_code == 0
    assert [entry["id"] for entry in read_records(path)] == [1, 2]


def test_record_of_a_prompt_has_an_id_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    """A second record with an id that is there already, or a repair that nobody is told of."""
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": 2}\n{"id": 1}\n{"id": "a"}\n{"id": 4}\n{"id": 5, "te')
    result = run("generate", "-m", model_dir, "-p", PROMPT, *SHORT, "--json", "-o", path)
    assert result.exit_code == 0
    assert [entry["id"] for entry in read_records(path)] == [2, 1, "a", 4, 3]
    assert "incomplete last line" in result.stderr


def test_text_file_is_appended_to(model_dir: Path, oracle: Oracle, tmp_path: Path) -> None:
    """A file that loses what it held."""
    path = tmp_path / "out.txt"
    path.write_text("before\n")
    result = run("generate", "-m", model_dir, "-p", PROMPT, *SHORT, "-o", path)
    assert result.stdout == ""
    expected = oracle.text(PROMPT, N_TOKENS, BUDGET, do_sample=False)
    assert path.read_bytes().decode() == f"before\n{expected}\n"


def test_records_and_bad_lines(model_dir: Path, oracle: Oracle, tmp_path: Path) -> None:
    """A bad line that is passed over in silence, reported with a wrong number, or loses others."""
    source = write_lines(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": PROMPTS["a"], "topic": "ducks"},
        '{"id": "broken", "prompt": ',
        "",
        {"id": "b", "messages": [{"role": "user", "content": PROMPTS["b"]}]},
        {"id": "a", "prompt": "the same id"},
        {"id": "empty", "prompt": " "},
        {"id": "long", "prompt": "x" * CONTEXT},
        ["a", "list"],
        {"id": "both", "prompt": "a", "messages": []},
        {"id": "taken", "prompt": "a", "text": "b"},
        {"id": 1.5, "prompt": "a"},
        {"prompt": PROMPTS["c"]},
        {"id": 14, "prompt": "a"},
        {"prompt": "a"},
    )
    result = run("generate", "-m", model_dir, "-i", source, *SHORT)
    assert result.exit_code == 2
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["id"] for record in records] == ["a", "b", 12, 14]
    texts = [oracle.text(text, N_TOKENS, BUDGET, do_sample=False) for text in PROMPTS.values()]
    assert [record["text"] for record in records[:3]] == texts
    assert records[0]["topic"] == "ducks"
    reported = [line for line in result.stderr.splitlines() if line.startswith("line ")]
    numbers = sorted(int(line.split()[1]) for line in reported)
    assert numbers == [2, 5, 6, 7, 8, 9, 10, 11, 14]
    assert "line 5  the id 'a' is taken by line 1" in reported
    assert "line 14  the id 14 (the line number, as none is given) is taken by" in result.stderr
    assert "9 lines could not be used" in result.stderr


def test_lines_that_cannot_be_written_again(tmp_path: Path, model_dir: Path) -> None:
    """A traceback from one line, after which all others are lost."""
    source = write_lines(
        tmp_path / "in.jsonl",
        r'{"id": 1, "prompt": "\ud800"}',
        r'{"id": 2, "prompt": "a", "topic": "\udfff"}',
        '{"id": %s, "prompt": "a"}' % ("9" * 5000),
        '{"prompt": ' + "[" * 100_000,
        {"id": "a", "prompt": PROMPTS["a"]},
    )
    result = run("generate", "-m", model_dir, "-i", source, *SHORT)
    assert result.exit_code == 2
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["a"]
    assert r"line 1  The text holds '\ud800'" in result.stderr
    assert "line 3  cannot be read as JSON" in result.stderr
    assert "4 lines could not be used" in result.stderr


def test_raw_messages(model_dir: Path, tmp_path: Path) -> None:
    """A chat template said to be missing where it was declined."""
    chat = {"id": "b", "messages": [{"role": "user", "content": PROMPTS["b"]}]}
    source = write_lines(tmp_path / "in.jsonl", chat)
    result = run("generate", "-m", model_dir, "-i", source, "--raw")
    assert result.exit_code == 2
    assert "--raw takes text" in result.stderr and "has no chat template" not in result.stderr


def test_resuming(model_dir: Path, source: Path, tmp_path: Path) -> None:
    """Records generated twice, left out, or written into a torn line."""
    path = tmp_path / "out.jsonl"
    arguments = ["generate", "-m", model_dir, "-i", source, "-o", path, *SHORT]
    assert run(*arguments).exit_code == 0
    whole = read_records(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:40])
    result = run(*arguments)
    assert result.exit_code == 0
    assert "incomplete last line" in result.stderr and "1 of 3 records" in result.stderr
    resumed = read_records(path)
    assert [record["id"] for record in resumed] == ["a", "b", "c"]
    assert [record["text"] for record in resumed] == [record["text"] for record in whole]
    before = path.read_bytes()
    assert run(*arguments).exit_code == 0
    assert path.read_bytes() == before


def test_resuming_after_a_missing_line_break(model_dir: Path, source: Path, tmp_path: Path) -> None:
    """Two records glued together on one line."""
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "a"}')
    assert run("generate", "-m", model_dir, "-i", source, "-o", path, *SHORT).exit_code == 0
    assert [record["id"] for record in read_records(path)] == ["a", "b", "c"]


def test_foreign_output_is_left_alone(source: Path, tmp_path: Path) -> None:
    """Records appended to somebody's notes."""
    path = tmp_path / "notes.txt"
    path.write_text("milk\nbread\n")
    result = run("generate", "-i", source, "-o", path)
    assert result.exit_code == 2 and "Line 1 of --output" in result.stderr
    assert path.read_text() == "milk\nbread\n"


def test_interrupt_between_records(
    model_dir: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C that loses finished records, or cannot be resumed from."""
    path = tmp_path / "out.jsonl"
    arguments = ["generate", "-m", model_dir, "-i", source, "-o", path, *SHORT]
    module = importlib.import_module("ssr_hf.cli.generate")
    original, calls = module.run_speculative, []

    def interrupted(*values: Any) -> Any:
        calls.append(values)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*values)

    with monkeypatch.context() as patched:
        patched.setattr(module, "run_speculative", interrupted)
        result = run(*arguments)
    assert result.exit_code == 130 and "1 of 3 records were written" in result.stderr
    assert [record["id"] for record in read_records(path)] == ["a"]
    assert run(*arguments).exit_code == 0
    assert [record["id"] for record in read_records(path)] == ["a", "b", "c"]


def test_ctrl_c_in_a_real_process(model_dir: Path, tmp_path: Path) -> None:
    """The console entry point, a real signal in the middle of a forward, and escape codes."""
    lines = ({"id": number, "prompt": f"Number {number}."} for number in range(500))
    source = write_lines(tmp_path / "in.jsonl", *lines)
    path = tmp_path / "out.jsonl"
    arguments = ["generate", "-m", model_dir, "-i", source, "-o", path, "-n", 64, "--threads", 1]
    process = subprocess.Popen(
        [sys.executable, "-c", "from ssr_hf.cli import main; main()", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore the signal, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and path.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == "" and "\x1b" not in stderr and "Traceback" not in stderr
    records = read_records(path)
    assert 1 <= len(records) < 500
    assert f"{len(records)} of 500 records were written" in stderr
