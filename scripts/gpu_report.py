"""The result of `gpu_check.py` as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_tables(result: dict[str, Any], console: Console) -> None:
    """The result for people."""
    checks = result["checks"]
    console.print(f"{result['device']}, {result['versions']}")
    console.print(f"{sum(check['passed'] for check in checks)} of {len(checks)} checks hold")
    for check in checks:
        if check["detail"]:
            state = "" if check["passed"] else "FAILED "
            console.print(f"  {state}{check['name']}: {check['detail']}")
    for name, model in result["models"].items():
        title = (
            f"{name}, {result['dtype']}, {model['attention']}, {result['plan']['length']} tokens"
        )
        console.print(steps_table(title, model, result["overhead_refers_to"]["thinking_tokens"]))
        console.print(verification_table(model))
        console.print(generations_table(model))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table


def steps_table(title: str, model: dict[str, Any], thinking_tokens: int) -> Table:
    """Steps beside an open draft, what a draft costs and what memory it takes."""
    table = _table(
        title, "lane", "step ms", "ms/draft token", "extra ms", f"% of {thinking_tokens}", "MB/1k"
    )
    speed, memory = model["bandwidth"], model["memory"]
    for name, cost in model["lanes"].items():
        extra = memory.get(f"{name}_mb_per_1k")
        table.add_row(
            name,
            "waits" if cost["step_ms"] is None else f"{cost['step_ms']:.2f}",
            f"{cost['draft_ms_per_token']:.2f}",
            f"{cost['extra_ms_per_token']:.2f}",
            f"{cost['overhead_percent']:.1f}",
            "-" if extra is None else f"{extra:.0f}",
        )
    ceiling = speed["ceiling_ms"]
    table.caption = (
        f"plain step {model['plain_ms']:.2f} ms = {speed['gb_per_second']:.0f} GB/s of weights"
        + ("" if ceiling is None else f", bandwidth ceiling {ceiling:.2f} ms")
        + f"; memory by formula at most {memory['formula_mb_per_1k']:.0f} MB/1k tokens"
    )
    return table


def verification_table(model: dict[str, Any]) -> Table:
    """Verification by block length."""
    table = _table("verification", "tokens", "ms", "plain steps")
    for n_tokens, own_ms in model["verification_ms"].items():
        table.add_row(str(n_tokens), f"{own_ms:.2f}", f"{own_ms / model['plain_ms']:.2f}")
    return table


def generations_table(model: dict[str, Any]) -> Table:
    """Whole generations."""
    table = _table("scripted drafts", "lane", "p", "seconds", "speed-up", "rounds", "answer s")
    for row in model["generations"]:
        cells = [row["lane"], "-" if row["p"] is None else f"{row['p']:.1f}"]
        if "skipped" in row:
            cells += [row["skipped"]]
        else:
            cells += [f"{row['seconds']:.2f}", f"{row['speedup']:.2f}x"]
            cells += [str(row.get("rounds", "-"))]
            cells += [f"{row['answer_seconds']:.2f}" if "answer_seconds" in row else "-"]
        table.add_row(*cells)
    return table
