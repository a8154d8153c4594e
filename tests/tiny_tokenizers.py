"""Byte-level tokenizers built in memory, one per family of thinking markers.

The file is not called `tokenizers.py`: pytest puts this folder first on the import path, where it
would hide the `tokenizers` package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
LINE_BREAK = "Ċ"  # how byte-level vocabularies spell "\n"

# The marker's pieces as ordinary vocabularies have them: `</`, `think`, `>`.
MARKER_MERGES = (("<", "/"), ("t", "h"), ("th", "i"), ("thi", "n"), ("thin", "k"))
# ... and the two tokens that swallow its ends.
BORDER_MERGES = ((">", LINE_BREAK), (".", "</"))


def build_tokenizer(
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    merges: Sequence[tuple[str, str]] = (),
    chat_template: str | None = None,
    **named: str,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose vocabulary is 256 bytes, `merges` and the tokens given.

    Args:
        special (`Sequence[str]`): Added tokens that are flagged as special.
        added (`Sequence[str]`): Added tokens that are not, as `<think>` in most vocabularies.
        merges (`Sequence[tuple[str, str]]`): BPE merges, in their order.
        chat_template (`str`, *optional*): The Jinja source.
        named: `bos_token=`, `eos_token=`, `pad_token=`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(left + right for left, right in merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template, **named)


@dataclass(frozen=True)
class Family:
    """What a family's vocabulary adds to the bytes."""

    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
_QWEN = Family(_CHATML, ("<tool_call>", "</tool_call>", *_THINK), (("eos_token", "<|im_end|>"),))
# The turn tags of DeepSeek are not flagged as special in its vocabulary.
_DEEPSEEK = Family(
    ("<bos>", "<eos>"),
    ("<｜User｜>", "<｜Assistant｜>", *_THINK),
    (("bos_token", "<bos>"), ("eos_token", "<eos>")),
)

FAMILIES = {
    "qwen3": _QWEN,
    "qwen3_5": _QWEN,
    "smollm3": _QWEN,
    "deepseek_r1": _DEEPSEEK,
    "deepseek_v3_1": _DEEPSEEK,
    "gpt_oss": Family(
        (
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>", "<|constrain|>"),
            *("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
        ),
        named=(("eos_token", "<|return|>"),),
    ),
    "gemma4": Family(
        (
            *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>"),
            *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
        ),
        named=(("bos_token", "<bos>"), ("eos_token", "<eos>")),
    ),
    "magistral": Family(
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
            *("[THINK]", "[/THINK]"),
        ),
        named=(("bos_token", "<s>"), ("eos_token", "</s>")),
    ),
}


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of one family with its chat template."""
    family = FAMILIES[name]
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return build_tokenizer(
        family.special, family.added, chat_template=template, **dict(family.named)
    )


def plain_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """No think tokens, and `>` merges with a line break, `</` with a full stop before it."""
    return build_tokenizer(
        special=_CHATML,
        merges=(*MARKER_MERGES, *BORDER_MERGES),
        chat_template=chat_template,
        eos_token="<|im_end|>",
    )


def prompt_ids(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, Any]] | str, **switches: Any
) -> list[int]:
    """The prompt a chat template writes for `messages` (a single user message if text)."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True, **switches
    )
    return ids_of(tokenizer, str(text))


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of `text`, nothing added."""
    return [int(index) for index in tokenizer.encode(text, add_special_tokens=False)]
