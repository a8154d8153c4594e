"""`ssr-hf trace`: the timeline of one generation as a chart, a picture and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .chart import print_chart
from .console import Meter, busy, out_console, require_writable, write_json, write_text
from .loading import open_session
from .options import GenerationOptions, ModelOptions, PromptOptions, SpeculationOptions
from .plot import require_matplotlib, save_picture
from .prompts import Request, built_in_prompts, given_prompt, make_request
from .report import drafts_line, heading, title
from .running import run_speculative, warm_up
from .spreading import spread
from .timeline import as_record


@spread
def trace(
    model: ModelOptions,
    asked: PromptOptions,
    generation: GenerationOptions,
    speculation: SpeculationOptions,
    picture: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Picture: .png, .svg or .pdf (extra plot)."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write JSON to FILE.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show when thinking, drafts, verification and suffix rounds took place in one generation."""
    config = speculation.config()
    text = given_prompt(asked)
    if picture is not None:
        require_matplotlib(picture)
        require_writable("--plot", picture)
    if json_file is not None:
        require_writable("--output", json_file)
    session = open_session(model, config)
    if text is None:
        text = built_in_prompts(1, generation.seed)[0]
    request = make_request(session, text, asked.raw, generation.max_new_tokens)
    with busy("Warming up"):
        warm_up(session, request, generation, config)
    with Meter("Generating", request.max_new_tokens) as meter:
        stats = run_speculative(session, request, generation, config, meter.count).stats
    facts = {
        **session.facts(),
        "generation": generation.describe(),
        "config": json.loads(config.to_json()),
    }
    record = {**facts, **_asked(request), **as_record(stats)}
    if as_json:
        write_json(record)
    else:
        console = out_console()
        title(console, session, generation)
        heading(console, "timeline")
        print_chart(console, stats)
        console.print(drafts_line(stats))
    if json_file is not None:
        write_text("--output", json_file, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    if picture is not None:
        save_picture(stats, f"{session.describe()} · {generation.describe()}", picture)


def _asked(request: Request) -> dict[str, Any]:
    return {"prompt": request.prompt, "prompt_tokens": request.input_ids.shape[1]}
