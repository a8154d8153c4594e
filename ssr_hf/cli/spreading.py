"""How a sub-command takes whole dataclasses of options, and how it fails."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import ssr_hf

from .console import fail


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a sub-command one option per field of its dataclass parameters, and turns user errors
    into a message and exit code 2.

    Args:
        function (`Callable[..., None]`): Its parameters annotated with a dataclass are spread, the
            others stay options of its own.

    Returns:
        `Callable[..., None]`: What `typer` registers.
    """
    hints = get_type_hints(function, include_extras=True)
    own = inspect.signature(function).parameters
    groups = {name: hints[name] for name in own if dataclasses.is_dataclass(hints[name])}
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.items():
        if name in groups:
            parameters.extend(_fields_as_parameters(groups[name]))
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=hints[name], kind=kind))

    @functools.wraps(function)
    def command(**values: Any) -> None:
        try:
            arguments = {
                name: group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)})
                for name, group in groups.items()
            }
            function(**arguments, **values)
        except ssr_hf.SelfSpeculationError as error:
            fail(str(error))

    spread_out: Any = command
    del spread_out.__wrapped__
    spread_out.__signature__ = inspect.Signature(parameters)
    spread_out.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _fields_as_parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
