"""The marker families that are known: one table row each. To add one, add a row."""

from __future__ import annotations

from typing import NamedTuple


class Preset(NamedTuple):
    """One family; a row matches if each of `special` is one token of the vocabulary."""

    families: str
    special: tuple[str, ...]
    start: str
    end: tuple[str, ...]
    pause: tuple[str, ...] = ()


_HARMONY_FINAL = "<|channel|>final<|message|>"

PRESETS: tuple[Preset, ...] = (
    Preset("Qwen, DeepSeek, SmolLM3, GLM, Kimi K2", ("</think>",), "<think>", ("</think>",)),
    Preset("Gemma 4", ("<|channel>", "<channel|>"), "<|channel>thought", ("<channel|>",)),
    Preset(
        "gpt-oss",
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        "<|channel|>analysis<|message|>",
        # The short form is how an answer without any analysis begins.
        (f"<|end|><|start|>assistant{_HARMONY_FINAL}", _HARMONY_FINAL),
        pause=("<|end|>",),
    ),
    Preset("Magistral", ("[/THINK]",), "[THINK]", ("[/THINK]",)),
    Preset("Seed", ("</seed:think>",), "<seed:think>", ("</seed:think>",)),
    Preset("Cohere", ("<|END_THINKING|>",), "<|START_THINKING|>", ("<|END_THINKING|>",)),
    Preset("Kimi-VL", ("◁/think▷",), "◁think▷", ("◁/think▷",)),
)
