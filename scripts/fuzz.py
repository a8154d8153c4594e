"""Random calls of `generate`, plain and self-speculative: all that a caller can see must be equal.

    python scripts/fuzz.py --minutes 60 --seed 7
    python scripts/fuzz.py --seed 7 --case 1234        # one case again

A case draws a tiny random model of the test suite, a prompt, padding or a cached prefix, logits
processors, stopping rules, outputs, a streamer, greedy or sampled selection, and the settings of
self-speculation (`tests/fuzz_cases.py`). Plain `generate` and self-speculation run from the same
seed; tokens, scores, logits, hidden states, caches, streamed events, what user code was shown,
exceptions and the state of the random generator are compared (`tests/fuzz_runs.py`).

Every failure prints the command that repeats it; the last line on stdout is one JSON document. A
case is a function of `--seed` and its number, but `adaptive=True` and the stream lane follow the
clock as well. Exit code 1 if anything differs. A *tie*, where two tokens are closer to each other
than the rounding of a forward, is counted and is no failure.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Annotated

import torch
import typer

# Models, cases and comparisons are those of the test suite.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fuzz_cases import draw_case
from fuzz_runs import check

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(min=0, help="Stop after this long.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the series of cases.")] = 0,
    case: Annotated[int | None, typer.Option(help="Only this case of the series.")] = None,
    first: Annotated[int, typer.Option(min=0, help="Where the series starts.")] = 0,
    family: Annotated[
        str | None, typer.Option(help="Only this model of tests/families.py.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Compare plain and self-speculative generation on random calls."""
    torch.set_num_threads(threads)
    deadline = time.monotonic() + 60 * minutes
    tally: Counter[str] = Counter()
    failed: list[str] = []
    # An interrupted run still tells what it found.
    with contextlib.suppress(KeyboardInterrupt):
        for number in count(first) if case is None else (case,):
            if case is None and time.monotonic() > deadline:
                break
            drawn = draw_case(seed, number, family)
            report = check(drawn)
            tally.update({report.verdict: 1, drawn.family: 1, **report.figures})
            command = _command(seed, number, family)
            if report.verdict in ("different", "tie") or case is not None:
                told = (f"{report.verdict}: {report.reason}", drawn.describe(), command, "")
                print(*told, sep="\n", flush=True)
            if report.verdict == "different":
                failed.append(command)
    print(json.dumps({"seed": seed, **tally, "failed": failed}))
    if failed:
        raise typer.Exit(1)


def _command(seed: int, number: int, family: str | None) -> str:
    command = f"python scripts/fuzz.py --seed {seed} --case {number}"
    return command if family is None else f"{command} --family {family}"


if __name__ == "__main__":
    app()
