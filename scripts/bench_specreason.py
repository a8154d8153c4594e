"""Step speculation: what a threshold buys and what it costs, beside both models alone.

    python scripts/bench_specreason.py sweep --small tiny_reasoner_small --prompts 100
    python scripts/bench_specreason.py words --base gemma.gguf --small smollm2.gguf --prompts 10
    python scripts/bench_specreason.py words --base Qwen/Qwen3-8B --small Qwen/Qwen3-0.6B \\
        --questions openai/gsm8k --subset main --thinking-budget 2000 --max-new-tokens 3000

`sweep` runs a pair with one tokenizer on fresh problems of the embedded model: accuracy, latency,
thinking tokens and accepted steps for every threshold, then step speculation, self-speculation and
both together. `words` runs two models, which may have different tokenizers, on word problems from
`reasoning-gym` or on a data set of questions and answers; models without thinking markers are
given some as text, and a thinking budget.

Every setting runs on every prompt, one after the other within each prompt, so that a slow minute of
the machine meets all of them. Prints a table, and then one JSON document on a line.
"""

from __future__ import annotations

import functools
import json
import math
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from bench_common import ForwardCounter, load, read_rows, require_saving, save_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LogitsProcessorList

import ssr_hf
from ssr_hf import SelfSpeculationConfig, StepSpeculationConfig

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

THRESHOLDS = "-1e-4,-1e-3,-3e-3,-0.01,-0.03,-0.1,-0.3,-inf"
COLUMNS = {
    "setting": "setting",
    "accuracy": "correct",
    "seconds": "s / prompt",
    "speedup": "base / this",
    "thinking_tokens": "thinking tokens",
    "answer_tokens": "answer tokens",
    "accepted_steps": "accepted steps",
    "assistant_tokens": "its tokens",
    "base_forwards": "base forwards",
}


@dataclass(frozen=True)
class Problem:
    """A prompt for each model, and the check of an answer."""

    base_prompt: str
    small_prompt: str
    is_correct: Callable[[str], bool]


