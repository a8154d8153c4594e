"""What drafts cost: each lane beside plain thinking, and bootstrapped beside fresh drafts.

The embedded model thinks to its end in every way; drafts are taken at an interval. For each lane
the script reports the time of thinking over plain thinking (its overhead) and the time from fork to
end of the second and later drafts, which start from the previous draft (bootstrapped) or anew.
Candidates in the parent's thinking are off, so that only drafts differ.

    python scripts/bench_drafting.py --interval 60 --max-draft-tokens 120

Prints two tables; the last line of standard output is one JSON document.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

import ssr_hf
from ssr_hf.drafting import DraftSchedule
from ssr_hf.lanes import LANE_TYPES

MAX_NEW_TOKENS = 700


@contextlib.contextmanager
def fresh_drafts() -> Iterator[None]:
    """Every draft starts anew: no earlier draft is ever there."""
    nothing = property(lambda _: None, lambda _, __: None)
    with mock.patch.object(DraftSchedule, "newest", nothing, create=True):
        yield


def run(model: Any, tokenizer: Any, prompt: str, setting: dict[str, Any]) -> tuple[Any, float]:
    """Statistics of one generation, and seconds until thinking ended."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(
        **inputs,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        tokenizer=tokenizer,
        self_speculation=setting,
    )
    stats = output.speculation
    first_answer = next((r.start for r in stats.rounds if r.phase == "answering"), None)
    end = first_answer if first_answer is not None else stats.rounds[-1].start
    return stats, end - stats.rounds[1].start


def main(
    interval: Annotated[int, typer.Option(help="Thinking tokens between drafts.")] = 60,
    max_draft_tokens: Annotated[int, typer.Option(help="Longest draft.")] = 120,
    n_prompts: Annotated[int, typer.Option(help="Prompts to run.")] = 6,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """Measures every lane and both ways to start a draft."""
    torch.set_num_threads(threads)
    if threads == 1:
        # CPU time does not move with what else the machine does.
        time.perf_counter = time.process_time
    model, tokenizer = ssr_hf.load_tiny_reasoner()
    ssr_hf.enable(model)
    prompts = [p.prompt for p in ssr_hf.tiny_reasoner_prompts(n_prompts, seed=5)]
    common = {
        "draft_budget": interval,
        "draft_interval": interval,
        "max_draft_tokens": max_draft_tokens,
        "suffix": {"sources": ("draft",)},
        "adaptive": False,
    }
    ways: dict[str, dict[str, Any]] = {"plain": {"reuse": "none"}}
    for lane in LANE_TYPES:
        ways[f"{lane}, bootstrapped"] = {**common, "lane": lane}
        ways[f"{lane}, fresh"] = {**common, "lane": lane}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    later: dict[str, list[float]] = {name: [] for name in ways}
    inherited: dict[str, list[float]] = {name: [] for name in ways}
    for prompt in (prompts[0], *prompts):
        for name, setting in ways.items():
            with fresh_drafts() if name.endswith("fresh") else contextlib.nullcontext():
                stats, thinking = run(model, tokenizer, prompt, setting)
            seconds[name].append(thinking)
            reports = [d for d in stats.drafts if d.stage > 0 and d.status != "cut"]
            assert not name.endswith("fresh") or not any(d.n_inherited for d in reports)
            later[name].extend(d.seconds for d in reports)
            inherited[name].extend(d.n_inherited / max(1, d.n_tokens) for d in reports)
    rows = [
        {
            "way": name,
            "thinking_over_plain": round(
                statistics.median(
                    own / plain
                    for own, plain in zip(seconds[name][1:], seconds["plain"][1:], strict=True)
                ),
                3,
            ),
            "later_draft_seconds": round(statistics.mean(later[name]), 4) if later[name] else None,
            "inherited_share": round(statistics.mean(inherited[name]), 3) if later[name] else None,
        }
        for name in ways
    ]
    table = Table(
        "way",
        "thinking / plain",
        "seconds of a later draft",
        "tokens inherited",
        title=f"drafts every {interval} thinking tokens, {threads} threads",
    )
    for row in rows:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    Console().print(table)
    print(json.dumps({"interval": interval, "max_draft_tokens": max_draft_tokens, "rows": rows}))


if __name__ == "__main__":
    typer.run(main)
