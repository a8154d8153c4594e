"""The GPU script: what it says without a GPU, and all its parts with the CPU as the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from transformers import Qwen3Config
from typer.testing import CliRunner

from ssr_hf.cache.support import Unsupported
from ssr_hf.lanes import LANE_TYPES, DraftWriter, stream
from ssr_hf.lanes.base import write_draft

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_check  # noqa: E402
import gpu_report  # noqa: E402
import lane_checks  # noqa: E402
import lane_timing  # noqa: E402
import scripted_text  # noqa: E402

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    **gpu_check.QWEN3,
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LENGTHS = scripted_text.Lengths(prompt=8, thinking=30, draft_budget=6, answer=20)
PLAN = gpu_check.Plan(
    families=("full",),
    seeds=1,
    check_tokens=24,
    length=32,
    steps=12,
    blocks=(1, 8),
    repeats=1,
    generation=LENGTHS,
    runs=(("lockstep", 0.0), ("lockstep", 1.0), ("stream", 0.5)),
)


@pytest.fixture(scope="module")
def model():
    return lane_checks.build(Qwen3Config(**SHAPE), CPU, torch.float32)


def test_without_a_device_it_says_so() -> None:
    """A script that fails, or measures a CPU, where there is no CUDA device."""
    run = subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu_check.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "no CUDA device\n"), run.stderr


def test_unknown_shape_is_named() -> None:
    """A misspelt shape that fails after minutes of checks."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        result = CliRunner().invoke(gpu_check.app, ["--shape", "6B"])
    assert result.exit_code == 2
    assert "0.6B, 4B" in result.output


def test_whole_run_on_a_cpu() -> None:
    """A part that no machine without a GPU would ever have run."""
    before = torch.backends.cudnn.allow_tf32
    try:
        result = gpu_check.run(PLAN, {"tiny": SHAPE}, CPU, torch.float32, "sdpa")
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert result["passed"]
    assert json.loads(json.dumps(result))["device"] == "cpu"
    names = [check["name"] for check in result["checks"]]
    assert len(names) == len(set(names)) == 2 * len(LANE_TYPES) + 4 + len(PLAN.runs)
    tiny = result["models"]["tiny"]
    assert set(tiny["lanes"]) == set(LANE_TYPES)
    assert tiny["lanes"]["sequential"]["step_ms"] is None
    assert set(tiny["verification_ms"]) == set(PLAN.blocks)
    assert [row["lane"] for row in tiny["generations"]] == [
        "plain",
        "lockstep",
        "lockstep",
        "stream",
    ]
    console = Console(record=True, width=120)
    gpu_report.print_tables(result, console)
    text = console.export_text()
    for expected in (*LANE_TYPES, "checks hold", "MB/1k", "verification", "speed-up"):
        assert expected in text


@pytest.mark.parametrize("family", lane_checks.FAMILIES)
def test_every_family_can_be_checked(family: str) -> None:
    """A family whose text is too dull to show a difference, or whose marker is never found."""
    small = lane_checks.build_small(family, CPU)
    checks = [
        *lane_checks.check_lossless(family, small, ("lockstep",), 32, seed=0),
        *lane_checks.check_stream(family, small, 24, 16, seed=0),
    ]
    assert all(check.passed for check in checks), checks
    session = lane_timing.Session(small, 24)
    for _ in range(16):
        session.round()
    assert len(set(session.new_ids)) > 8


def test_stream_check_fails_where_a_draft_differs() -> None:
    """A check that cannot fail: here the last token of each draft is another one."""
    small = lane_checks.build_small("full", CPU)

    def spoil(child: Any, writer: DraftWriter, *arguments: Any, **named: Any) -> None:
        write_draft(child, writer, *arguments, **named)
        writer.sequence.token_ids[-1] ^= 1

    with mock.patch.object(stream, "write_draft", spoil):
        checks = list(lane_checks.check_stream("full", small, 24, 24, seed=0))
    assert not all(check.passed for check in checks)


