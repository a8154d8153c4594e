"""What most tests share: declaring a marker later, running both ways, comparing everything.

The oracle is plain `generate` with the same arguments. A test therefore runs plain greedy first and
then names a token that it produced as the marker, as EOS or as a stop string.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from families import build_model, random_prompt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Cache,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

import ssr_hf
from ssr_hf import SelfSpeculationConfig, ThinkingBudgetLogitsProcessor, ThinkingMarkers
from ssr_hf.candidates import Proposer
from ssr_hf.lanes import LANE_TYPES, DraftWriter
from ssr_hf.records import Draft

PROMPT_LENGTH = 9
NEW_TOKENS = 48
SEED = 0
TOLERANCE = 1e-3
LANES = tuple(LANE_TYPES)
# How far a draft of the stream lane gets is a matter of time: its counts are not compared.
STEADY_LANES = tuple(name for name in LANES if name != "stream")

Output = GenerateDecoderOnlyOutput


@dataclass(frozen=True)
class Declared:
    """A prompt whose plain text holds a token that can be named the end-of-thinking marker.

    Args:
        prompt (`Tensor` of shape `(1, T)`): The prompt.
        new_ids (`tuple[int, ...]`): What plain `generate` writes after it.
        n_thinking (`int`): Tokens before the marker; the marker does not occur among them.
    """

    prompt: Tensor
    new_ids: tuple[int, ...]
    n_thinking: int

    @property
    def marker(self) -> list[int]:
        """The end-of-thinking marker, one token."""
        return [self.new_ids[self.n_thinking]]

    @property
    def answer(self) -> tuple[int, ...]:
        """What plain `generate` writes after the marker."""
        return self.new_ids[self.n_thinking + 1 :]

    def config(self, **settings: Any) -> SelfSpeculationConfig:
        """Settings with this marker; drafts branch early and are short unless told otherwise."""
        defaults = {"draft_budget": 5, "max_draft_tokens": 16, "adaptive": False}
        return SelfSpeculationConfig(end_of_thinking=self.marker, **{**defaults, **settings})


@functools.cache
def declare(
    family: str,
    do_sample: bool = False,
    first: int = 14,
    last: int = 24,
    n_new: int = 1,
    length: int = PROMPT_LENGTH,
) -> Declared:
    """Finds a prompt and a marker.

    Args:
        first (`int`): Fewest tokens before the marker.
        last (`int`): Most tokens before the marker.
        n_new (`int`): The marker and the tokens after it, this many in all, do not occur earlier.
        length (`int`): Tokens of the prompt.
    """
    model = build_model(family)
    for seed in range(200):
        prompt = random_prompt(model, length, seed)
        torch.manual_seed(SEED)
        sequences = generate(model, prompt, do_sample=do_sample).sequences
        new_ids = tuple(sequences[0, length:].tolist())
        position = find_marker(new_ids, first, last, n_new, prompt[0].tolist())
        if position is not None:
            return Declared(prompt, new_ids, position)
    raise LookupError(f"no prompt of {family} has new tokens there")


def find_marker(
    new_ids: Sequence[int],
    first: int = 14,
    last: int = 24,
    n_new: int = 1,
    prompt_ids: Sequence[int] = (),
) -> int | None:
    """The last place between `first` and `last` from which `n_new` tokens were not seen before."""
    for position in range(last, first - 1, -1):
        places = range(position, position + n_new)
        if all(new_ids[place] not in (*prompt_ids, *new_ids[:place]) for place in places):
            return position
    return None


@contextlib.contextmanager
def enabled(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """`ssr_hf.enable` for the length of a block: models are shared between tests."""
    ssr_hf.enable(model)
    try:
        yield model
    finally:
        ssr_hf.disable(model)


def generate(model: PreTrainedModel, input_ids: Tensor | None, **arguments: Any) -> Any:
    """`model.generate` with an explicit mask, deterministic lengths and a dict as result."""
    defaults: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    if input_ids is not None:
        defaults["input_ids"] = input_ids
        defaults["attention_mask"] = torch.ones_like(input_ids)
    return model.generate(**{**defaults, **arguments})


@dataclass(frozen=True)
class Pair:
    """The outputs of plain `generate` and of self-speculation for the same call."""

    plain: Output
    fast: ssr_hf.SelfSpeculativeOutput

    @property
    def stats(self) -> ssr_hf.SpeculationStats:
        """What speculation did."""
        assert self.fast.speculation is not None
        return self.fast.speculation


def run_both(
    model: PreTrainedModel,
    input_ids: Tensor | None,
    config: SelfSpeculationConfig,
    fresh: Callable[[], dict[str, Any]] = dict,
    seed: int = SEED,
    **arguments: Any,
) -> Pair:
    """Runs plain `generate`, then self-speculation, from the same seed.

    Args:
        fresh (`Callable`): Makes the arguments that keep a state (processors, criteria, caches),
            once for each of the two runs.
    """
    length = 0 if input_ids is None else input_ids.shape[1]
    plain_arguments = {**arguments, **fresh()}
    if config.thinking_budget is not None:
        budget = plain_budget(config, length)
        processors = [*plain_arguments.pop("logits_processor", []), budget]
        plain_arguments["logits_processor"] = LogitsProcessorList(processors)
    torch.manual_seed(seed)
    plain = generate(model, input_ids, **plain_arguments)
    return Pair(plain, run_fast(model, input_ids, config, seed, **arguments, **fresh()))


def run_fast(
    model: PreTrainedModel,
    input_ids: Tensor | None,
    config: SelfSpeculationConfig,
    seed: int = SEED,
    **arguments: Any,
) -> ssr_hf.SelfSpeculativeOutput:
    """One self-speculative generation from `seed`."""
    with enabled(model):
        torch.manual_seed(seed)
        output: ssr_hf.SelfSpeculativeOutput = generate(
            model, input_ids, self_speculation=config, **arguments
        )
    return output


def plain_budget(config: SelfSpeculationConfig, length: int) -> ThinkingBudgetLogitsProcessor:
    """The processor that gives plain `generate` the thinking budget of `config`."""
    markers = ThinkingMarkers(start=(), end=(tuple(config.end_of_thinking or ()),))
    assert config.thinking_budget is not None
    return ThinkingBudgetLogitsProcessor(markers, config.thinking_budget, length)


def assert_same(pair: Pair) -> None:
    """Compares the text, everything recorded per token, and the cache."""
    plain, fast = pair.plain, pair.fast
    assert fast.sequences.tolist() == plain.sequences.tolist()
    assert fast.sequences.dtype == plain.sequences.dtype
    for name in ("scores", "logits"):
        assert_same_steps(getattr(plain, name), getattr(fast, name))
    assert_same_hidden_states(plain.hidden_states, fast.hidden_states)
    assert fast.attentions is None
    assert plain.attentions is None
    assert_same_cache(plain.cache, fast.cache)


def assert_same_steps(plain: tuple[Tensor, ...] | None, fast: tuple[Tensor, ...] | None) -> None:
    """One tensor `[1, V]` per emitted token, equal up to the order of additions."""
    if plain is None or fast is None:
        assert plain is fast
        return
    assert len(fast) == len(plain)
    for plain_step, fast_step in zip(plain, fast, strict=True):
        assert_close(plain_step, fast_step)


def assert_same_hidden_states(plain: Any, fast: Any) -> None:
    """One tuple over layers per emitted token."""
    if plain is None or fast is None:
        assert plain is fast
        return
    assert len(fast) == len(plain)
    for plain_step, fast_step in zip(plain, fast, strict=True):
        assert len(fast_step) == len(plain_step)
        for plain_layer, fast_layer in zip(plain_step, fast_step, strict=True):
            assert_close(plain_layer, fast_layer)


def assert_close(plain: Tensor, fast: Tensor) -> None:
    """Equal in shape, type and infinities; else within `TOLERANCE` of the spread.

    Two scores that a warper left may lie close together, so their size counts as spread, too.
    """
    assert fast.shape == plain.shape
    assert fast.dtype == plain.dtype
    finite = plain.isfinite()
    assert torch.equal(fast.isfinite(), finite)
    assert torch.equal(fast[~finite], plain[~finite])
    if finite.sum() < 2:
        return
    spread = torch.maximum(plain[finite].std(), plain[finite].abs().max()).clamp_min(1e-6)
    assert ((fast[finite] - plain[finite]).abs().max() / spread).item() < TOLERANCE


def assert_same_cache(plain: Cache, fast: Cache) -> None:
    """The same tokens in every layer, one row, and nothing left over from speculation."""
    assert type(fast) is type(plain)
    for plain_layer, fast_layer in zip(plain.layers, fast.layers, strict=True):
        assert type(fast_layer) is type(plain_layer)
        assert not getattr(fast_layer, "record_past", False)
        plain_states, fast_states = layer_states(plain_layer), layer_states(fast_layer)
        assert fast_states.keys() == plain_states.keys()
        for name, plain_state in plain_states.items():
            assert_close(plain_state, fast_states[name])
    if not all(plain.is_linear):
        assert fast.get_seq_length() == plain.get_seq_length()


def layer_states(layer: Any) -> dict[str, Tensor]:
    """Every tensor that a cache layer holds, by name."""
    states: dict[str, Tensor] = {}
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            states[name] = value
        elif isinstance(value, dict):
            states.update(
                (f"{name}.{key}", state)
                for key, state in value.items()
                if isinstance(state, Tensor)
            )
    return states


@contextlib.contextmanager
def scripted_drafts(script: Callable[[int, int], int]) -> Iterator[None]:
    """Makes draft `n` write `script(i, n)` as its token `i`, whatever the model thinks of it."""

    def select(writer: DraftWriter, position_logits: Tensor) -> int:
        return script(len(writer.token_ids), writer.branch_point.stage)

    with (
        mock.patch.object(DraftWriter, "_best", lambda *_: None),
        mock.patch.object(DraftWriter, "_select", select),
    ):
        yield


@contextlib.contextmanager
def collected_drafts() -> Iterator[list[Draft]]:
    """The usable drafts of a generation, in order."""
    drafts: list[Draft] = []
    add_draft = Proposer.add_draft

    def spy(proposer: Proposer, draft: Draft) -> None:
        drafts.append(draft)
        add_draft(proposer, draft)

    with mock.patch.object(Proposer, "add_draft", spy):
        yield drafts


def true_up_to(answer: Sequence[int], n_true: int) -> Callable[[int, int], int]:
    """A script that follows `answer` for `n_true` tokens and is wrong from there on.

    `n_true` of at least `len(answer)` is an oracle, 0 an anti-oracle. Each draft is wrong in its
    own way, so that a later one inherits the true tokens of an earlier one and no more.
    """

    def script(position: int, stage: int) -> int:
        if position >= len(answer):
            return 1
        if position < n_true:
            return answer[position]
        return (answer[position] + 1 + stage) % 256

    return script


@functools.cache
def pair_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each two letters from `aa` to `pp`: its id says which, as text has no gaps."""
    letters = "abcdefghijklmnop"
    vocabulary = {
        first + second: 16 * i + j
        for i, first in enumerate(letters)
        for j, second in enumerate(letters)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="aa"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(".."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="aa")


class RecordingStreamer(BaseStreamer):
    """Keeps every event, in order: `("put", shape, ids)` and `("end",)`."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def put(self, value: Tensor) -> None:
        self.events.append(("put", tuple(value.shape), value.flatten().tolist()))

    def end(self) -> None:
        self.events.append(("end",))

    @property
    def n_ends(self) -> int:
        """How often the stream was closed."""
        return self.events.count(("end",))
