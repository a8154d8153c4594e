"""Exceptions and interrupts in every forward and every callback: nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from families import build_model
from helpers import (
    LANES,
    STEADY_LANES,
    Declared,
    RecordingStreamer,
    declare,
    enabled,
    generate,
    layer_states,
    pair_tokenizer,
    scripted_drafts,
    true_up_to,
)
from torch import Tensor
from transformers import Cache, PreTrainedModel, TextIteratorStreamer

from ssr_hf import compat
from ssr_hf import rows as rows_module
from ssr_hf import target as target_module
from ssr_hf.cache import fork as fork_module
from ssr_hf.cache.growth import GrowingLayer
from ssr_hf.cache.layers import LAYER_KINDS
from ssr_hf.lanes import DraftWriter
from ssr_hf.tokens import TokenSequence

CACHED = 4
every_lane = pytest.mark.parametrize("lane", LANES)


class InjectedError(Exception):
    """An error that no other code raises."""


class Fault:
    """Raises when it is called for the `at`-th time; 0 never raises."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at = at
        self.error = error
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error(f"call {self.at}")


@contextlib.contextmanager
def _in_the_forward(model: PreTrainedModel, fault: Fault) -> Iterator[None]:
    """Calls `fault` in the middle of every forward: earlier layers have written their cache."""
    handle = model.model.layers[-1].register_forward_pre_hook(fault)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _watched_forks() -> Iterator[list[weakref.ref[Cache]]]:
    """Weak references to every forked cache."""
    forks: list[weakref.ref[Cache]] = []

    def spy(cache: Cache) -> Cache:
        forked = fork_module.fork(cache)
        forks.append(weakref.ref(forked))
        return forked

    with mock.patch.object(target_module, "fork", spy):
        yield forks


def _arguments(declared: Declared, lane: str) -> dict[str, Any]:
    """Settings under which every phase and every kind of forward occurs."""
    config = declared.config(
        lane=lane, draft_budget=(2, 8), max_draft_tokens=5, suffix={"max_tokens": 3}
    )
    return {"self_speculation": config, "max_new_tokens": declared.n_thinking + 10}


def _declare(family: str) -> Declared:
    return declare(family, first=11, last=12)


def _run(declared: Declared, model: PreTrainedModel, **arguments: Any) -> Any:
    with scripted_drafts(true_up_to(declared.answer, 2)):
        return generate(model, declared.prompt, **arguments)


@torch.no_grad()
def _user_cache(model: PreTrainedModel, declared: Declared) -> Cache:
    cache: Cache = model(declared.prompt[:, :CACHED], use_cache=True).cache
    return cache


def _assert_true_prefix(cache: Cache, reference: Cache) -> None:
    """Every attention layer holds the first tokens of the true text and nothing else."""
    for layer, expected in zip(cache.layers, reference.layers, strict=True):
        assert not isinstance(layer, GrowingLayer)
        assert not getattr(layer, "record_past", False)
        if not hasattr(layer, "keys"):
            for states in (layer.conv_states, layer.recurrent_states):
                assert all(state.shape[0] == 1 for state in states.values())
            continue
        length = layer.get_seq_length()
        assert length >= CACHED
        assert layer.keys.shape[0] == 1
        for name in ("keys", "values"):
            states = getattr(expected, name)[..., :length, :]
            torch.testing.assert_close(getattr(layer, name), states, atol=1e-3, rtol=1e-3)


class _Scarce:
    """Runs out of memory in the forwards of drafts: of two rows, or of another cache."""

    def __init__(self, at: int) -> None:
        self._fault = Fault(at, torch.OutOfMemoryError)
        self.parent: Cache | None = None

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs["cache"]
        self.parent = self.parent or cache
        if cache is not self.parent or args[0].shape[0] == 2:
            self._fault()


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@every_lane
def test_a_draft_without_memory_is_given_up(lane: str, family: str, at: int) -> None:
    """A generation that plain `generate` would finish, ended by work that is optional."""
    model, declared = build_model(family), _declare(family)
    arguments = _arguments(declared, lane)
    plain = generate(model, declared.prompt, max_new_tokens=arguments["max_new_tokens"])
    with enabled(model):
        _run(declared, model, **arguments)  # the probes of the model
        hook = model.model.layers[-1].register_forward_pre_hook(_Scarce(at), with_kwargs=True)
        try:
            fast = _run(declared, model, **arguments)
        finally:
            hook.remove()
    assert torch.equal(fast.sequences, plain.sequences)
    assert len(fast.speculation.drafts) <= 2
    assert "a draft was cut: memory ran out" in fast.speculation.notes
    _assert_true_prefix(fast.cache, plain.cache)


