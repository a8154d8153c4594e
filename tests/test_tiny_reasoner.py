"""Tests of the tiny reasoning model and of the generator of its problems."""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from ssr_hf.assets import (
    TINY_REASONER_DIR,
    fit_threads,
    load_tiny_reasoner,
    tiny_reasoner_prompts,
)
from ssr_hf.assets.problems import (
    CITIES,
    COLOURS,
    ITEMS,
    NAMES,
    TinyReasonerProblem,
    generate_problem,
)

FIELDS = ("note", "name", "quantity", "colour", "item", "city")
MAX_BYTES = 10 * 1024**2
CLOSE = "</think>"

PINNED_DIGEST = "1733e3e54241548a27c2fe41b1bb4516e03a764b97061b0dcccf7d96c31a03d0"

Row = dict[str, Any]


def read_notes(prompt: str) -> list[Row]:
    """Read the notes back from the user's text, by word lists instead of by phrasing."""
    rows = []
    for number, line in re.findall(r"^(\d)\. (.*)$", prompt, flags=re.MULTILINE):
        words = re.findall(r"[A-Za-z]+|\d+", line)
        found = {
            "name": [word for word in words if word in NAMES],
            "quantity": [int(word) for word in words if word.isdigit()],
            "colour": [word for word in words if word in COLOURS],
            "item": [word for word in words if word in ITEMS],
            "city": [word for word in words if word in CITIES],
        }
        assert all(len(values) == 1 for values in found.values()), line
        rows.append({"note": int(number), **{key: values[0] for key, values in found.items()}})
    return rows


def solve(prompt: str) -> list[Row]:
    """Solve a problem from the user's text alone."""
    rows, instruction = read_notes(prompt), prompt.splitlines()[-1]
    if match := re.search(r"a quantity (over|under) (\d+)", instruction):
        bound = int(match[2])
        rows = [r for r in rows if (r["quantity"] > bound) == (match[1] == "over")]
        rows = [r for r in rows if r["quantity"] != bound]
    else:
        match = re.search(r"any (colour|item|city) but (\w+)", instruction)
        assert match, instruction
        rows = [r for r in rows if r[match[1]] != match[2]]
    return sorted(rows, key=lambda r: r["quantity"], reverse="highest" in instruction)


def parse_answer(answer: str, output_format: str) -> list[Row]:
    """Read rows in any of the three formats."""
    if output_format == "JSON":
        return json.loads(answer)
    if output_format == "dataclass":
        namespace: dict[str, Any] = {"dataclass": dataclass}
        exec(answer, namespace)
        return [asdict(row) for row in namespace["rows"]]
    rows: list[Row] = []
    for line in answer.splitlines():
        key, value = line[2:].split(": ")
        if line.startswith("- "):
            rows.append({})
        rows[-1][key] = int(value) if value.isdigit() else value
    return rows


@pytest.fixture(scope="module")
def asset() -> Iterator[tuple[Any, Any]]:
    yield load_tiny_reasoner()


@pytest.fixture(scope="module")
def problems() -> list[TinyReasonerProblem]:
    return tiny_reasoner_prompts(200, seed=77)


def test_generator_is_deterministic() -> None:
    first = tiny_reasoner_prompts(20, seed=5)
    assert first == tiny_reasoner_prompts(20, seed=5)
    assert first[:7] == tiny_reasoner_prompts(7, seed=5)
    assert not {p.prompt for p in first} & {p.prompt for p in tiny_reasoner_prompts(20, seed=6)}


def test_generator_output_is_pinned() -> None:
    # The published figures hold for these problems; a change to the generator must show.
    texts = [f"{p.prompt}\n{p.completion}" for p in tiny_reasoner_prompts(50, seed=2024)]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    assert digest == PINNED_DIGEST


def test_generator_covers_the_task(problems: list[TinyReasonerProblem]) -> None:
    assert {p.output_format for p in problems} == {"JSON", "dataclass", "YAML"}
    assert {p.direction for p in problems} == {"highest", "lowest"}
    assert {p.condition.attribute for p in problems} == set(FIELDS[2:])
    assert {p.condition.relation for p in problems} == {"over", "under", "not"}
    assert {len(p.notes) for p in problems} == {5, 6, 7, 8}


def test_problem_size_is_bounded() -> None:
    for num_notes in (1, 10):
        with pytest.raises(ValueError, match="num_notes"):
            generate_problem(random.Random(0), num_notes)


def test_answers_follow_from_the_prompt(problems: list[TinyReasonerProblem]) -> None:
    for problem in problems:
        rows = parse_answer(problem.answer, problem.output_format)
        assert rows
        assert rows == solve(problem.prompt)
        assert all(tuple(row) == FIELDS for row in rows)


def test_small_problems_keep_a_note() -> None:
    for problem in tiny_reasoner_prompts(200, seed=3, min_notes=2, max_notes=3):
        assert solve(problem.prompt) == parse_answer(problem.answer, problem.output_format) != []


def test_cot_examines_one_note_a_line(problems: list[TinyReasonerProblem]) -> None:
    for problem in problems:
        plan, *lines, closing = problem.cot_lines
        assert plan.startswith("Plan: ") and closing.startswith("Done: ")
        assert len(lines) == len(problem.notes)
        kept = solve(problem.prompt)
        order = re.findall(r"(\d)=(\d\d)", closing)
        assert order == [(str(row["note"]), str(row["quantity"])) for row in kept]
        for left, sign, right in re.findall(r"(\d\d) ([<=>]) (\d\d)\b", "\n".join(lines)):
            assert sign == "<=>"[(int(left) > int(right)) - (int(left) < int(right)) + 1]


