"""Exceptions of the package and the one builder of their messages.

Every message says what happened (with the value), what is accepted, and what to do next.
"""

from __future__ import annotations


class SelfSpeculationError(ValueError):
    """Base class of everything this package raises for a wrong call. It is a `ValueError`.

    Example:

    ```python
    >>> import ssr_hf
    >>> try:
    ...     ssr_hf.SelfSpeculationConfig(draft_budget=0)
    ... except ssr_hf.SelfSpeculationError as error:
    ...     print(error)
    draft_budget is 0. An integer of at least 1 is accepted. Set draft_budget=128.

    ```
    """


class ConfigError(SelfSpeculationError):
    """A setting is unknown, of the wrong type, out of range or contradicts another one.

    Example:

    ```python
    >>> import ssr_hf
    >>> ssr_hf.SelfSpeculationConfig(lane="streams")
    Traceback (most recent call last):
    ...
    ssr_hf.errors.ConfigError: lane is 'streams'. ... Did you mean lane='stream'?

    ```
    """


class MarkerError(SelfSpeculationError):
    """The thinking markers of a model are missing or ambiguous.

    Example:

    ```python
    >>> import ssr_hf
    >>> ssr_hf.ThinkingMarkers(start=((7,),), end=())
    Traceback (most recent call last):
    ...
    ssr_hf.errors.MarkerError: No end-of-thinking marker was given. ...

    ```
    """


class UnsupportedError(SelfSpeculationError):
    """The model, the cache or the generation mode cannot be accelerated without changing tokens.

    Example:

    ```python
    >>> import ssr_hf
    >>> model, tokenizer = ssr_hf.load_tiny_reasoner()
    >>> inputs = tokenizer("Keep any colour but red.", return_tensors="pt")
    >>> settings = {"num_beams": 2, "max_new_tokens": 8, "tokenizer": tokenizer}
    >>> ssr_hf.enable(model).generate(**inputs, **settings, self_speculation=True)
    Traceback (most recent call last):
    ...
    ssr_hf.errors.UnsupportedError: The generation mode is beam_search. ...

    ```
    """


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
    parts = (part.rstrip(". ") for part in (what, accepted, next_step))
    return " ".join(part if part.endswith("?") else f"{part}." for part in parts)
