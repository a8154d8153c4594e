"""Total and answer seconds of self-speculation beside plain generate and stock prompt lookup.

Every setting runs on every prompt, one after the other within each prompt, so that a slow minute of
the machine meets all of them; figures are medians over prompts of the ratio to plain generate on
the same prompt. Our settings must give the tokens of plain generate, or the script exits with 1.

    python scripts/bench_generate.py                          # the embedded model
    python scripts/bench_generate.py --model DIR/MODEL.gguf \\
        --prompts HumanEval.jsonl.gz --think-open "<think>" --end-of-thinking "</think>" \\
        --thinking-budget 200 --draft-budget 100

Prints a table; the last line of standard output is one JSON document.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_common import ForwardCounter, load, read_rows, require_saving, save_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import ssr_hf

MAX_NEW_TOKENS = 600
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
now = CLOCKS["wall"]


class Clock(BaseStreamer):
    """Notes when each token arrives, in seconds since it was made."""

    def __init__(self) -> None:
        self.origin = now()
        self.arrivals: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.arrivals.extend([now() - self.origin] * value.numel())
        self._prompt_seen = True

    def end(self) -> None:
        pass


@dataclass(frozen=True)
class Run:
    """One generation: its tokens, seconds in all and in the answer, forwards."""

    token_ids: list[int]
    seconds: float
    answer_seconds: float
    forwards: int
    speculation: ssr_hf.SpeculationStats | None


@dataclass(frozen=True)
class Bench:
    """What is held fixed over all runs."""

    model: Any
    tokenizer: Any
    markers: ssr_hf.ThinkingMarkers
    thinking_budget: int | None
    max_new_tokens: int

    def run(self, prompt: str, arguments: dict[str, Any]) -> Run:
        """Generates once; `arguments` select the way to decode."""
        inputs = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        processors = LogitsProcessorList()
        if self.thinking_budget is not None and "self_speculation" not in arguments:
            processors.append(
                ssr_hf.ThinkingBudgetLogitsProcessor(self.markers, self.thinking_budget)
            )
        clock = Clock()
        with ForwardCounter(self.model) as counter:
            output = self.model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=self.max_new_tokens,
                logits_processor=processors,
                streamer=clock,
                return_dict_in_generate=True,
                tokenizer=self.tokenizer,
                **arguments,
            )
        seconds = now() - clock.origin
        token_ids = output.sequences[0, inputs.input_ids.shape[1] :].tolist()
        answer = self._answer_start(token_ids)
        answer_seconds = seconds - clock.arrivals[answer - 1] if answer else 0.0
        speculation = getattr(output, "speculation", None)
        return Run(token_ids, seconds, answer_seconds, counter.forwards, speculation)

    def _answer_start(self, token_ids: list[int]) -> int:
        """Tokens up to and including the end-of-thinking marker; 0 where there is none."""
        closing = list(self.markers.closing)
        for end in range(len(closing), len(token_ids) + 1):
            if token_ids[end - len(closing) : end] == closing:
                return end
        return 0


def make_settings(common: dict[str, Any], lanes: list[str]) -> dict[str, dict[str, Any]]:
    """Ways to decode by name; `common` holds markers and budgets."""
    reference = ssr_hf.SelfSpeculationConfig.reference()
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt lookup 10": {"prompt_lookup_num_tokens": 10},
        "prompt lookup 16": {"prompt_lookup_num_tokens": 16},
        "published spans": {
            "self_speculation": {"suffix": reference.suffix, "adaptive": False, **common}
        },
        "without history": {
            "self_speculation": ssr_hf.SelfSpeculationConfig(**common).without_history()
        },
        "default": {"self_speculation": common},
    }
    for lane in lanes:
        settings[f"lane {lane}"] = {"self_speculation": {**common, "lane": lane, "adaptive": False}}
    return settings


def summarise(runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """Medians and spreads over prompts, one row per setting."""
    rows = []
    for name, own in runs.items():
        plain = runs["plain"]
        pairs = list(zip(plain, own, strict=True))

        total = sorted(p.seconds / o.seconds for p, o in pairs)
        answer = sorted(
            p.answer_seconds / o.answer_seconds
            for p, o in pairs
            if p.answer_seconds > 0 and o.answer_seconds > 0
        )
        rows.append(
            {
                "setting": name,
                "identical": all(
                    p.token_ids == o.token_ids for p, o in zip(plain, own, strict=True)
                ),
                "seconds": round(statistics.median(r.seconds for r in own), 3),
                "speedup": round(statistics.median(total), 3),
                "speedup_range": [round(total[0], 2), round(total[-1], 2)],
                "answer_seconds": round(statistics.median(r.answer_seconds for r in own), 3),
                "answer_speedup": round(statistics.median(answer), 2) if answer else None,
                "forwards": round(statistics.mean(r.forwards for r in own), 1),
                "tokens_per_forward": round(
                    sum(len(r.token_ids) for r in own) / sum(r.forwards for r in own), 2
                ),
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for heading in (
        "setting",
        "same tokens",
        "seconds",
        "speed-up",
        "range",
        "answer s",
        "answer speed-up",
        "forwards",
        "tokens/forward",
    ):
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    for row in rows:
        low, high = row["speedup_range"]
        table.add_row(
            row["setting"],
            "yes" if row["identical"] else "NO",
            f"{row['seconds']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{row['answer_seconds']:.2f}",
            f"{row['answer_speedup']:.1f}x" if row["answer_speedup"] else "-",
            f"{row['forwards']:.0f}",
            f"{row['tokens_per_forward']:.2f}",
        )
    Console(width=140).print(table)


def main(
    model: Annotated[str, typer.Option(help="Hub id, directory, GGUF file or 'tiny'.")] = "tiny",
    prompts: Annotated[
        str | None, typer.Option(help="JSONL file, folder or data set of the Hub.")
    ] = None,
    field: Annotated[str, typer.Option(help="Its column of user messages.")] = "prompt",
    subset: Annotated[str | None, typer.Option(help="Part of the data set.")] = None,
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "test",
    n_prompts: Annotated[int, typer.Option(help="Prompts to run.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the embedded model's problems.")] = 1,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    dtype: Annotated[str, typer.Option(help="Weights' dtype.")] = "float32",
    max_new_tokens: Annotated[int, typer.Option(help="Longest output.")] = MAX_NEW_TOKENS,
    thinking_budget: Annotated[int | None, typer.Option(help="Force the marker there.")] = None,
    draft_budget: Annotated[
        int | None, typer.Option(help="Draft after so many thinking tokens.")
    ] = None,
    end_of_thinking: Annotated[str | None, typer.Option(help="Marker text.")] = None,
    think_open: Annotated[str, typer.Option(help="Text that opens thinking in the prompt.")] = "",
    lane: Annotated[list[str] | None, typer.Option(help="Also measure these lanes.")] = None,
    clock: Annotated[
        str, typer.Option(help="'wall', or 'cpu' on a busy machine with one thread.")
    ] = "wall",
    save: Annotated[Path | None, typer.Option(help="File or folder for the results.")] = None,
) -> None:
    """Measures every setting on every prompt."""
    global now
    require_saving(save)
    now = CLOCKS[clock]
    torch.set_num_threads(threads)
    loaded, tokenizer = load(model, dtype)
    ssr_hf.enable(loaded)
    markers = ssr_hf.ThinkingMarkers.from_tokenizer(tokenizer, end_of_thinking)
    bench = Bench(loaded, tokenizer, markers, thinking_budget, max_new_tokens)
    common = {
        "draft_budget": draft_budget,
        "thinking_budget": thinking_budget,
        "end_of_thinking": end_of_thinking,
    }
    settings = make_settings(common, lane or [])
    messages = (
        [problem.prompt for problem in ssr_hf.tiny_reasoner_prompts(n_prompts, seed=seed)]
        if prompts is None
        else [row[field] for row in read_rows(prompts, [field], n_prompts, subset, split)]
    )
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        + think_open
        for text in messages
    ]
    for name, arguments in settings.items():  # first calls load kernels and probe the model
        if name != "default":
            bench.run(texts[0], arguments)
    runs: dict[str, list[Run]] = {name: [] for name in settings}
    # No setting profits from what another one measured; only `default` writes a history.
    profiles = {name: ssr_hf.Profile() for name in settings}
    for text in track(texts, description="prompts", console=Console(stderr=True)):
        for name, arguments in settings.items():
            ssr_hf.enable(loaded, profile=profiles[name])
            runs[name].append(bench.run(text, arguments))
    rows = summarise(runs)
    print_table(rows, f"{model}, {len(texts)} prompts, {threads} threads, {dtype}")
    facts = {
        "model": model,
        "prompts": len(texts),
        "mean_tokens": statistics.mean(len(r.token_ids) for r in runs["plain"]),
        "threads": threads,
        "dtype": dtype,
        "clock": clock,
        "machine": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("ssr-hf", "torch", "transformers")},
        "rows": rows,
        "notes": sorted({n for r in runs["default"] if r.speculation for n in r.speculation.notes}),
    }
    print(json.dumps(facts))
    save_results(save, facts)
    raise typer.Exit(
        0 if all(row["identical"] for row in rows if "lookup" not in row["setting"]) else 1
    )


if __name__ == "__main__":
    typer.run(main)
