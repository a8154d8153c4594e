"""The command line `ssr-hf`: see the method work, use it, and find out what a model supports."""

from __future__ import annotations

import typer

from . import check, demo, generate, trace

app = typer.Typer(
    name="ssr-hf",
    help="Reasoning models answer faster, without changing a token: lossless self-speculation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo.demo, generate.generate, check.check, trace.trace):
    app.command()(command)


def main() -> None:
    """Entry point of the console script."""
    from transformers.utils import logging

    # Hints of the host about arguments, which the user of a command line never sees.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    app()


__all__ = ["app", "main"]
