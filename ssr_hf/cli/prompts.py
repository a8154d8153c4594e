"""From a user's text to the token ids that a model reads, with everything checked that can be."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError

import ssr_hf

from .console import InputError
from .loading import Session
from .options import PromptOptions

LONGEST_BY_DEFAULT = 4096

Messages = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One thing to generate.

    Args:
        prompt (`str`): What the user asked, for display.
        input_ids (`torch.Tensor` of shape `(1, T)`): What the model reads.
        max_new_tokens (`int`): Longest generation.
    """

    prompt: str
    input_ids: torch.Tensor
    max_new_tokens: int


def make_request(
    session: Session, asked: str | Messages, raw: bool, max_new_tokens: int | None
) -> Request:
    """Checks a prompt and turns it into token ids.

    Args:
        session (`Session`): The model.
        asked (`str` or `list[dict]`): The user's message, or all messages of a chat.
        raw (`bool`): Whether the text is given to the model without its chat template.
        max_new_tokens (`int`, *optional*): Longest generation; what the context holds when None.

    Returns:
        `Request`: What to generate.

    Raises:
        `InputError`: The prompt is empty, no Unicode text or longer than the context.
    """
    text = asked if isinstance(asked, str) else _last_content(asked)
    if not text.strip():
        raise InputError("The prompt is empty. Some text is accepted.")
    require_unicode(text)
    tokenizer: Any = session.tokenizer
    if raw or not tokenizer.chat_template:
        if not isinstance(asked, str):
            if raw:
                raise InputError("--raw takes text, not messages. Give a prompt, or leave it out.")
            raise InputError("The model has no chat template for messages. Give a prompt instead.")
        input_ids = tokenizer(asked, return_tensors="pt")["input_ids"]
    else:
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        input_ids = _apply_template(tokenizer, messages)
    limit = _room(session.context, input_ids.shape[1], max_new_tokens)
    return Request(prompt=text, input_ids=input_ids.to(session.model.device), max_new_tokens=limit)


def require_unicode(text: str) -> None:
    """Refuses text that can be neither tokenized nor written.

    Raises:
        `InputError`: It holds half of a surrogate pair, as from `"\\ud800"` in JSON.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"The text holds {text[error.start]!r}, half of a surrogate pair. Unicode text is "
            "accepted."
        ) from error


def _last_content(messages: Messages) -> str:
    content = messages[-1].get("content") if messages else ""
    return content if isinstance(content, str) else str(content or "")


def _apply_template(tokenizer: Any, messages: Messages) -> torch.Tensor:
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"The chat template does not take these messages: {error}") from error
    return encoded["input_ids"]


def _room(context: int | None, n_prompt: int, max_new_tokens: int | None) -> int:
    """The longest generation, refused where it does not fit into the context."""
    if context is None:
        return max_new_tokens or LONGEST_BY_DEFAULT
    room = context - n_prompt
    if room < 1:
        raise InputError(
            f"The prompt has {n_prompt} tokens and the model's context holds {context}. A prompt "
            f"of at most {context - 1} tokens is accepted."
        )
    if max_new_tokens is not None and max_new_tokens > room:
        raise InputError(
            f"The prompt has {n_prompt} tokens and the model's context holds {context}: at most "
            f"{room} new tokens fit, {max_new_tokens} were asked for."
        )
    return max_new_tokens or min(room, LONGEST_BY_DEFAULT)


def given_prompt(options: PromptOptions) -> str | None:
    """The text of `--prompt` or `--prompt-file`; None where neither is given.

    Raises:
        `InputError`: Both are given, or the file cannot be read.
    """
    if options.prompt is not None and options.prompt_file is not None:
        raise InputError("--prompt and --prompt-file are both given. One of them is accepted.")
    if options.prompt_file is None:
        return options.prompt
    try:
        if str(options.prompt_file) == "-":
            return sys.stdin.buffer.read().decode().replace("\r\n", "\n")
        return options.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompt-file {options.prompt_file} cannot be read: {error}") from error


def built_in_prompts(n: int, seed: int) -> list[str]:
    """Problems of the tiny reasoner; they suit every model that thinks."""
    return [problem.prompt for problem in ssr_hf.tiny_reasoner_prompts(n, seed=seed)]