@every_lane
def test_a_token_without_memory_ends_its_draft(lane: str) -> None:
    """The same where the logits of a draft are copied for processors."""
    model, declared = build_model("llama"), _declare("llama")
    arguments = _arguments(declared, lane)
    plain = generate(model, declared.prompt, max_new_tokens=arguments["max_new_tokens"])
    fault = Fault(3, torch.OutOfMemoryError)
    write = DraftWriter.write

    def scarce(writer: Any, *rest: Any) -> int:
        fault()
        return write(writer, *rest)

    with enabled(model), mock.patch.object(DraftWriter, "write", scarce):
        fast = generate(model, declared.prompt, **arguments)
    assert fault.calls == 3
    assert torch.equal(fast.sequences, plain.sequences)
    assert "a draft was cut: memory ran out" in fast.speculation.notes
    _assert_true_prefix(fast.cache, plain.cache)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_settling_that_fails_leaves_the_cache_as_it_was(family: str) -> None:
    """Memory that runs out after some layers were written, in a call that goes on."""
    model, prompt = build_model(family), _declare(family).prompt
    config = model.generation_config
    settled = []
    for at in (0, 1):
        sequence = TokenSequence(prompt)
        target = target_module.Target(model, sequence, compat.fresh_kwargs(model, prompt, config))
        with torch.no_grad():
            target.prefill(config)
            sequence.append((5, 6, 7))
            target.keep(3)
            target.n_pending = 3
            if at:
                with (
                    _in_the_forward(model, Fault(at, torch.OutOfMemoryError)),
                    pytest.raises(torch.OutOfMemoryError),
                ):
                    target.settle()
                assert target.n_pending == 3
            target.settle()
        target.close(keeps_cache=True)
        settled.append([layer_states(layer) for layer in target.cache.layers])
    torch.testing.assert_close(settled[1], settled[0])


@pytest.mark.parametrize("name", ["fork", "add_row"])
def test_a_fork_without_memory_is_none(name: str) -> None:
    """The same before the first forward of a draft."""
    model, declared = build_model("llama"), _declare("llama")
    lane = "lockstep" if name == "add_row" else "sequential"
    arguments = _arguments(declared, lane)
    plain = generate(model, declared.prompt, max_new_tokens=arguments["max_new_tokens"])
    module = rows_module if name == "add_row" else target_module
    with enabled(model):
        _run(declared, model, **arguments)  # the probes of the model
        fault = mock.Mock(side_effect=torch.OutOfMemoryError("none left"))
        with mock.patch.object(module, name, fault):
            fast = _run(declared, model, **arguments)
    assert torch.equal(fast.sequences, plain.sequences)
    assert fault.call_count == 1
    assert [draft.status for draft in fast.speculation.drafts] == ["discarded"]


@pytest.mark.parametrize("error", [InjectedError, KeyboardInterrupt])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@every_lane
def test_fault_in_every_forward(lane: str, family: str, error: type[BaseException]) -> None:
    """A thread, a fork, a child row or a candidate that outlives the exception; a second end."""
    model, declared = build_model(family), _declare(family)
    arguments = _arguments(declared, lane)
    reference = generate(model, declared.prompt).cache
    with enabled(model), _in_the_forward(model, count := Fault(0, error)):
        expected = _run(declared, model, **arguments).sequences
    threads = threading.active_count()
    with enabled(model), _watched_forks() as forks:
        wrapper = model.generate
        # Interrupts take the same way as errors, and threads are slow: some calls are enough.
        every_call = error is InjectedError and lane in STEADY_LANES
        for at in range(1, count.calls + 1, 1 if every_call else 5):
            cache, streamer = _user_cache(model, declared), RecordingStreamer()
            with _in_the_forward(model, fault := Fault(at, error)):
                try:
                    _run(declared, model, **arguments, cache=cache, streamer=streamer)
                except error as raised:
                    assert str(raised) == f"call {at}"
                else:
                    # The stream lane may need fewer forwards than in the counted run.
                    assert fault.calls < at
            assert streamer.n_ends == 1
            assert model.generate == wrapper
            assert threading.active_count() == threads
            _assert_true_prefix(cache, reference)
        gc.collect()
        assert not [fork for fork in forks if fork() is not None]
        assert torch.equal(_run(declared, model, **arguments).sequences, expected)


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("llama", "logits_processor"),
        ("llama", "streamer"),
        ("qwen3_next", "stopping_criteria"),
    ],
)
@every_lane
def test_fault_in_every_callback(lane: str, family: str, where: str) -> None:
    """Candidates that stay in the cache because the commit failed half-way."""
    model, declared = build_model(family), _declare(family)
    arguments = _arguments(declared, lane)
    reference = generate(model, declared.prompt).cache
    for at in range(1, arguments["max_new_tokens"] + 1, 3):
        fault = Fault(at, InjectedError)
        cache = _user_cache(model, declared)
        with enabled(model), pytest.raises(InjectedError, match=f"call {at}$"):
            _run(declared, model, **arguments, cache=cache, **_callback(where, fault))
        _assert_true_prefix(cache, reference)