def test_lossless_check_fails_where_a_token_differs() -> None:
    """A check that cannot fail: here the last token is another one."""
    small = lane_checks.build_small("full", CPU)
    new_tokens = lane_checks.new_tokens

    def other(*arguments: Any, **named: Any) -> list[int]:
        ids = new_tokens(*arguments, **named)
        return [*ids[:-1], ids[-1] + 1] if "self_speculation" in named else ids

    with mock.patch.object(lane_checks, "new_tokens", other):
        checks = list(lane_checks.check_lossless("full", small, ("sequential",), 24, seed=0))
    assert [check.detail for check in checks] == ["23 of 24 tokens are the same"] * 2


@pytest.mark.parametrize(("probability", "accepted"), [(0.0, 0), (1.0, LENGTHS.answer - 1)])
def test_scripted_drafts_are_accepted_as_scripted(model, probability: float, accepted: int) -> None:
    """Figures for one acceptance that were measured at another."""
    runs = [("sequential", probability)]
    rows = scripted_text.measure_generations(model, LENGTHS, runs, time.perf_counter() + 60)
    assert rows[1]["accepted_prefix"] == accepted
    assert rows[1]["draft_tokens"] == LENGTHS.answer
    assert rows[1]["same_text"]
    assert (rows[1]["rounds"] < sum((LENGTHS.thinking, 1, LENGTHS.answer))) == (accepted > 0)


def test_no_generation_begins_after_the_deadline(model) -> None:
    """A slow machine on which the script runs into somebody's time limit and prints nothing."""
    rows = scripted_text.measure_generations(model, LENGTHS, [("lockstep", 0.5)], deadline=0.0)
    assert "skipped" in rows[1]
    assert "speedup" not in rows[1]


@pytest.mark.parametrize("lane", ["lockstep", "stream"])
@pytest.mark.parametrize(("length", "n_tokens"), [(20, 10), (400, 60), (560, 40)])
def test_memory_of_a_draft_is_within_its_formula(
    model, lane: str, length: int, n_tokens: int
) -> None:
    """A formula in the documentation that the cache does not keep to."""
    kv_bytes = lane_timing.kv_bytes_per_token(model)
    assert kv_bytes == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dimensions, bytes
    plain = lane_timing.measure_peak(model, None, length, n_tokens)
    extra = lane_timing.measure_peak(model, LANE_TYPES[lane], length, n_tokens) - plain
    text = length + n_tokens
    assert 0.8 * kv_bytes * text < extra <= lane_timing.row_bytes(kv_bytes, text)


def test_overhead_is_relative_to_plain_thinking() -> None:
    """A percentage of something else than what the heading says."""
    cost = lane_timing.LaneCost(step_ms=11.0, draft_ms_per_token=11.0, extra_ms_per_token=1.0)
    assert cost.overhead(plain_ms=10.0, draft_tokens=500, thinking_tokens=2000) == 2.5


@pytest.mark.parametrize("is_tied", [True, False])
def test_bandwidth_counts_the_weights_that_a_step_reads(is_tied: bool) -> None:
    """The embedding table is read by rows, unless it is the output layer, too."""
    config = Qwen3Config(**{**SHAPE, "tie_word_embeddings": is_tied})
    own = lane_checks.build(config, CPU, torch.float32)
    table = own.get_input_embeddings().weight.nbytes
    body = sum(parameter.nbytes for parameter in own.model.parameters()) - table
    found = gpu_check.bandwidth(own, plain_ms=1.0)
    assert found["weights_gb"] == pytest.approx((body + table) / 1e9)
    assert found["gb_per_second"] == pytest.approx(1e3 * found["weights_gb"])
    assert found["ceiling_ms"] is None


def test_a_refused_lane_is_reported_and_not_run() -> None:
    """Kernels that are not safe in two threads: the script would crash, or claim a check."""
    refusal = Unsupported("because", "lane='lockstep'")
    with mock.patch.object(LANE_TYPES["stream"], "support", return_value=refusal):
        checks = list(gpu_check.run_checks(PLAN, CPU))
    assert all(check.passed for check in checks)
    about_stream = [check for check in checks if "stream" in check.name]
    assert [check.detail for check in about_stream] == ["refused: because"]
