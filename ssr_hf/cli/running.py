"""One generation, plain or self-speculative, timed the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import ssr_hf

from .loading import Session
from .options import GenerationOptions
from .prompts import Request

_WARM_UP_TOKENS = 12

OnTokens = Callable[[Sequence[int], Sequence[str]], None]


class Watch:
    """A streamer that notes when each token arrives and passes tokens on as they come.

    Time spent on passing them on, such as drawing, is left out of its clock.

    Args:
        on_tokens (`Callable`, *optional*): Gets token ids and, for each, who proposed it.
    """

    def __init__(self, on_tokens: OnTokens | None = None) -> None:
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self._on_tokens = on_tokens
        self._prompt_is_next = True
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Seconds since the watch was made."""
        return time.perf_counter() - self._origin

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, then every emitted token."""
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        self.times.append(self.now())
        self.token_ids.extend(value.flatten().tolist())

    def end(self) -> None:
        """Nothing is left to be passed on."""

    def pass_on(self, sources: Sequence[str]) -> None:
        """Passes the newest tokens on, one per source."""
        if self._on_tokens is None:
            return
        before = time.perf_counter()
        self._on_tokens(self.token_ids[-len(sources) :], sources)
        self._origin += time.perf_counter() - before


class PlainWatch(Watch):
    """Watches plain generate: every token is the model's own."""

    def put(self, value: torch.Tensor) -> None:
        n_before = len(self.token_ids)
        super().put(value)
        if len(self.token_ids) > n_before:
            self.pass_on(("model",))


class SpeculativeWatch(Watch):
    """Watches self-speculation: tokens arrive in rounds."""

    def on_round(self, entry: ssr_hf.Round) -> None:
        """The tokens of one round are complete."""
        self.pass_on(entry.token_sources)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one generation gave.

    Args:
        token_ids (`tuple[int, ...]`): The new tokens.
        times (`tuple[float, ...]`): When each of them was there, in seconds.
        seconds (`float`): The whole call.
        speculation (`SpeculationStats`, *optional*): None for plain generate.
        cache_layers (`tuple[str, ...]`): Class name of every layer of the cache.
    """

    token_ids: tuple[int, ...]
    times: tuple[float, ...]
    seconds: float
    speculation: ssr_hf.SpeculationStats | None
    cache_layers: tuple[str, ...]

    @property
    def stats(self) -> ssr_hf.SpeculationStats:
        """What self-speculation did; only of a self-speculative run."""
        assert self.speculation is not None, "plain generate has no statistics"
        return self.speculation

    @property
    def forwards(self) -> int:
        """Forwards of the model; plain generate needs one per token."""
        return len(self.token_ids) if self.speculation is None else self.speculation.forwards

    def answer_seconds(self, thinking_tokens: int) -> float:
        """Seconds after the token that ended thinking."""
        began = self.times[thinking_tokens - 1] if thinking_tokens else 0.0
        return self.seconds - began


def run_plain(
    session: Session,
    request: Request,
    options: GenerationOptions,
    thinking_budget: int | None,
    on_tokens: OnTokens | None = None,
) -> Run:
    """Runs plain generate; a thinking budget is kept by the public logits processor."""
    extra: dict[str, Any] = {}
    if thinking_budget is not None:
        n_prompt = request.input_ids.shape[1]
        extra["logits_processor"] = [
            ssr_hf.ThinkingBudgetLogitsProcessor(session.markers, thinking_budget, n_prompt)
        ]
    return _run(session, request, options, PlainWatch(on_tokens), extra)


def run_speculative(
    session: Session,
    request: Request,
    options: GenerationOptions,
    config: ssr_hf.SelfSpeculationConfig,
    on_tokens: OnTokens | None = None,
) -> Run:
    """Runs generate with self-speculation.

    Raises:
        `UnsupportedError`: The model or its cache cannot be accelerated.
    """
    extra = {"self_speculation": config, "tokenizer": session.tokenizer}
    return _run(session, request, options, SpeculativeWatch(on_tokens), extra)


def warm_up(
    session: Session,
    request: Request,
    options: GenerationOptions,
    config: ssr_hf.SelfSpeculationConfig,
) -> None:
    """Takes what only a first call costs, such as probing the model, out of the figures."""
    shortest = replace(request, max_new_tokens=min(_WARM_UP_TOKENS, request.max_new_tokens))
    run_plain(session, shortest, options, config.thinking_budget)
    # What the warm-up writes must not be replayed by the run that is shown.
    run_speculative(session, shortest, options, config.without_history())


def _run(
    session: Session,
    request: Request,
    options: GenerationOptions,
    watch: Watch,
    extra: dict[str, Any],
) -> Run:
    torch.manual_seed(options.seed)
    model: Any = session.model
    output = model.generate(
        input_ids=request.input_ids,
        attention_mask=torch.ones_like(request.input_ids),
        max_new_tokens=request.max_new_tokens,
        return_dict_in_generate=True,
        streamer=watch,
        **options.generate_kwargs(),
        **extra,
    )
    if session.model.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = watch.now()
    cache = getattr(output, "cache", None)
    return Run(
        token_ids=tuple(output.sequences[0, request.input_ids.shape[1] :].tolist()),
        times=tuple(watch.times),
        seconds=seconds,
        speculation=getattr(output, "speculation", None),
        cache_layers=tuple(type(layer).__name__ for layer in getattr(cache, "layers", ())),
    )
