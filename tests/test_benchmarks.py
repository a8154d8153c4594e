"""What the benchmarks read and write; that they measure rightly, only their figures can show."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import bench_common
import bench_generate
import bench_specreason
import pytest
import typer
from typer.testing import CliRunner

import ssr_hf

pytest.importorskip("datasets", reason="needs the extra eval")

ROWS = [{"prompt": f"question {n}", "answer": n} for n in range(3)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets that stay behind on the machine."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    text = "\n".join(map(json.dumps, rows)).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_rows_of_a_file(tmp_path: Path, name: str) -> None:
    """Rows out of order, or more of them than were asked for."""
    source = write(tmp_path / name, ROWS)
    assert bench_common.read_rows(source, ["prompt"], 2) == ROWS[:2]
    assert bench_common.read_rows(source, ["prompt", "answer"], 9) == ROWS


def test_rows_of_a_data_set(tmp_path: Path) -> None:
    """Another split than the one that was asked for; the Hub's are read as folders are."""
    write(tmp_path / "data" / "train.jsonl", ROWS[:1])
    write(tmp_path / "data" / "test.jsonl", ROWS[1:])
    source = str(tmp_path / "data")
    assert bench_common.read_rows(source, ["prompt"], 9) == ROWS[1:]
    assert bench_common.read_rows(source, ["prompt"], 9, split="train") == ROWS[:1]


def test_missing_column_is_named(tmp_path: Path) -> None:
    """A KeyError after the model was loaded."""
    with pytest.raises(typer.BadParameter, match="no column 'text'; it has prompt, answer"):
        bench_common.read_rows(write(tmp_path / "rows.jsonl", ROWS), ["text"], 1)


def test_generate_on_a_file_saves_its_results(tmp_path: Path) -> None:
    """A saved document that lacks what was printed."""
    problem = ssr_hf.tiny_reasoner_prompts(1, seed=5)[0]
    source = write(tmp_path / "rows.jsonl", [{"question": problem.prompt}])
    app = typer.Typer()
    app.command()(bench_generate.main)
    arguments = ["--prompts", source, "--field", "question", "--max-new-tokens", "24"]
    result = CliRunner().invoke(app, [*arguments, "--save", str(tmp_path / "results")])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    (saved,) = (tmp_path / "results").glob("*.json")
    kept = json.loads(saved.read_text())
    assert printed.items() <= kept.items()
    assert printed["prompts"] == 1 and kept["_timestamp"]


def test_words_on_questions_of_a_file(tmp_path: Path) -> None:
    """Questions of one's own that are read and not asked."""
    rows = [{"question": "How many?", "answer": "Two and two.\n#### 4"}]
    arguments = ["words", "--base", "tiny", "--small", "tiny", "--thinking-budget", "8"]
    arguments += ["--questions", write(tmp_path / "rows.jsonl", rows), "--max-new-tokens", "16"]
    arguments += ["--thresholds", "0", "--scorers", "expected", "--threads", "1"]
    result = CliRunner().invoke(bench_specreason.app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert (document["prompts"], len(document["rows"])) == (1, 3)


@pytest.mark.parametrize(
    ("right", "answer", "same"),
    [
        ("Two and two.\n#### 1,004", "It is 3 + 1001 = 1004.", True),
        ("#### 4", "It is 4.5", False),
        ("#### 4", "I do not know.", False),
    ],
)
def test_the_last_number_counts(right: str, answer: str, same: bool) -> None:
    """Right answers counted as wrong for how they are written, or wrong ones as right."""
    assert bench_specreason._is_same_number(right, answer) is same
