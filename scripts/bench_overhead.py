"""What self-speculation costs where it can gain nothing.

Per-token CPU time of three ways to decode the same tokens on one thread, taken in turns: plain
generate; our loop with nothing to offer (`reuse="none"`); and our default with an anti-oracle,
whose spans are always wrong, so that only backing off can help. CPU time of one thread is used
because it does not move with what else the machine does.

    python scripts/bench_overhead.py                     # the embedded model
    python scripts/bench_overhead.py --model DIR/MODEL.gguf --tokens 100 --repeats 5

Prints a table; the last line of standard output is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from bench_common import load_model
from rich.console import Console
from rich.table import Table

import ssr_hf
from ssr_hf.candidates import SuffixCandidateGenerator
from ssr_hf.records import Candidates

PROMPT_TOKENS = 100
ANTI_ORACLE_TOKENS = 16


def cpu_seconds(model: Any, input_ids: torch.Tensor, n_tokens: int, setting: Any) -> float:
    """CPU seconds per token of one generation that no criterion ends early."""
    start = time.process_time()
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=n_tokens,
        min_new_tokens=None,
        eos_token_id=None,
        do_sample=False,
        self_speculation=setting,
    )
    assert output.shape[1] == input_ids.shape[1] + n_tokens, "a criterion ended the run early"
    return (time.process_time() - start) / n_tokens


def install_anti_oracle(wrong_id: int) -> None:
    """Makes every span a run of a token that the model does not write."""

    def propose(self: SuffixCandidateGenerator, context: Sequence[int], room: int) -> Candidates:
        n_tokens = min(room, ANTI_ORACLE_TOKENS)
        return Candidates((wrong_id,) * n_tokens, "suffix", chances=(0.9,) * n_tokens)

    SuffixCandidateGenerator.propose = propose  # type: ignore[method-assign]


def main(
    model: Annotated[str, typer.Option(help="Hub id, directory, GGUF file or 'tiny'.")] = "tiny",
    tokens: Annotated[int, typer.Option(help="Tokens per run.")] = 300,
    repeats: Annotated[int, typer.Option(help="Runs of each way.")] = 9,
) -> None:
    """Measures the three ways in turns."""
    torch.set_num_threads(1)
    loaded = load_model(model)
    loaded.generation_config.eos_token_id = None
    ssr_hf.enable(loaded)
    generator = torch.Generator().manual_seed(0)
    vocabulary = loaded.config.vocab_size
    input_ids = torch.randint(10, vocabulary, (1, PROMPT_TOKENS), generator=generator)
    plain_ids = loaded.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=tokens, do_sample=False
    )
    unused = next(i for i in range(vocabulary) if i not in set(plain_ids[0].tolist()))
    # A marker that never comes keeps the whole run in the thinking phase, where drafts are taken.
    common = {"end_of_thinking": [unused]}
    install_anti_oracle(unused)
    settings: dict[str, Any] = {
        "plain": None,
        "nothing to offer": {**common, "reuse": "none"},
        "anti-oracle": {**common, "draft_budget": tokens // 4},
    }
    for setting in settings.values():
        cpu_seconds(loaded, input_ids, tokens, setting)
    times: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(repeats):
        for name, setting in settings.items():
            times[name].append(cpu_seconds(loaded, input_ids, tokens, setting))
    rows = [
        {
            "way": name,
            "microseconds_per_token": round(statistics.median(own) * 1e6, 1),
            "over_plain": round(
                statistics.median(o / p for o, p in zip(own, times["plain"], strict=True)), 4
            ),
        }
        for name, own in times.items()
    ]
    table = Table("way", "CPU us/token", "over plain", title=f"{model}, {tokens} tokens, 1 thread")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    print(json.dumps({"model": model, "tokens": tokens, "repeats": repeats, "rows": rows}))


if __name__ == "__main__":
    typer.run(main)
