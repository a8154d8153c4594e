"""The fuzz test: a few dozen random calls of `generate`; `scripts/fuzz.py` runs it for hours."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from fuzz_cases import draw_case
from fuzz_runs import check
from typer.testing import CliRunner

from ssr_hf.commit import Committer
from ssr_hf.records import Candidates, Verdict

SCRIPT = Path(__file__).parent.parent / "scripts" / "fuzz.py"
SEED = 2026


@pytest.mark.parametrize("number", range(40))
def test_random_call_equals_plain_generate(number: int) -> None:
    """Anything that no other test combines: the message has the command that repeats the case."""
    case = draw_case(SEED, number)
    report = check(case)
    command = f"python scripts/fuzz.py --seed {SEED} --case {number}"
    assert report.verdict in ("same", "both failed"), (
        f"{command}\n{report.reason}\n{case.describe()}"
    )


def test_a_fault_is_found() -> None:
    """A comparison that passes whatever happens: here every fifth round has wrong logits."""
    honest = Committer.commit
    n_rounds = 0

    def commit(self: Committer, target_logits: torch.Tensor, candidates: Candidates) -> Verdict:
        nonlocal n_rounds
        n_rounds += 1
        if n_rounds % 5 == 0:
            target_logits = target_logits.roll(1, dims=-1)
        return honest(self, target_logits, candidates)

    with mock.patch.object(Committer, "commit", commit):
        assert any(check(draw_case(SEED, number)).verdict == "different" for number in range(6))


def test_a_case_is_drawn_again_from_its_number() -> None:
    """A reproduction command that repeats another case."""
    assert draw_case(SEED, 3).describe() == draw_case(SEED, 3).describe()


def test_the_script_ends_with_a_summary() -> None:
    """The script rots: it is not part of the package."""
    spec = importlib.util.spec_from_file_location("fuzz", SCRIPT)
    assert spec is not None and spec.loader is not None, f"no module at {SCRIPT}"
    script = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [*sys.path]):
        spec.loader.exec_module(script)
    result = CliRunner().invoke(script.app, ["--seed", str(SEED), "--case", "0"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["failed"] == []
    assert summary["same"] == 1
