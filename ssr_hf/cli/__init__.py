"""The command line `ssr-hf`: see the method work, use it, and find out what a model supports."""

from __future__ import annotations

from errno import EBADF, EIO, ENOSPC
from typing import Annotated

import typer

import ssr_hf

from . import check, console, demo, generate, trace

app = typer.Typer(
    name="ssr-hf",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo.demo, generate.generate, check.check, trace.trace):
    app.command()(command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ssr-hf {ssr_hf.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Reasoning models answer faster, without changing a token: lossless self-speculation."""


def main() -> None:
    """Entry point of the console script."""
    from transformers.utils import logging

    # Hints of the host about arguments, which the user of a command line never sees.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console.require_stdout()
    try:
        app()
    except OSError as error:
        if error.filename is not None or error.errno not in (ENOSPC, EIO, EBADF):
            raise
        console.give_up(f"standard output cannot be written: {error}")


__all__ = ["app", "main"]