@dataclass
class Setting:
    """One way to decode: the model that generates, and its arguments for a problem."""

    name: str
    model: Any
    tokenizer: Any
    arguments: Callable[[Problem], dict[str, Any]]
    alone: bool = False
    profile: ssr_hf.Profile = field(default_factory=ssr_hf.Profile)
    runs: list[Run] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One generation."""

    correct: bool
    seconds: float
    thinking_tokens: int
    answer_tokens: int
    base_forwards: int
    steps: ssr_hf.StepSpeculationStats | None


@dataclass(frozen=True)
class Bench:
    """What is held fixed over all runs."""

    base: Any
    max_new_tokens: int
    end_of_thinking: str
    thinking_budget: int | None

    def run(self, setting: Setting, problem: Problem) -> Run:
        """Generates once."""
        tokenizer = setting.tokenizer
        prompt = problem.small_prompt if setting.alone else problem.base_prompt
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        arguments = setting.arguments(problem)
        ssr_hf.enable(self.base, profile=setting.profile)
        start = time.perf_counter()
        with ForwardCounter(self.base) as counter:
            output = setting.model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                do_sample=False,
                max_new_tokens=self.max_new_tokens,
                return_dict_in_generate=True,
                **{**self._budget(tokenizer, arguments), **arguments},
            )
        seconds = time.perf_counter() - start
        new_ids = output.sequences[0, inputs.input_ids.shape[1] :].tolist()
        text = tokenizer.decode(new_ids, skip_special_tokens=False)
        thinking, _, answer = text.partition(self.end_of_thinking)
        n_thinking = len(tokenizer.encode(thinking, add_special_tokens=False))
        return Run(
            correct=problem.is_correct(answer),
            seconds=seconds,
            thinking_tokens=n_thinking,
            answer_tokens=len(new_ids) - n_thinking,
            base_forwards=counter.forwards,
            steps=getattr(output, "step_speculation", None),
        )

    def _budget(self, tokenizer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """The thinking budget of a model that generates without this package."""
        if self.thinking_budget is None or "self_speculation" in arguments:
            return {}
        markers = ssr_hf.ThinkingMarkers.from_tokenizer(tokenizer, self.end_of_thinking, [])
        budget = ssr_hf.ThinkingBudgetLogitsProcessor(markers, self.thinking_budget)
        return {"logits_processor": LogitsProcessorList([budget])}

    def run_all(self, settings: Sequence[Setting], problems: Sequence[Problem]) -> None:
        """Every setting on every problem, after one run each to warm up."""
        for setting in settings:
            self.run(setting, problems[0])
        for problem in track(problems, "generating", console=Console(stderr=True)):
            for setting in settings:
                setting.runs.append(self.run(setting, problem))


def summarise(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """One row per setting; the first setting is what others are compared with."""
    total = sum(run.seconds for run in settings[0].runs)
    return [_row(setting, total) for setting in settings]


def _row(setting: Setting, base_seconds: float) -> dict[str, Any]:
    runs = setting.runs
    stats = [run.steps for run in runs if run.steps is not None]
    proposals = sum(len(each.scores) for each in stats)
    tokens = sum(each.tokens(author) for each in stats for author in ("assistant", "base"))
    row = {
        "setting": setting.name,
        "accuracy": round(fmean(run.correct for run in runs), 3),
        "seconds": round(fmean(run.seconds for run in runs), 3),
        "speedup": round(base_seconds / sum(run.seconds for run in runs), 3),
        "thinking_tokens": round(fmean(run.thinking_tokens for run in runs), 1),
        "answer_tokens": round(fmean(run.answer_tokens for run in runs), 1),
        "base_forwards": round(fmean(run.base_forwards for run in runs), 1),
    }
    if stats:
        accepted = sum(each.count("assistant") for each in stats)
        row["accepted_steps"] = round(accepted / max(1, proposals), 3)
        written = sum(each.tokens("assistant") for each in stats)
        row["assistant_tokens"] = round(written / max(1, tokens), 3)
        row["assistant_forwards"] = round(fmean(each.assistant_forwards for each in stats), 1)
        row["seconds_by_part"] = {
            part: round(fmean(each.seconds[part] for each in stats), 3) for part in stats[0].seconds
        }
    return row


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """The table for people."""
    table = Table(title=title)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="left" if heading == "setting" else "right")
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in COLUMNS))
    Console(width=140).print(table)


def save_plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy against latency: one point per threshold, and both models alone."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    swept = [row for row in rows if row["setting"].startswith("threshold")]
    axes.plot([row["seconds"] for row in swept], [row["accuracy"] for row in swept], "o-")
    label = functools.partial(axes.annotate, textcoords="offset points", fontsize=8)
    for accuracy in dict.fromkeys(row["accuracy"] for row in swept):
        alike = [row for row in swept if row["accuracy"] == accuracy]
        names = "\n".join(row["setting"].removeprefix("threshold ") for row in alike)
        label(names, (alike[0]["seconds"], accuracy), xytext=(-6, 0), ha="right", va="top")
    for row in rows:
        if row not in swept:
            axes.plot(row["seconds"], row["accuracy"], "s")
            label(row["setting"], (row["seconds"], row["accuracy"]), xytext=(0, 7), ha="center")
    axes.margins(0.12)
    axes.set_xlabel("seconds per prompt")
    axes.set_ylabel("correct answers")
    axes.set_title("Step speculation: accuracy against latency by threshold")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def report(
    rows: list[dict[str, Any]], title: str, save: Path | None, facts: dict[str, Any]
) -> None:
    """Prints the table, saves the results, and ends with one JSON line."""
    show(rows, title)
    versions = {name: version(name) for name in ("torch", "transformers", "ssr-hf")}
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), **versions}
    document = {"bench": "specreason", **facts, **machine, "rows": rows}
    print(json.dumps(document, allow_nan=False))
    save_results(save, document)


def parameters(model: Any) -> float:
    """Millions of parameters."""
    return round(model.num_parameters() / 1e6, 2)


@app.command()
def sweep(
    small: Annotated[str, typer.Option(help="The small model: same tokenizer as the base.")],
    base: Annotated[str, typer.Option(help="The base model.")] = "tiny",
    prompts: Annotated[int, typer.Option(help="Fresh problems.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the problems.")] = 1,
    thresholds: Annotated[str, typer.Option(help="Mean log-probabilities.")] = THRESHOLDS,
    together: Annotated[float, typer.Option(help="Threshold of the last row.")] = -0.01,
    max_new_tokens: Annotated[int, typer.Option(help="Longest output.")] = 1024,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Where to save the plot.")] = None,
    save: Annotated[Path | None, typer.Option(help="File or folder for the results.")] = None,
) -> None:
    """A pair with one tokenizer: every threshold, then both methods together."""
    require_saving(save)
    if plot is not None:  # not found out after a quarter of an hour
        import matplotlib as mpl

        mpl.use("Agg")
    torch.set_num_threads(threads)
    model, tokenizer = load(base)
    assistant, _ = load(small)

    def steps(threshold: float, **settings: Any) -> dict[str, Any]:
        config = StepSpeculationConfig(
            threshold=threshold, scorer="logprob", delimiter="\n", **settings
        )
        return {"step_speculation": config, "assistant_model": assistant, "tokenizer": tokenizer}

    values = [float(value) for value in thresholds.split(",")]
    # Several settings write the same texts: what was written must be no source of spans.
    fresh = SelfSpeculationConfig().without_history()
    reasoning = {"self_speculation": fresh, "tokenizer": tokenizer}
    chosen = steps(together)
    settings = [
        Setting("base alone", model, tokenizer, lambda _: {}),
        Setting("small alone", assistant, tokenizer, lambda _: {}),
        *(
            Setting(f"threshold {value:g}", model, tokenizer, lambda _, value=value: steps(value))
            for value in values
        ),
        Setting("self-speculation", model, tokenizer, lambda _: reasoning),
        Setting("both", model, tokenizer, lambda _: {**chosen, **reasoning}),
    ]
    problems = [
        Problem(
            *[_chat(tokenizer, problem.prompt)] * 2,
            lambda answer, right=problem.answer: _is_same(answer, right, tokenizer),
        )
        for problem in ssr_hf.tiny_reasoner_prompts(prompts, seed=seed)
    ]
    bench = Bench(model, max_new_tokens, "</think>", None)
    bench.run_all(settings, problems)
    facts = {
        "mode": "sweep",
        "prompts": prompts,
        "together": together,
        "base_parameters_m": parameters(model),
        "small_parameters_m": parameters(assistant),
        "seed": seed,
    }
    sizes = f"{facts['base_parameters_m']}M base, {facts['small_parameters_m']}M small"
    title = f"{sizes}, scorer logprob"
    rows = summarise(settings)
    report(rows, title, save, facts)
    if plot is not None:
        save_plot(rows, plot)


def _chat(tokenizer: Any, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _is_same(answer: str, right: str, tokenizer: Any) -> bool:
    return answer.removesuffix(tokenizer.eos_token).strip() == right.strip()


@app.command()
def words(
    base: Annotated[str, typer.Option(help="The base model, for instance a GGUF file.")],
    small: Annotated[str, typer.Option(help="The small model, with another tokenizer.")],
    prompts: Annotated[int, typer.Option(help="Word problems.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the problems.")] = 0,
    thinking_budget: Annotated[int, typer.Option(help="Thinking tokens.")] = 160,
    max_new_tokens: Annotated[int, typer.Option(help="Longest output.")] = 220,
    thresholds: Annotated[str, typer.Option(help="Digits.")] = "0,3,5,7,10",
    scorers: Annotated[str, typer.Option(help="Ways to score.")] = "digit,expected",
    threads: Annotated[int, typer.Option(help="Of torch.")] = 2,
    questions: Annotated[
        str | None,
        typer.Option(help="JSONL file, folder or data set of the Hub: 'question', 'answer'."),
    ] = None,
    subset: Annotated[str | None, typer.Option(help="Part of the data set.")] = None,
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "test",
    save: Annotated[Path | None, typer.Option(help="File or folder for the results.")] = None,
) -> None:
    """Two models, which may have different tokenizers, on questions with a number as answer."""
    require_saving(save)
    items = (
        word_problems(prompts, seed)
        if questions is None
        else read_rows(questions, ["question", "answer"], prompts, subset, split)
    )
    torch.set_num_threads(threads)
    model, tokenizer = load(base)
    assistant, assistant_tokenizer = load(small)
    shares_ids = assistant_tokenizer.get_vocab() == tokenizer.get_vocab()

    def arguments(problem: Problem, scorer: str, threshold: float) -> dict[str, Any]:
        return {
            "step_speculation": StepSpeculationConfig(
                threshold=threshold,
                scorer=scorer,
                assistant_prompt=None if shares_ids else problem.small_prompt,
            ),
            "self_speculation": SelfSpeculationConfig(
                end_of_thinking="</think>",
                start_of_thinking="<think>",
                thinking_budget=thinking_budget,
                reuse="none",
            ),
            "assistant_model": assistant,
            "assistant_tokenizer": assistant_tokenizer,
            "tokenizer": tokenizer,
        }

    settings = [
        Setting("base alone", model, tokenizer, lambda _: {}),
        Setting("small alone", assistant, assistant_tokenizer, lambda _: {}, alone=True),
        *(
            Setting(
                f"{scorer} {threshold}",
                model,
                tokenizer,
                lambda problem, s=scorer, t=float(threshold): arguments(problem, s, t),
            )
            for scorer in scorers.split(",")
            for threshold in thresholds.split(",")
        ),
    ]
    problems = [
        Problem(
            _open(tokenizer, item["question"]),
            _open(assistant_tokenizer, item["question"]),
            functools.partial(_is_same_number, item["answer"]),
        )
        for item in items
    ]
    bench = Bench(model, max_new_tokens, "</think>", thinking_budget)
    bench.run_all(settings, problems)
    facts = {
        "mode": "words",
        "prompts": len(problems),
        "questions": questions or "reasoning-gym gsm_symbolic",
        "base": Path(base).name,
        "small": Path(small).name,
        "thinking_budget": thinking_budget,
        "scores": {
            setting.name: _spread([run.steps for run in setting.runs if run.steps is not None])
            for setting in settings[2:]
        },
    }
    report(summarise(settings), f"{facts['base']}, {facts['small']}", save, facts)


def word_problems(n_problems: int, seed: int) -> list[dict[str, Any]]:
    """Grade-school word problems, written by a generator."""
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        message = "the word problems need `pip install reasoning-gym`; or pass --questions"
        raise typer.BadParameter(message) from error
    return list(create_dataset("gsm_symbolic", size=n_problems, seed=seed))


def _open(tokenizer: Any, question: str) -> str:
    """The question in the model's own chat template, thinking opened."""
    text = f"{question}\nReason step by step. Separate the steps by blank lines."
    prompt = _chat(tokenizer, text) if tokenizer.chat_template else f"{text}\n"
    return f"{prompt}<think>\n"


def _is_same_number(right: object, answer: str) -> bool:
    return _last_number(answer) == _last_number(str(right))


def _last_number(answer: str) -> float:
    """The number that an answer ends with, as in GSM8K; not a number where there is none."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
    return float(numbers[-1].replace(",", "")) if numbers else math.nan


def _spread(stats: Sequence[ssr_hf.StepSpeculationStats]) -> dict[str, int]:
    """How often each score, rounded, was given."""
    scores = sorted(round(score) for each in stats for score in each.scores)
    return {str(score): scores.count(score) for score in dict.fromkeys(scores)}


if __name__ == "__main__":
    app()
