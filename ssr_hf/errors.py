"""Exceptions of the package and the one builder of their messages.

Every message says what happened (with the value), what is accepted, and what to do next.
"""

from __future__ import annotations


class SelfSpeculationError(ValueError):
    """Base class of everything this package raises for a wrong call. It is a `ValueError`."""


class ConfigError(SelfSpeculationError):
    """A setting is unknown, of the wrong type, out of range or contradicts another one."""


class MarkerError(SelfSpeculationError):
    """The thinking markers of a model are missing or ambiguous."""


class UnsupportedError(SelfSpeculationError):
    """The model, the cache or the generation mode cannot be accelerated without changing tokens."""


def message(what: str, accepted: str, next_step: str) -> str:
    """Builds an error message from its three parts.

    Args:
        what (`str`): What happened, with the offending value.
        accepted (`str`): What would have been accepted.
        next_step (`str`): What to do now.

    Returns:
        `str`: The three parts as sentences, in this order.

    Example:

    ```python
    >>> from ssr_hf.errors import message
    >>> message("draft_budget is -1", "A positive integer is accepted", "Set draft_budget=500")
    'draft_budget is -1. A positive integer is accepted. Set draft_budget=500.'

    ```
    """
    return " ".join(f"{part.rstrip('. ')}." for part in (what, accepted, next_step))