def test_draft_answers_approach_the_answer(problems: list[TinyReasonerProblem]) -> None:
    for problem in problems:
        expected = solve(problem.prompt)
        for num_lines in range(len(problem.cot_lines) + 1):
            draft = parse_answer(problem.draft_answer(num_lines), problem.output_format)
            assert sorted(draft, key=str) == sorted(expected, key=str)
        assert problem.draft_answer(len(problem.cot_lines)) == problem.answer
        as_listed = [row for row in read_notes(problem.prompt) if row in expected]
        assert parse_answer(problem.draft_answer(0), problem.output_format) == as_listed


def test_generator_needs_no_torch() -> None:
    # A bare parent package stands in for the real one, whose imports are not the point here.
    code = (
        "import sys, types\n"
        "sys.modules['ssr_hf'] = parent = types.ModuleType('ssr_hf')\n"
        "parent.__path__ = [sys.argv[1]]\n"
        "import ssr_hf.assets\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    package = TINY_REASONER_DIR.parent.parent
    subprocess.run([sys.executable, "-c", code, str(package)], check=True)


def test_asset_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in TINY_REASONER_DIR.iterdir()}
    assert {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= files.keys()
    assert sum(files.values()) <= MAX_BYTES


def test_asset_loads_in_the_requested_type(asset: tuple[Any, Any]) -> None:
    model, _ = asset
    assert model.dtype == torch.float32
    assert not model.training
    assert load_tiny_reasoner(torch.bfloat16)[0].dtype == torch.bfloat16


def test_tokenizer_is_lossless(asset: tuple[Any, Any], problems: list[TinyReasonerProblem]) -> None:
    _, tokenizer = asset
    texts = [f"{p.prompt}\n{p.completion}" for p in problems[:20]]
    texts += [" two  spaces\n\n\ttab ", "déjà vu — 漢字 🙂", "don't , stop ."]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_auto_tokenizer_is_the_same(
    asset: tuple[Any, Any], problems: list[TinyReasonerProblem]
) -> None:
    # A model type has a default tokenizer class, which must not replace the trained one.
    auto = AutoTokenizer.from_pretrained(TINY_REASONER_DIR)
    for problem in problems[:20]:
        assert auto.encode(problem.completion) == asset[1].encode(problem.completion)


def test_values_are_single_tokens(asset: tuple[Any, Any]) -> None:
    _, tokenizer = asset
    values = [*NAMES, *COLOURS, *ITEMS, *CITIES, *map(str, range(1, 100))]
    assert all(len(tokenizer.encode(value)) == 1 for value in values)


def test_chat_template_opens_the_reasoning(asset: tuple[Any, Any]) -> None:
    model, tokenizer = asset
    problem = tiny_reasoner_prompts(1, seed=0)[0]
    text = tokenizer.apply_chat_template(
        problem.messages, add_generation_prompt=True, tokenize=False
    )
    assert text == f"<|user|>{problem.prompt}<|assistant|><think>\n"
    think, close = tokenizer.convert_tokens_to_ids(["<think>", CLOSE])
    ids = tokenizer.encode(f"{text}{problem.completion}")
    assert ids.count(think) == ids.count(close) == 1
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id not in ids
    closed = tokenizer.apply_chat_template(
        [*problem.messages, {"role": "assistant", "content": "Hi"}], tokenize=False
    )
    assert closed == f"<|user|>{problem.prompt}<|assistant|>Hi<|endoftext|>"


def generate(asset: tuple[Any, Any], texts: list[str]) -> list[str]:
    model, tokenizer = asset
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=600, do_sample=False)
    new = output[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def test_asset_reasons_answers_and_drafts(asset: tuple[Any, Any]) -> None:
    _, tokenizer = asset
    held_out = tiny_reasoner_prompts(6, seed=99)
    prompts = [
        tokenizer.apply_chat_template(p.messages, add_generation_prompt=True, tokenize=False)
        for p in held_out
    ]
    answers = [text.partition(CLOSE)[2].strip() for text in generate(asset, prompts)]
    exact = sum(answer == p.answer for answer, p in zip(answers, held_out, strict=True))
    assert exact >= 5

    cut_short = [
        "".join([prompt, *(f"{line}\n" for line in p.cot_lines[:3]), CLOSE])
        for prompt, p in zip(prompts, held_out, strict=True)
    ]
    drafts = [text.strip() for text in generate(asset, cut_short)]
    rows_shared = [
        set(draft.splitlines()) & set(p.answer.splitlines())
        for draft, p in zip(drafts, held_out, strict=True)
    ]
    assert sum(map(bool, rows_shared)) >= 5
    assert any(draft != answer for draft, answer in zip(drafts, answers, strict=True))


def test_threads_that_hinder_each_other_are_given_up_at_once() -> None:
    """Half a minute of measuring on a machine that other programs use."""
    calls: list[int] = []

    class Contended:
        device = torch.device("cpu")

        def __call__(self, ids: torch.Tensor) -> None:
            calls.append(torch.get_num_threads())
            time.sleep(0.001 if calls[-1] == 1 else 0.02)

    before = torch.get_num_threads()
    try:
        assert fit_threads(Contended()) == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert calls.count(2) == 9
