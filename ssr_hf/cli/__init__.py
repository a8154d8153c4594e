"""The command line `ssr-hf`: see the method work, use it, and find out what a model supports."""

from __future__ import annotations

import typer

from .check import check
from .demo import demo
from .generate import generate
from .trace import trace

app = typer.Typer(
    name="ssr-hf",
    help="Reasoning models answer faster, without changing a token: lossless self-speculation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, generate, check, trace):
    app.command()(command)


def main() -> None:
    """Entry point of the console script."""
    app()


__all__ = ["app", "main"]
