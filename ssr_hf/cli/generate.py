"""`ssr-hf generate`: a prompt or a JSONL file in, text or JSONL out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

import ssr_hf

from .console import (
    EXIT_INTERRUPTED,
    EXIT_WRONG_INPUT,
    InputError,
    Meter,
    err_console,
    out_console,
    write_json,
)
from .loading import Session, open_session
from .options import GenerationOptions, ModelOptions, PromptOptions, SpeculationOptions
from .painting import TextPainter
from .prompts import Messages, given_prompt, make_request
from .records import Item, RecordFile, read_items
from .report import drafts_line
from .running import OnTokens, Run, run_speculative
from .spreading import spread

Record = dict[str, Any]


@spread
def generate(
    model: ModelOptions,
    asked: PromptOptions,
    generation: GenerationOptions,
    speculation: SpeculationOptions,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input", "-i", metavar="FILE",
            help='JSONL: {"id": ..., "prompt": ...} or {"id": ..., "messages": [...]} a line.',
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE",
            help="Append to this file; with --input, ids that it holds are not generated again.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A record with statistics for --prompt, too.")
    ] = False,
) -> None:  # fmt: skip
    """Generate with self-speculation: a prompt or JSONL in, text or JSONL out.

    Exit code 0 if everything was generated, 2 if a line of the input could not be used, 130 after
    Ctrl-C; run the same command again to go on where it stopped.
    """
    config = speculation.config()
    text = given_prompt(asked)
    if (text is None) == (input_file is None):
        raise InputError("Exactly one of --prompt, --prompt-file and --input is accepted.")

    def open_worker() -> _Worker:
        return _Worker(open_session(model, config), generation, config, asked.raw)

    if input_file is not None:
        _generate_records(open_worker, input_file, output_file)
    elif text is not None and as_json:
        _generate_record(open_worker, text, output_file)
    elif text is not None:
        _generate_text(open_worker, text, output_file)


@dataclass(frozen=True)
class _Worker:
    """Generates one thing after the other with the same settings."""

    session: Session
    generation: GenerationOptions
    config: ssr_hf.SelfSpeculationConfig
    raw: bool

    def run(self, asked: str | Messages, on_tokens: OnTokens | None) -> Run:
        request = make_request(self.session, asked, self.raw, self.generation.max_new_tokens)
        return run_speculative(self.session, request, self.generation, self.config, on_tokens)

    def text(self, token_ids: tuple[int, ...]) -> str:
        tokenizer: Any = self.session.tokenizer
        text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def record(self, fields: Record, run: Run) -> Record:
        """What was asked, the text as a whole and in its two parts, and statistics."""
        stats = run.stats
        n_thinking = stats.thinking_tokens
        thinking = run.token_ids[:n_thinking]
        for marker in self.session.markers.end:
            if thinking[-len(marker) :] == marker:
                thinking = thinking[: -len(marker)]
                break
        return {
            **fields,
            "text": self.text(run.token_ids),
            "thinking": self.text(thinking),
            "answer": self.text(run.token_ids[n_thinking:]),
            "statistics": {**stats.to_dict(), "total_seconds": round(run.seconds, 4)},
        }


OpenWorker = Callable[[], _Worker]


def _generate_text(open_worker: OpenWorker, prompt: str, output_file: Path | None) -> None:
    file = None if output_file is None else _open_text(output_file)
    worker = open_worker()
    session = worker.session
    console = out_console()
    if file is None and console.is_terminal:
        painter = TextPainter(console, session.tokenizer, session.markers, session.end_tokens)
        run = worker.run(prompt, painter)
        painter.finish()
    else:
        run = _run_with_meter(worker, prompt)
        target = sys.stdout if file is None else file
        try:
            target.write(worker.text(run.token_ids) + "\n")
            target.flush()
        except OSError as error:
            if file is None:  # a closed pipe is no mistake of the user
                raise
            raise InputError(f"--output {output_file} cannot be written: {error}") from error
    console = err_console()
    console.print(
        f"{len(run.token_ids)} tokens, {run.forwards} forwards, {run.seconds:.2f} s", style="dim"
    )
    console.print(drafts_line(run.stats))


def _generate_record(open_worker: OpenWorker, prompt: str, output_file: Path | None) -> None:
    file = None if output_file is None else _open_records(output_file)
    worker = open_worker()
    record = worker.record({"prompt": prompt}, _run_with_meter(worker, prompt))
    if file is None:
        write_json(record)
    else:
        identifier = next(number for number in count(1) if number not in file.done)
        file.write({"id": identifier, **record})


def _open_records(path: Path) -> RecordFile:
    file = RecordFile(path)
    if file.repaired:
        err_console().print("An incomplete last line of --output was removed.")
    return file


def _open_text(path: Path) -> Any:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output {path} cannot be written: {error}") from error


def _run_with_meter(worker: _Worker, prompt: str) -> Run:
    with Meter("Generating", 1) as meter:
        return worker.run(prompt, _counter(meter, 0))


def _counter(meter: Meter, done: int) -> OnTokens:
    """Shows how many tokens the current text has."""
    n_tokens = 0

    def show(token_ids: Any, _: Any) -> None:
        nonlocal n_tokens
        n_tokens += len(token_ids)
        meter.update(done, f"{n_tokens} tokens")

    return show


def _generate_records(open_worker: OpenWorker, source: Path, output_file: Path | None) -> None:
    items, bad = read_items(source)
    file = None if output_file is None else _open_records(output_file)
    console = err_console()
    for entry in bad:
        console.print(f"[bold red]line {entry.line}[/]  {escape(entry.reason)}", soft_wrap=True)
    done = set() if file is None else file.done
    left = [item for item in items if item.identifier not in done]
    if len(left) < len(items):
        console.print(f"{len(items) - len(left)} of {len(items)} records are there already.")
    n_bad = len(bad)
    if left:
        n_bad += _write_all(open_worker(), left, write_json if file is None else file.write)
    if n_bad:
        console.print(f"{n_bad} line{'s' if n_bad > 1 else ''} could not be used.")
        raise typer.Exit(EXIT_WRONG_INPUT)


def _write_all(worker: _Worker, items: list[Item], write: Callable[[Record], None]) -> int:
    """Generates and writes records; returns how many lines could not be used."""
    n_bad = n_written = 0
    console = err_console()
    try:
        with Meter("Generating", len(items)) as meter:
            for done, item in enumerate(items):
                try:
                    run = worker.run(item.asked, _counter(meter, done))
                except InputError as error:
                    n_bad += 1
                    text = f"[bold red]line {item.line}[/]  {escape(str(error))}"
                    console.print(text, soft_wrap=True)
                    continue
                write(worker.record({"id": item.identifier, **item.fields}, run))
                n_written += 1
    except KeyboardInterrupt:
        console.print(f"Stopped; {n_written} of {len(items)} records were written.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    return n_bad