def _callback(where: str, fault: Fault) -> dict[str, Any]:
    """The argument of `generate` that calls `fault` once per token."""

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        fault()
        return scores

    def stop(input_ids: Tensor, scores: Any) -> Tensor:
        fault()
        return torch.tensor([False])

    class Streamer(RecordingStreamer):
        def put(self, value: Tensor) -> None:
            if self.events:
                fault()
            super().put(value)

    by_name: dict[str, Callable[[], Any]] = {
        "logits_processor": lambda: [process],
        "stopping_criteria": lambda: [stop],
        "streamer": Streamer,
    }
    return {where: by_name[where]()}


OPERATIONS = ("fork", "reorder_cache", "pad_left", "concatenate", "strip_left")


@pytest.mark.parametrize(
    ("family", "operation"),
    # Rows with recurrent states never part, so that nothing is left to compact.
    [("llama", "compact"), *itertools.product(("llama", "qwen3_next"), OPERATIONS)],
)
def test_memory_that_runs_out_between_two_layers(family: str, operation: str) -> None:
    """One layer has two rows, or padding, and the next one has not."""
    model, declared = build_model(family), _declare(family)
    arguments = _arguments(declared, "lockstep")
    reference = generate(model, declared.prompt).cache
    kinds = [type(kind) for kind in LAYER_KINDS.values()]
    owners = {base for layer in (*LAYER_KINDS, *kinds) for base in layer.__mro__}
    n_layers = len(reference.layers)
    # In the first fork and, as far as there is one, in the next.
    for at in (n_layers, 2 * n_layers):
        cache, fault = _user_cache(model, declared), Fault(at, InjectedError)
        with contextlib.ExitStack() as stack:
            for owner in owners:
                if operation in vars(owner):
                    stack.enter_context(_before(owner, operation, fault))
            stack.enter_context(enabled(model))
            with contextlib.suppress(InjectedError):
                _run(declared, model, **arguments, cache=cache)
        assert fault.calls >= n_layers
        _assert_true_prefix(cache, reference)


@contextlib.contextmanager
def _before(owner: type, operation: str, fault: Fault) -> Iterator[None]:
    """Calls `fault` before each call of one method."""
    original = getattr(owner, operation)

    def wrapper(*args: Any) -> Any:
        fault()
        return original(*args)

    with mock.patch.object(owner, operation, wrapper):
        yield


@every_lane
def test_consumer_of_an_iterator_streamer_finishes(lane: str) -> None:
    """A user interface that waits for ever after an error in the worker."""
    model, declared = build_model("llama"), _declare("llama")
    streamer = TextIteratorStreamer(pair_tokenizer(), timeout=30)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            _run(declared, model, **_arguments(declared, lane), streamer=streamer)
        except InjectedError as error:
            errors.append(error)

    with enabled(model), _in_the_forward(model, Fault(12, InjectedError)):
        worker = threading.Thread(target=work)
        worker.start()
        text = "".join(streamer)
        worker.join(30)
    assert text
    assert [str(error) for error in errors] == ["call 12"]


def test_global_states_are_restored() -> None:
    """Gradients, the random state or the generation mode left changed by an exception."""
    model, declared = build_model("llama"), _declare("llama")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fault = _in_the_forward(model, Fault(15, InjectedError))
    with enabled(model), fault, pytest.raises(InjectedError):
        _run(declared, model, **_arguments(declared, "lockstep"))
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
