"""A real model on real text: run with a model of your own, see the README."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ssr_hf

MODEL = os.environ.get("SSR_HF_TEST_MODEL", "")
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Write a Python class Stack with push, pop and peek, and a test for each method.",
)
NEW_TOKENS = 160

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not MODEL, reason="SSR_HF_TEST_MODEL names no model"),
]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """A Hub id, a directory or a GGUF file, in single precision."""
    path = Path(MODEL)
    source = {"pretrained_model_name_or_path": MODEL}
    if path.suffix == ".gguf":
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    return ssr_hf.enable(model), AutoTokenizer.from_pretrained(**source)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("lane", ["lockstep", "stream"])
def test_same_tokens_on_real_text(
    loaded: tuple[Any, Any], prompt: str, do_sample: bool, lane: str
) -> None:
    """Bug: what holds for tiny random models does not hold for trained weights and real text."""
    model, tokenizer = loaded
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(text + "<think>", return_tensors="pt", add_special_tokens=False)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample}
    markers = ssr_hf.ThinkingMarkers.from_tokenizer(tokenizer, "</think>")
    budget = ssr_hf.ThinkingBudgetLogitsProcessor(markers, 60)
    torch.manual_seed(0)
    plain = model.generate(**inputs, **settings, logits_processor=[budget])
    torch.manual_seed(0)
    config = {
        "end_of_thinking": "</think>",
        "thinking_budget": 60,
        "draft_budget": 30,
        "lane": lane,
        "adaptive": False,
    }
    output = model.generate(
        **inputs,
        **settings,
        tokenizer=tokenizer,
        return_dict_in_generate=True,
        self_speculation=config,
    )
    assert output.sequences.tolist() == plain.tolist()
    assert len(output.speculation.drafts) == 1
    assert do_sample or output.speculation.forwards < NEW_TOKENS
