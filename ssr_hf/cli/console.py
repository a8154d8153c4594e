"""Where the command line writes: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import ssr_hf

EXIT_NEGATIVE = 1  # the command ran and the answer is no
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130  # as after Ctrl-C in a shell

# Progress is shown on everything that takes longer, and then now and again where it is a log.
_PATIENCE_SECONDS = 2.0
_LOG_SECONDS = 10.0
_REFRESH_SECONDS = 0.2


class InputError(ssr_hf.SelfSpeculationError):
    """What the user gave on the command line, or a file it names, cannot be used."""


def out_console() -> Console:
    """Standard output; colours only where it is a terminal."""
    return Console(highlight=False)


def err_console() -> Console:
    """Standard error; colours only where it is a terminal."""
    return Console(stderr=True, highlight=False)


def write_json(value: Any) -> None:
    """Writes one JSON value as a line on stdout; floats to four places."""
    sys.stdout.write(json.dumps(_rounded(value), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def require_writable(option: str, path: Path) -> None:
    """Refuses a file that could not be written, before the work for it is done.

    Raises:
        `InputError`: The directory is missing, or permissions forbid it.
    """
    if not path.parent.is_dir():
        raise InputError(f"{option} {path} cannot be written: there is no directory {path.parent}")
    if path.is_dir():
        raise InputError(f"{option} {path} cannot be written: it is a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{option} {path} cannot be written: permission denied")


def write_text(option: str, path: Path, text: str) -> None:
    """Writes a file.

    Raises:
        `InputError`: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{option} {path} cannot be written: {error}") from error


def fail(text: str, exit_code: int = EXIT_WRONG_INPUT) -> NoReturn:
    """Reports a user's mistake on stderr and ends the command."""
    err_console().print(f"[bold red]error[/]  {escape(text)}", soft_wrap=True)
    raise typer.Exit(exit_code)


def require_stdout() -> None:
    """Ends the program where standard output is closed: results would be lost."""
    if sys.stdout is None:
        give_up("standard output is closed")


def give_up(text: str) -> NoReturn:
    """Reports outside of any command that nothing can be shown, and ends the program."""
    if sys.stdout is not None:
        # Python would try once more at its end, and say so.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    err_console().print(f"[bold red]error[/]  {escape(text)}", soft_wrap=True)
    sys.exit(EXIT_WRONG_INPUT)


@contextmanager
def busy(what: str, spins: bool = True) -> Iterator[None]:
    """Shows that something of unknown length is going on: a spinner, or a line once it takes long.

    Args:
        what (`str`): What is going on.
        spins (`bool`, *optional*, defaults to `True`): Whether a terminal gets a spinner.
    """
    console = err_console()
    if console.is_terminal and spins:
        with console.status(escape(what), spinner="dots", refresh_per_second=4):
            yield
        return
    timer = threading.Timer(_PATIENCE_SECONDS, console.print, [f"{escape(what)} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Meter:
    """Progress of something whose steps are counted: a bar, or a line now and again in a log.

    It draws when told so and has no thread of its own, which would disturb what is being timed.

    Args:
        what (`str`): What is going on.
        total (`int`): Number of steps.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._counted = 0
        self._console = err_console()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("[dim]{task.fields[detail]}[/]"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task(escape(what), total=total, detail="")
        self._next = time.monotonic() + (0.0 if self._console.is_terminal else _PATIENCE_SECONDS)

    def __enter__(self) -> Meter:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def count(self, token_ids: Sequence[int], sources: Sequence[str]) -> None:
        """Counts tokens as steps."""
        self._counted += len(token_ids)
        self.update(self._counted)

    def update(self, done: int, detail: str = "") -> None:
        """Shows how far it is; cheap enough to be called for every token."""
        now = time.monotonic()
        if now < self._next:
            return
        if self._console.is_terminal:
            self._next = now + _REFRESH_SECONDS
            self._progress.update(self._task, completed=done, detail=escape(detail))
            self._progress.refresh()
        else:
            self._next = now + _LOG_SECONDS
            position = f"{done} of {self._total}" + (f", {detail}" if detail else "")
            self._console.print(f"{escape(self._what)}: {position}", soft_wrap=True)
