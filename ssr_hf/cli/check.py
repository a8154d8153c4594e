"""`ssr-hf check`: what a model supports, and whether its output really stays the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

import ssr_hf

from .comparing import Comparison
from .console import EXIT_NEGATIVE, Meter, out_console, write_json
from .loading import Session, open_session
from .options import GenerationOptions, ModelOptions, PlacementOptions, spread
from .prompts import Request, built_in_prompts, make_request
from .report import different_line, drafts_line
from .running import run_plain, run_speculative

_LANES = ("lockstep", "sequential", "stream")
_MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("·", "dim")}
_GREEDY = GenerationOptions()
_SAMPLED = GenerationOptions(temperature=1.0)


@dataclass(frozen=True)
class Finding:
    """The result of one check; `passed` is None where nothing is judged."""

    name: str
    passed: bool | None
    text: str


@spread
def check(
    placement: PlacementOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Hub id, local directory or GGUF file; by default the tiny reasoner inside.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=16, metavar="N", help="Length of each generation.")
    ] = 128,
    end_of_thinking: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Marker, where not found.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Find out what a model supports, and compare its output in every lane with plain generate.

    Exit code 0 if it is accelerated and its output stays the same, 1 if not, 2 if it cannot be
    loaded or has no thinking markers.
    """
    config = ssr_hf.SelfSpeculationConfig(
        end_of_thinking=end_of_thinking,
        draft_budget=tokens // 8,
        max_draft_tokens=tokens // 2,
        thinking_budget=tokens * 3 // 8,
        adaptive=False,
    )
    session = open_session(ModelOptions(model=model, **asdict(placement)), config)
    console = out_console()
    if not as_json:
        console.print(Text(session.describe(), "bold"), soft_wrap=True)
        console.print()
    findings = []
    for finding in _findings(session, config, tokens):
        findings.append(finding)
        if not as_json:
            console.print(_line(finding))
    passed = all(finding.passed is not False for finding in findings)
    if as_json:
        report = {"supported": passed, "findings": [asdict(finding) for finding in findings]}
        write_json({**session.facts(), "context": session.context, **report})
    else:
        verdict = ("accelerated, output unchanged", "green") if passed else ("not supported", "red")
        console.print(Text("\n  ").append(verdict[0], f"bold {verdict[1]}"))
    if not passed:
        raise typer.Exit(EXIT_NEGATIVE)


def _line(finding: Finding) -> Text:
    mark, style = _MARKS[finding.passed]
    line = Text(f"  {mark} ", style).append(f"{finding.name:<18}", "default")
    return line.append(finding.text, "dim")


def _findings(
    session: Session, config: ssr_hf.SelfSpeculationConfig, n_tokens: int
) -> Iterator[Finding]:
    """Checks one thing after the other; stops where nothing further can be tried."""
    yield Finding("markers", True, _markers(session))
    prober = _Prober(session, config)
    prompt = built_in_prompts(1, seed=0)[0]
    request = make_request(session, prompt, raw=False, max_new_tokens=n_tokens)
    try:
        comparison = prober.compare("lockstep", request)
        if not comparison.stats.thinking_tokens and session.markers.start:
            request = _with_thinking_opened(request, session.markers.start[0])
            comparison = prober.compare("lockstep", request)
    except ssr_hf.UnsupportedError as error:
        yield Finding("cache", False, str(error))
        return
    yield Finding("cache", True, _layers(comparison))
    problems = comparison.stats.notes
    yield Finding(
        "probe", not problems, "; ".join(problems) or "several tokens at once equal single steps"
    )
    yield _judge("lane lockstep", comparison, session)
    for lane in _LANES[1:]:
        yield _judge(f"lane {lane}", prober.compare(lane, request), session)
    yield _judge("sampling, one seed", prober.compare("auto", request, _SAMPLED), session)


@dataclass(frozen=True)
class _Prober:
    """Compares plain and self-speculative generation of one request in any lane."""

    session: Session
    config: ssr_hf.SelfSpeculationConfig

    def compare(
        self, lane: str, request: Request, generation: GenerationOptions = _GREEDY
    ) -> Comparison:
        config = replace(self.config, lane=lane)
        n_steps = 2 * request.max_new_tokens
        with Meter(f"Comparing, lane {lane}", n_steps) as meter:
            budget = config.thinking_budget
            return Comparison(
                plain=run_plain(self.session, request, generation, budget, meter.count),
                speculative=run_speculative(self.session, request, generation, config, meter.count),
            )


def _with_thinking_opened(request: Request, start: tuple[int, ...]) -> Request:
    """The request with thinking begun, for models that open it themselves."""
    opened = torch.cat([request.input_ids, request.input_ids.new_tensor([start])], dim=1)
    return replace(request, input_ids=opened)


def _judge(name: str, comparison: Comparison, session: Session) -> Finding:
    stats = comparison.stats
    n = len(comparison.plain.token_ids)
    if not comparison.identical:
        return Finding(name, False, different_line(comparison, session.model.dtype).plain)
    return Finding(name, True, f"{n} tokens the same · {drafts_line(stats).plain.strip()}")


def _markers(session: Session) -> str:
    def show(alternatives: tuple[tuple[int, ...], ...]) -> str:
        tokenizer: Any = session.tokenizer
        return " or ".join(f"{tokenizer.decode(ids)!r} {list(ids)}" for ids in alternatives)

    start = show(session.markers.start) or "thinking from the first token"
    return f"{start} ... {show(session.markers.end)}"


def _layers(comparison: Comparison) -> str:
    counts = Counter(comparison.speculative.cache_layers)
    return ", ".join(f"{n} {name}" for name, n in counts.items())
