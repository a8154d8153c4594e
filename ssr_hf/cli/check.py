"""`ssr-hf check`: what a model supports, and whether its output really stays the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

import ssr_hf

from .comparing import Comparison
from .console import EXIT_NEGATIVE, Meter, out_console, write_json
from .loading import Session, open_session
from .options import GenerationOptions, ModelOptions, PlacementOptions
from .prompts import Request, built_in_prompts, make_request
from .report import different_line
from .running import Run, run_plain, run_speculative
from .spreading import spread

_OTHER_LANES = ("sequential", "stream")
# How the note begins that a model gets which fails the probe.
_PROBE_NOTE = "decoding without candidates"
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
            console.print(_row(finding))
    passed = all(finding.passed is not False for finding in findings)
    if as_json:
        report = {"supported": passed, "findings": [asdict(finding) for finding in findings]}
        write_json({**session.facts(), "context": session.context, **report})
    else:
        verdict = ("accelerated, output unchanged", "green") if passed else ("not supported", "red")
        console.print(Text("\n  ").append(verdict[0], f"bold {verdict[1]}"))
    if not passed:
        raise typer.Exit(EXIT_NEGATIVE)


def _row(finding: Finding) -> Table:
    """A mark, the name, and the text wrapped beside them."""
    mark, style = _MARKS[finding.passed]
    row = Table.grid(padding=(0, 1, 0, 0))
    row.add_column(width=3, justify="right", style=style)
    row.add_column(width=16)
    row.add_column(style="dim", overflow="fold")
    row.add_row(mark, finding.name, Text(finding.text))
    return row


def _findings(
    session: Session, config: ssr_hf.SelfSpeculationConfig, n_tokens: int
) -> Iterator[Finding]:
    """Checks one thing after the other; stops where nothing further can be tried."""
    yield Finding("markers", True, _markers(session))
    prober = _Prober(session, config)
    (prompt,) = built_in_prompts(1, seed=0)
    request = make_request(session, prompt, raw=False, max_new_tokens=n_tokens)
    try:
        plain = prober.plain(request, _GREEDY)
        speculative = prober.speculative(request, _GREEDY, "lockstep")
        if not speculative.stats.thinking_tokens and session.markers.start:
            request = _with_thinking_opened(request, session.markers.start[0])
            plain = prober.plain(request, _GREEDY)
            speculative = prober.speculative(request, _GREEDY, "lockstep")
    except ssr_hf.UnsupportedError as error:
        yield Finding("cache", False, str(error))
        return
    yield Finding("cache", True, _layers(speculative))
    probe, *remarks = _noted(speculative)
    yield probe
    yield from remarks
    yield _judge("lane lockstep", plain, speculative, session)
    if probe.passed:
        yield _tried(speculative)
    for lane in _OTHER_LANES:
        yield _in_lane(prober, request, plain, lane)
    plain = prober.plain(request, _SAMPLED)
    speculative = prober.speculative(request, _SAMPLED, "auto")
    yield _judge("sampling, seeded", plain, speculative, session)


def _noted(run: Run) -> Iterator[Finding]:
    """What the probe says, then every other note, which is no judgement."""
    problems = [note for note in run.stats.notes if note.startswith(_PROBE_NOTE)]
    text = "; ".join(problems) or "several tokens at once equal single steps"
    yield Finding("probe", not problems, text)
    for note in run.stats.notes:
        if note not in problems:
            yield Finding("note", None, note)


def _tried(run: Run) -> Finding:
    """Whether the comparison says anything: it does not where nothing was speculated."""
    n_drafted, n_proposed = run.stats.draft_tokens, run.stats.suffix_proposed
    if n_drafted or n_proposed:
        return Finding("speculation", True, f"{n_drafted} tokens drafted, {n_proposed} proposed")
    n_tokens = len(run.token_ids)
    text = f"the text ended after {n_tokens} tokens, before anything was drafted or proposed"
    return Finding("speculation", False, text)


@dataclass(frozen=True)
class _Prober:
    """Runs a request both ways, with progress."""

    session: Session
    config: ssr_hf.SelfSpeculationConfig

    def plain(self, request: Request, generation: GenerationOptions) -> Run:
        budget = self.config.thinking_budget
        with Meter("Plain generate", request.max_new_tokens) as meter:
            return run_plain(self.session, request, generation, budget, meter.count)

    def speculative(self, request: Request, generation: GenerationOptions, lane: str) -> Run:
        config = replace(self.config, lane=lane)
        with Meter(f"Self-speculation, lane {lane}", request.max_new_tokens) as meter:
            return run_speculative(self.session, request, generation, config, meter.count)


def _in_lane(prober: _Prober, request: Request, plain: Run, lane: str) -> Finding:
    """Compares another lane; one that the model cannot use is no fault of the model."""
    name = f"lane {lane}"
    try:
        speculative = prober.speculative(request, _GREEDY, lane)
    except ssr_hf.UnsupportedError as error:
        return Finding(name, None, str(error))
    return _judge(name, plain, speculative, prober.session)


def _with_thinking_opened(request: Request, start: tuple[int, ...]) -> Request:
    """The request with thinking begun, for models that open it themselves."""
    opened = torch.cat([request.input_ids, request.input_ids.new_tensor([start])], dim=1)
    return replace(request, input_ids=opened)


def _judge(name: str, plain: Run, speculative: Run, session: Session) -> Finding:
    comparison = Comparison(plain=plain, speculative=speculative)
    if not comparison.identical:
        return Finding(name, False, different_line(comparison, session.model.dtype).plain)
    stats = comparison.stats
    gains = f"draft {stats.accepted_prefix}/{stats.draft_tokens}"
    gains += f", suffix {stats.suffix_accepted}/{stats.suffix_proposed} accepted"
    return Finding(name, True, f"{len(plain.token_ids)} tokens the same; {gains}")


def _markers(session: Session) -> str:
    def show(alternatives: tuple[tuple[int, ...], ...]) -> str:
        tokenizer: Any = session.tokenizer
        return " or ".join(f"{tokenizer.decode(ids)!r} {list(ids)}" for ids in alternatives)

    start = show(session.markers.start) or "thinking from the first token"
    return f"{start} ... {show(session.markers.end)}"


def _layers(run: Run) -> str:
    counts = Counter(run.cache_layers)
    return ", ".join(f"{n} {name}" for name, n in counts.items())
