"""`ssr-hf demo`: plain and self-speculative generation of the same prompt, for people to see."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import ssr_hf

from .comparing import Comparison, as_record, medians
from .console import EXIT_NEGATIVE, InputError, Meter, busy, out_console, write_json
from .loading import Session, open_session
from .options import (
    GenerationOptions,
    ModelOptions,
    PromptOptions,
    SpeculationOptions,
)
from .painting import TextPainter, legend
from .prompts import Request, built_in_prompts, given_prompt, make_request
from .report import comparison_table, drafts_line, heading, title, verdict_line
from .running import OnTokens, run_plain, run_speculative, warm_up
from .spreading import spread

BUILT_IN_RUNS = 5


@spread
def demo(
    model: ModelOptions,
    asked: PromptOptions,
    generation: GenerationOptions,
    speculation: SpeculationOptions,
    runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Prompts to compare, the first of which is shown; 5 built-in ones by default, or "
            "yours once.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """See plain and self-speculative generation of the same prompt, and compare them.

    Exit code 0 if every output is identical, 1 if one is not.
    """
    config = speculation.config()
    _require_comparable(config, generation)
    text = given_prompt(asked)
    if text is not None:
        config = config.without_history()  # every run has the same prompt
    session = open_session(model, config)
    n_runs = runs or (BUILT_IN_RUNS if text is None else 1)
    prompts = built_in_prompts(n_runs, generation.seed) if text is None else [text] * n_runs
    requests = [
        make_request(session, prompt, asked.raw, generation.max_new_tokens) for prompt in prompts
    ]
    stage = _Stage(session, generation, config)
    with busy("Warming up"):
        warm_up(session, requests[0], generation, config)
    console = out_console()
    if as_json:
        comparisons = stage.compare_all(requests)
        write_json({**stage.settings(), **_report(requests, comparisons)})
    else:
        comparisons = [stage.show(console, requests[0]), *stage.compare_all(requests[1:])]
        _print_result(console, session, generation, comparisons)
    if not all(comparison.identical for comparison in comparisons):
        raise typer.Exit(EXIT_NEGATIVE)


def _require_comparable(
    config: ssr_hf.SelfSpeculationConfig, generation: GenerationOptions
) -> None:
    """Refuses what gives another text by design."""
    if config.acceptance != "exact_match" and generation.samples:
        raise InputError(
            f"acceptance is {config.acceptance!r}, which samples another text than plain generate "
            "does, and the demo compares texts. 'exact_match' is accepted; or leave out "
            "--temperature, --top-p and --top-k."
        )


@dataclass(frozen=True)
class _Stage:
    """Runs requests both ways with the same settings."""

    session: Session
    generation: GenerationOptions
    config: ssr_hf.SelfSpeculationConfig

    def settings(self) -> dict[str, Any]:
        return {
            **self.session.facts(),
            "generation": self.generation.describe(),
            "config": json.loads(self.config.to_json()),
        }

    def compare_all(self, requests: list[Request]) -> list[Comparison]:
        with Meter("Comparing prompts", len(requests)) as meter:
            return [
                self._compare(request, on_tokens=lambda *_, done=done: meter.update(done))
                for done, request in enumerate(requests)
            ]

    def show(self, console: Console, request: Request) -> Comparison:
        """Runs one request both ways and shows both texts as they come."""
        title(console, self.session, self.generation)
        heading(console, "prompt")
        self._show_prompt(console, request)
        heading(console, "plain generate")
        painter = self._painter(console)
        plain = run_plain(
            self.session, request, self.generation, self.config.thinking_budget, painter
        )
        painter.finish()
        heading(console, "self-speculation", legend() if console.color_system else None)
        painter = self._painter(console)
        speculative = run_speculative(self.session, request, self.generation, self.config, painter)
        painter.finish()
        return Comparison(plain=plain, speculative=speculative)

    def _compare(self, request: Request, on_tokens: OnTokens | None = None) -> Comparison:
        budget = self.config.thinking_budget
        return Comparison(
            plain=run_plain(self.session, request, self.generation, budget, on_tokens),
            speculative=run_speculative(
                self.session, request, self.generation, self.config, on_tokens
            ),
        )

    def _painter(self, console: Console) -> TextPainter:
        session = self.session
        return TextPainter(console, session.tokenizer, session.markers, session.end_tokens)

    def _show_prompt(self, console: Console, request: Request) -> None:
        painter = self._painter(console)
        painter.write(request.prompt.strip())
        painter.finish()


def _report(requests: list[Request], comparisons: list[Comparison]) -> dict[str, Any]:
    pairs = zip(requests, comparisons, strict=True)
    return {
        "identical": all(comparison.identical for comparison in comparisons),
        "median": medians(comparisons),
        "runs": [as_record(comparison, request.prompt) for request, comparison in pairs],
    }


def _print_result(
    console: Console,
    session: Session,
    generation: GenerationOptions,
    comparisons: list[Comparison],
) -> None:
    n = len(comparisons)
    heading(console, "result" if n == 1 else f"result, median of {n} prompts")
    console.print(comparison_table(medians(comparisons), n))
    console.print(verdict_line(comparisons, session.model.dtype))
    console.print(drafts_line(comparisons[0].stats, "shown above: " if n > 1 else ""))
    for note in dict.fromkeys(note for c in comparisons for note in c.stats.notes):
        console.print(Text(f"  note: {note}", "dim"))
