"""Measure what the suffix index costs: microseconds and bytes per token, at several lengths.

    python scripts/bench_suffix_index.py
    python scripts/bench_suffix_index.py --lengths 1000,100000 --max-match 4

Appending is measured per appended token, a lookup per examined or returned token, in CPU time, best
of the repetitions. Memory is what Python allocated for the index, tokens excluded. The texts are
the extremes that matter: `edited copies` repeats passages with changes, like an answer and its
drafts; `random words` never repeats a phrase, the most states per new token of real text; `two
symbols` branches at every depth, the most memory there is; `one symbol` has the longest chain of
suffixes, the most work per token. The last line on stdout is one JSON document.
"""

from __future__ import annotations

import json
import platform
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ssr_hf.suffix_index import SuffixIndex

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

SOURCE = "answer"
N_LOOKUPS = 2000


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one text at one length."""

    text: str
    n_tokens: int
    append_us: float
    lookup_us: float
    bytes_per_token: float


def edited_copies(n: int, rng: random.Random) -> list[int]:
    """Passages of 500 tokens, each written three times with one token in 20 changed."""
    text: list[int] = []
    while len(text) < n:
        passage = [int(rng.paretovariate(0.7)) % 30_000 for _ in range(500)]
        for _ in range(3):
            text.extend(t if rng.random() < 0.95 else rng.randrange(30_000) for t in passage)
    return text[:n]


TEXTS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "edited copies": edited_copies,
    "random words": lambda n, rng: [int(rng.paretovariate(0.7)) % 30_000 for _ in range(n)],
    "two symbols": lambda n, rng: [rng.randrange(2) for _ in range(n)],
    "one symbol": lambda n, rng: [1] * n,
}


def time_append(text: list[int], max_match: int) -> float:
    """Seconds per appended token."""
    index = SuffixIndex(max_match=max_match)
    start = time.process_time()
    index.append(SOURCE, text)
    return (time.process_time() - start) / len(text)


def time_lookup(index: SuffixIndex, text: list[int], rng: random.Random) -> float:
    """Seconds per token that lookups read or return."""
    ends = [rng.randrange(index.max_match, len(text)) for _ in range(N_LOOKUPS)]
    contexts = [text[end - index.max_match : end] for end in ends]
    n_tokens = N_LOOKUPS * index.max_match
    start = time.process_time()
    for context in contexts:
        span = index.propose(context, max_tokens=64, factor=8)
        n_tokens += len(span.token_ids) if span else 0
    return (time.process_time() - start) / n_tokens


def measure(name: str, n_tokens: int, max_match: int, repetitions: int) -> Cost:
    """All costs of one text at one length."""
    rng = random.Random(0)
    text = TEXTS[name](n_tokens, rng)
    append_s = min(time_append(text, max_match) for _ in range(repetitions))
    tracemalloc.start()
    index = SuffixIndex(max_match=max_match)
    index.append(SOURCE, text)
    n_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    lookup_s = min(time_lookup(index, text, rng) for _ in range(repetitions))
    return Cost(name, n_tokens, append_s * 1e6, lookup_s * 1e6, n_bytes / n_tokens)


@app.command()
def main(
    lengths: Annotated[str, typer.Option(help="Lengths in tokens.")] = "1000,10000,100000",
    max_match: Annotated[int, typer.Option(help="Longest match, in tokens.")] = 16,
    repetitions: Annotated[int, typer.Option(help="Runs, of which the best counts.")] = 3,
) -> None:
    """Measure the suffix index."""
    table = Table(title=f"suffix index, max_match {max_match}", title_justify="left")
    table.add_column("text")
    for column in ("tokens", "append us / token", "lookup us / token", "bytes / token"):
        table.add_column(column, justify="right")
    costs = [
        measure(name, int(length), max_match, repetitions)
        for name in TEXTS
        for length in lengths.split(",")
    ]
    for cost in costs:
        table.add_row(
            cost.text,
            f"{cost.n_tokens:,}",
            f"{cost.append_us:.2f}",
            f"{cost.lookup_us:.2f}",
            f"{cost.bytes_per_token:.0f}",
        )
    Console(width=100).print(table)
    rows = [asdict(cost) for cost in costs]
    python = platform.python_version()
    print(json.dumps({"max_match": max_match, "python": python, "rows": rows}))


if __name__ == "__main__":
    app()
