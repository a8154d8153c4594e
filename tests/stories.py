"""Pairs of scripted models for step speculation: who would write which step after which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers import enabled
from scripted import Script, ScriptedModel
from tiny_tokenizers import LINE_BREAK, build_tokenizer, family_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import ssr_hf
from ssr_hf import SelfSpeculationConfig, StepSpeculationConfig
from ssr_hf.specreason.config import ASKED_SCORERS

PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n"
SCORE_PROMPT = "?SCORE "
END = "</think>"
EOS = "<|im_end|>"
SEPARATOR = "\n\n"
INTERLUDE = "\n\nfirst.<think>\n"
# The small model's tokenizer: it lacks the thinking markers, and a blank line merges with a stop.
MERGES = ((LINE_BREAK, LINE_BREAK), (".", LINE_BREAK + LINE_BREAK), ("s", "0"), ("Ġ", "t"))


def foreign_tokenizer() -> PreTrainedTokenizerFast:
    """Another vocabulary, which puts a BOS token before every text that it encodes."""
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = build_tokenizer(special=("<s>", "</s>"), merges=MERGES, **named)
    bos = ("<s>", tokenizer.convert_tokens_to_ids("<s>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[bos]
    )
    return tokenizer


@dataclass(frozen=True)
class Story:
    """What the models write, by the step that stands last (`""` at the beginning).

    Args:
        small (`Mapping[str, str]`): The small model's next step; the end marker if none is given.
        base (`Mapping[str, str]`): The base model's.
        scores (`Mapping[str, int]`): The digit that the base model answers, 9 where none is given.
        answer (`str`): What follows the end marker.
        blocks (`int`): Blocks of thinking; an interlude follows all but the last.
    """

    small: Mapping[str, str]
    base: Mapping[str, str] = field(default_factory=dict)
    scores: Mapping[str, int] = field(default_factory=dict)
    answer: str = f"\n\nthe answer{EOS}"
    blocks: int = 1

    def script(self, successors: Mapping[str, str]) -> Script:
        """The script of one of the two models."""

        def say(text: str) -> str:
            if text.endswith(SCORE_PROMPT):
                return str(self.scores.get(_last_step(text[: -len(SCORE_PROMPT)]), 9))
            # Another model's markers mean the same to it.
            text = text.replace("[THINK]", "<think>").replace("[/THINK]", END)
            block = text.rpartition("<think>\n")[2]
            if END in block:
                is_last = text.count(END) >= self.blocks
                answer = self.answer if is_last else INTERLUDE
                return answer[len(block.rpartition(END)[2]) :]
            if text.endswith(("assistant\n", "<think>")):
                return "<think>\n" if text.endswith("\n") else "\n"
            before, _, partial = block.rpartition(SEPARATOR)
            step = successors.get(_last_step(before), END)
            whole = step if END in step or EOS in step else f"{step}{SEPARATOR}"
            return whole[len(partial) :] if whole.startswith(partial) else SEPARATOR

        return say


def _last_step(text: str) -> str:
    """The last step of a text, without what separates it from others."""
    return re.split(r"\n\n|<think>\n", text.removesuffix(SEPARATOR))[-1]


@dataclass
class Told:
    """What became of a story.

    Args:
        thinking (`str`): Between the prompt and the end marker.
        answer (`str`): After the end marker; `""` if there is none.
        output (`SelfSpeculativeOutput`): The whole output.
        base, small (`ScriptedModel`): The models, with their forward counts of this call.
    """

    thinking: str
    answer: str
    output: ssr_hf.SelfSpeculativeOutput
    base: ScriptedModel
    small: ScriptedModel

    @property
    def steps(self) -> tuple[ssr_hf.StepReport, ...]:
        """The reports of all steps."""
        assert self.output.step_speculation is not None
        return self.output.step_speculation.steps

    @property
    def authors(self) -> list[str]:
        """Who wrote each step."""
        return [step.author for step in self.steps]

    @property
    def text(self) -> str:
        """Everything after the prompt."""
        return self.base.tokenizer.decode(self.output.sequences[0])[len(PROMPT) :]


def models(story: Story, kind: str, case: str) -> tuple[ScriptedModel, ScriptedModel]:
    """Base and small model; `case` is how their tokenizers differ.

    `"same"`; `"padded"`, with a wider vocabulary of the small one; `"different"`, where the small
    one has no thinking markers; `"marked"`, where it has other ones.
    """
    tokenizer = family_tokenizer("qwen3")
    others = {"different": foreign_tokenizer, "marked": lambda: family_tokenizer("magistral")}
    other = others[case]() if case in others else tokenizer
    base = ScriptedModel(story.script(story.base), tokenizer, kind, size=2)
    padding = 8 if case == "padded" else 0
    return base, ScriptedModel(story.script(story.small), other, kind, padding)


def tell(
    story: Story,
    kind: str = "full",
    case: str = "same",
    ssr: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    prompt: str = PROMPT,
    **settings: Any,
) -> Told:
    """Runs `generate` with step speculation; `settings` are those of `StepSpeculationConfig`."""
    base, small = models(story, kind, case)
    if settings.get("scorer", "digit") in ASKED_SCORERS:
        settings.setdefault("score_prompt", SCORE_PROMPT)
    settings.setdefault("candidate_tokens", 0)
    ids = torch.tensor([base.tokenizer.encode(prompt)])
    defaults: dict[str, Any] = {
        "max_new_tokens": 200,
        "do_sample": False,
        "return_dict_in_generate": True,
        "attention_mask": torch.ones_like(ids),
        "tokenizer": base.tokenizer,
        "assistant_model": small,
        "assistant_tokenizer": small.tokenizer,
        "self_speculation": SelfSpeculationConfig(**{"reuse": "none", **(ssr or {})}),
        "step_speculation": StepSpeculationConfig(**settings),
    }
    with enabled(base):
        # The probe of several tokens at once runs once per model, and says nothing here.
        for model in (base, small):
            ssr_hf.cache.support.multi_token_support(model, model.generation_config)
            model.fed.clear()
        output = base.generate(ids, **{**defaults, **(arguments or {})})
    # As plain `generate` leaves it: the last token is not fed yet.
    assert output.cache.get_seq_length() == output.sequences.shape[1] - 1
    text = base.tokenizer.decode(output.sequences[0])[len(prompt) :]
    thinking, _, answer = text.partition(END)
    return Told(thinking, answer, output, base, small)


def plain(model: ScriptedModel, **arguments: Any) -> torch.Tensor:
    """Plain `generate` of one of the models on its own rendering of the prompt."""
    ids = torch.tensor([model.tokenizer.encode(PROMPT)])
    mask = torch.ones_like(ids)
    defaults = {"max_new_tokens": 200, "do_sample": False, "attention_mask": mask}
    return model.generate(ids, **{**defaults, **arguments})
