"""Several threads on one enabled model, and calls inside of calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import build_model, random_prompt
from helpers import LANES, declare, enabled, generate, pair_tokenizer, run_fast
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from ssr_hf import SelfSpeculationConfig

N_THREADS = 4


def _in_threads(tasks: list[Callable[[], Any]]) -> list[Any]:
    """Runs all tasks at once; raises the first error."""
    results: list[Any] = [None] * len(tasks)
    gate = threading.Barrier(len(tasks))

    def run(index: int) -> None:
        try:
            gate.wait()
            results[index] = tasks[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_threads_give_their_serial_results(family: str, lane: str) -> None:
    """Per-call state on the model, the config or a module: calls that mix their texts or caches."""
    model = build_model(family)
    declared = declare(family)
    prompts = [random_prompt(model, 7 + index, seed=index) for index in range(N_THREADS)]
    config = declared.config(lane=lane, draft_interval=5, max_draft_tokens=5)
    plain = [generate(model, prompt).sequences.tolist() for prompt in prompts]
    before = {*dir(model), *dir(model.config), *dir(model.generation_config)}
    during: set[str] = set()

    def task(prompt: Tensor) -> Callable[[], Any]:
        def run() -> Any:
            output = generate(model, prompt, self_speculation=config)
            during.update(dir(model), dir(model.config), dir(model.generation_config))
            return output.sequences.tolist()

        return run

    with enabled(model):
        fast = _in_threads([task(prompt) for prompt in prompts])
    assert fast == plain
    assert during - before == set()
    assert not [thread for thread in threading.enumerate() if "ssr_hf" in thread.name]


def test_threads_with_other_settings_keep_them_apart() -> None:
    """A setting of one call that another call picks up."""
    model = build_model("llama")
    declared = declare("llama")
    configs = [
        declared.config(),
        declared.config(reuse="none"),
        declared.config(thinking_budget=8),
        SelfSpeculationConfig(end_of_thinking=[253, 254], draft_budget=3, adaptive=False),
    ]
    serial = [run_fast(model, declared.prompt, config) for config in configs]

    def task(config: SelfSpeculationConfig) -> Callable[[], Any]:
        return lambda: generate(model, declared.prompt, self_speculation=config)

    with enabled(model):
        outputs = _in_threads([task(config) for config in configs])
    for output, expected in zip(outputs, serial, strict=True):
        assert output.sequences.tolist() == expected.sequences.tolist()
        assert output.speculation.forwards == expected.speculation.forwards


class Nested(LogitsProcessor):
    """Generates with the same model in the middle of a generation."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.results: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] in (12, 20, 35):
            self.results.append(self.call())
        return scores


@pytest.mark.parametrize("lane", LANES)
def test_a_call_inside_of_a_call(lane: str) -> None:
    """An outer generation that finds the cache, the lane or the wrapper of the inner one."""
    model = build_model("mistral")
    declared = declare("mistral")
    config = declared.config(lane=lane)

    def inner() -> Any:
        return generate(model, declared.prompt, self_speculation=config).sequences

    nested = Nested(inner)
    with enabled(model):
        outer = generate(
            model,
            declared.prompt,
            self_speculation=config,
            logits_processor=LogitsProcessorList([nested]),
        ).sequences
    assert len(nested.results) == 3
    for sequences in (outer, *nested.results):
        assert torch.equal(sequences, outer)
    assert outer[0, 9:].tolist() == list(declared.new_ids)


def test_threads_share_a_tokenizer() -> None:
    """A fast tokenizer that is "already borrowed" while several threads look for markers."""
    model = build_model("lfm2")
    declared = declare("lfm2", n_new=6)
    tokenizer = pair_tokenizer()
    config = declared.config(draft_interval=5, max_draft_tokens=5)
    texts = (tokenizer.decode(declared.marker), tokenizer.decode(list(declared.new_ids[20:22])))
    configs = [replace(config, end_of_thinking=text) for text in texts * 2]

    def task(config: SelfSpeculationConfig) -> Callable[[], Any]:
        def run() -> Any:
            arguments = {"tokenizer": tokenizer, "stop_strings": ["pppp"]}
            output = generate(model, declared.prompt, self_speculation=config, **arguments)
            return output.sequences[0, 9:].tolist()

        return run

    with enabled(model):
        results = _in_threads([task(config) for config in configs])
    assert results == [list(declared.new_ids)] * 4
