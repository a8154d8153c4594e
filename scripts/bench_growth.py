"""What the cache costs per token as the text grows, apart from attention itself.

`DynamicCache` copies all keys and values in every step; our layers append to buffers with room to
spare.
Both are fed the same states, one token at a time, behind texts of growing length; the figure is the
CPU time of one token in one layer, and of a whole step of a small random model.

    python scripts/bench_growth.py

Prints a table; the last line of standard output is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ssr_hf.cache.growth import amortise

LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000)
STEPS = 60
HEADS, HEAD_SIZE, LAYERS = 3, 64, 4


def filled_cache(model: LlamaForCausalLM, length: int, grows: bool) -> DynamicCache:
    """A cache that holds random states of `length` tokens."""
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        states = torch.randn(1, HEADS, length, HEAD_SIZE)
        layer.update(states, states.clone())
    if grows:
        amortise(cache)
        # The first update takes the buffers; their cost is shared by all tokens they have room for.
        append(cache)
    return cache


def append(cache: DynamicCache) -> None:
    """Adds one token to every layer."""
    states = torch.zeros(1, HEADS, 1, HEAD_SIZE)
    for layer in cache.layers:
        layer.update(states, states)


def microseconds(action: Callable[[], object]) -> float:
    """Median CPU time of one call."""
    times = []
    for _ in range(STEPS):
        start = time.process_time_ns()
        action()
        times.append((time.process_time_ns() - start) / 1e3)
    return statistics.median(times)


def measure(model: LlamaForCausalLM, length: int) -> dict[str, float]:
    row: dict[str, float] = {"length": length}
    for name, grows in (("dynamic", False), ("growing", True)):
        cache = filled_cache(model, length, grows)
        update = microseconds(lambda cache=cache: append(cache)) / LAYERS
        token = torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            step = microseconds(lambda cache=cache, token=token: model(token, cache=cache))
        row[f"{name}_update_us"] = round(update, 1)
        row[f"{name}_step_us"] = round(step, 1)
    return row


def main(threads: Annotated[int, typer.Option(help="CPU threads.")] = 1) -> None:
    """Measures every length."""
    torch.set_num_threads(threads)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=32_768,
    )
    model = LlamaForCausalLM(config).eval()
    rows = [measure(model, length) for length in LENGTHS]
    table = Table(
        "tokens",
        "update, DynamicCache",
        "update, growing",
        "step, DynamicCache",
        "step, growing",
        title=f"CPU us, {LAYERS} layers of {HEADS} x {HEAD_SIZE}, fp32",
    )
    for row in rows:
        table.add_row(
            *(
                f"{value:,.0f}"
                for value in (
                    row["length"],
                    row["dynamic_update_us"],
                    row["growing_update_us"],
                    row["dynamic_step_us"],
                    row["growing_step_us"],
                )
            )
        )
    Console().print(table)
    print(json.dumps({"threads": threads, "layers": LAYERS, "rows": rows}))


if __name__ == "__main__":
    typer.run(main)
