"""The text that asks the base model for the score of the step it has just read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from ..errors import ConfigError, message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUEST = (
    "Judge the last reasoning step above, and nothing else: is it factually correct, and does it "
    "follow from the steps before it? Ignore its style, its wording and how useful it is. Answer "
    "with one digit from 0 (certainly wrong) to 9 (certainly right)."
)
LEAD = "On a scale from 0 to 9, the last step scores "

_QUESTION = "QUESTION"
_STEP = "LASTREASONINGSTEP"


def score_prompt(tokenizer: PreTrainedTokenizerBase | Any) -> str:
    """What follows the step: the turn is ended and the model asked for a digit.

    Written with the chat template, or as plain text where there is none.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The base model's.

    Returns:
        `str`: The text up to the digit.

    Raises:
        `ConfigError`: The chat template cannot write such a conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        return f"\n\n{REQUEST}\n{LEAD}"
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _STEP},
        {"role": "user", "content": REQUEST},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise _unusable(str(error)) from error
    _, step, after = str(text).rpartition(_STEP)
    if not step:
        raise _unusable("it drops the assistant's turn")
    return after + LEAD


def _unusable(reason: str) -> ConfigError:
    return ConfigError(
        message(
            f"The chat template cannot write the score prompt ({reason})",
            "A user turn after an assistant turn is needed",
            "Pass the text that asks for the score as score_prompt=, or set scorer='logprob'",
        )
    )
