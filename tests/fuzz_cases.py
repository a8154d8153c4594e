"""Random calls of `generate` for the fuzz test: model, prompt, processors, stops, settings.

A case is a function of a seed and a number. What it names - markers, end tokens, stop strings,
banned words - are mostly tokens that the model really writes, found by a first plain run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from families import FAMILIES, VOCAB_SIZE, build_model
from helpers import pair_tokenizer

from ssr_hf.config import REUSE_MODES, SUFFIX_SOURCES
from ssr_hf.lanes import LANE_TYPES

LONGEST_PROMPT = 24
# Tokens that the first runs write: enough to name words, then all that may be compared.
FIRST_LOOK, LONGEST_TEXT = 16, 64
N_WEIGHTS = 3

Arguments = dict[str, Any]


@dataclass
class Case:
    """One call of `generate`, with and without self-speculation.

    Args:
        family (`str`): Which model.
        weights (`int`): Seed of its weights.
        seed (`int`): Where both generations start.
        prompt (`torch.Tensor` of shape `(1, T)`): Without padding.
        n_padding (`int`): Padding tokens on the left.
        n_cached (`int`): Leading tokens of the prompt that a cache of the user already holds.
        arguments (`dict`): Everything that keeps no state.
        witness, counted, streams: Which stateful parts take part.
        settings (`dict`): Of `SelfSpeculationConfig`.
        n_true (`int`, *optional*): Drafts follow the answer for so many tokens and are wrong from
            there on; the model writes them when None.
    """

    family: str
    weights: int
    seed: int
    prompt: torch.Tensor
    n_padding: int = 0
    n_cached: int = 0
    arguments: Arguments = field(default_factory=dict)
    witness: int | None = None
    counted: int | None = None
    streams: bool = False
    settings: Arguments = field(default_factory=dict)
    n_true: int | None = None

    def describe(self) -> str:
        """The case in one line."""
        shown = {**vars(self), "prompt": self.prompt[0].tolist()}
        shown["arguments"] = {
            name: value.__name__ if callable(value) else value
            for name, value in self.arguments.items()
            if name != "tokenizer"
        }
        return str(shown)


def draw_case(seed: int, number: int, family: str | None = None) -> Case:
    """Draws case `number` of the series `seed`; `family` fixes the model."""
    rng = random.Random(f"{seed}:{number}")
    chosen = family or _family(rng)
    case = Case(chosen, rng.randrange(N_WEIGHTS), rng.randrange(2**31), _prompt(rng))
    case.arguments.update(_selection(rng))
    written = probe(case, FIRST_LOOK)
    words = _Words(rng, case.prompt[0].tolist(), written)
    case.arguments.update(_processors(rng, words))
    case.witness = rng.choice([None, None, 3, 5])
    # The text has changed; markers and stops are chosen from the one that will be written.
    words = _Words(rng, case.prompt[0].tolist(), probe(case, LONGEST_TEXT))
    case.settings = _settings(rng, words)
    judges = case.settings["reuse"].startswith("prefix")
    if judges and not case.arguments["do_sample"] and rng.random() < 0.1:
        # Greedy selection ignores it.
        case.settings["acceptance"] = "rejection_sampling"
    case.arguments.update(_stops(rng, words))
    case.counted = rng.choice([None, None, None, None, 5, 15])
    case.streams = rng.random() < 0.5
    case.n_true = rng.choice([None, None, None, 0, 3, 12, LONGEST_TEXT])
    case.arguments.update(_outputs(rng))
    _place_prompt(rng, case)
    return case


def probe(case: Case, n_tokens: int) -> list[int]:
    """The first tokens that plain `generate` writes for the case as far as it is drawn."""
    model = build_model(case.family, case.weights)
    torch.manual_seed(case.seed)
    arguments = {**case.arguments, "max_new_tokens": n_tokens}
    mask = torch.ones_like(case.prompt)
    try:
        sequences = model.generate(case.prompt, attention_mask=mask, **arguments)
    except (RuntimeError, ValueError):
        # Processors that leave no token: the case shows that both runs fail alike.
        return [1, 2, 3]
    return sequences[0, case.prompt.shape[1] :].tolist()


class _Words:
    """Draws tokens and short spans, mostly such as the text contains."""

    def __init__(self, rng: random.Random, prompt: list[int], written: list[int]) -> None:
        self.written = written
        self._rng = rng
        self._prompt = prompt

    def span(self, longest: int, earliest: float = 0.0) -> list[int]:
        """One to `longest` tokens in a row, from the part of the text behind `earliest`."""
        first = int(earliest * (len(self.written) - 1))
        at = self._rng.randrange(first, len(self.written))
        return self.written[at : at + self._rng.randint(1, longest)]

    def marker(self) -> list[int]:
        """A span that mostly is written for the first time, and not at once."""
        middle = range(len(self.written) // 8, len(self.written) * 3 // 4)
        known = (*self._prompt, *self.written)
        new = [at for at in middle if known.index(self.written[at]) == len(self._prompt) + at]
        if not new or self._rng.random() < 0.2:
            return self.span(4)
        at = self._rng.choice(new)
        return self.written[at : at + self._rng.choice([1, 1, 1, 2, 4])]

    def tokens(self, most: int) -> list[int]:
        """One to `most` tokens, most of them written."""
        pool = [*self.written, *self._prompt, self._rng.randrange(1, VOCAB_SIZE)]
        return [self._rng.choice(pool) for _ in range(self._rng.randint(1, most))]


def _family(rng: random.Random) -> str:
    exact = [name for name, row in FAMILIES.items() if row.multi_token_exact]
    return rng.choice(exact if rng.random() < 0.95 else list(FAMILIES))


def _prompt(rng: random.Random) -> torch.Tensor:
    """Random tokens; half of the prompts repeat themselves, so that spans are found early."""
    ids = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, LONGEST_PROMPT))]
    if rng.random() < 0.5:
        ids = (ids[: rng.randint(1, 6)] * LONGEST_PROMPT)[: len(ids)]
    return torch.tensor([ids])


def _selection(rng: random.Random) -> Arguments:
    if rng.random() < 0.5:
        return {"do_sample": False}
    chosen = _some(
        rng,
        temperature=lambda: rng.choice([0.3, 0.7, 1.5]),
        top_k=lambda: rng.choice([2, 5, 40]),
        top_p=lambda: rng.choice([0.5, 0.9]),
        min_p=lambda: rng.choice([0.02, 0.2]),
        typical_p=lambda: 0.8,
        epsilon_cutoff=lambda: 0.01,
        eta_cutoff=lambda: 0.01,
    )
    return {"do_sample": True, "top_k": 0, **chosen}


def _processors(rng: random.Random, words: _Words) -> Arguments:
    if rng.random() < 0.35:
        return {}
    return _some(
        rng,
        chance=0.12,
        repetition_penalty=lambda: rng.choice([0.9, 1.1, 1.5]),
        encoder_repetition_penalty=lambda: rng.choice([0.8, 1.2]),
        no_repeat_ngram_size=lambda: rng.choice([2, 3, 4]),
        bad_words_ids=lambda: [words.span(3) for _ in range(rng.randint(1, 3))],
        suppress_tokens=lambda: words.tokens(3),
        begin_suppress_tokens=lambda: words.tokens(2),
        sequence_bias=lambda: [[words.span(2), rng.choice([-5.0, 2.0, 8.0])]],
        prefix_allowed_tokens_fn=lambda: _allowed(rng.choice([2, 3, 7])),
        renormalize_logits=lambda: True,
        remove_invalid_values=lambda: True,
        guidance_scale=lambda: rng.choice([1.5, 3.0]),
    )


def _allowed(modulus: int) -> Callable[[int, torch.Tensor], list[int]]:
    def allowed(batch_id: int, input_ids: torch.Tensor) -> list[int]:
        banned = (int(input_ids[-1]) + len(input_ids)) % modulus
        return [token for token in range(VOCAB_SIZE) if token % modulus != banned]

    return allowed


def _settings(rng: random.Random, words: _Words) -> Arguments:
    """Of `SelfSpeculationConfig`: schedules that fit into a text of some 60 tokens."""
    settings: Arguments = {
        "end_of_thinking": words.marker(),
        "draft_budget": rng.choice([1, 2, 3, 5, 8, 13, (1, 2), (3, 9), (2, 5, 20)]),
        "draft_interval": rng.choice([None, None, 1, 2, 5, 11]),
        "max_draft_tokens": rng.choice([2, 2, 3, 5, 8, 20, 200]),
        "lane": rng.choice(["auto", *LANE_TYPES]),
        "reuse": rng.choice([*REUSE_MODES, *["prefix+suffix"] * 6]),
        "adaptive": rng.random() < 0.2,
    }
    settings |= _some(
        rng,
        chance=0.2,
        start_of_thinking=lambda: words.span(2),
        thinking_budget=lambda: rng.choice([0, 2, 4, 10, 14, 25, 40]),
        suffix=lambda: {
            "max_match": rng.choice([1, 2, 4, 16]),
            "max_tokens": rng.choice([1, 3, 10, 64]),
            "factor": rng.choice([0.5, 1.0, 4.0, 8.0]),
            "min_probability": rng.choice([0.0, 0.2, 0.6]),
            "sources": tuple(rng.sample(SUFFIX_SOURCES, rng.randint(1, 4))),
        },
    )
    if settings["end_of_thinking"] == settings.get("start_of_thinking"):
        del settings["start_of_thinking"]
    budgets = settings["draft_budget"]
    last = budgets[-1] if isinstance(budgets, tuple) else budgets
    if settings.get("thinking_budget", last + 1) <= last:
        # Together they are refused; without one of them the other decides.
        del settings[rng.choice(["thinking_budget", "draft_budget"])]
    return settings


def _stops(rng: random.Random, words: _Words) -> Arguments:
    stops: Arguments = {"max_new_tokens": rng.choice([1, 7, 33, 48, *[LONGEST_TEXT] * 8])}
    stops |= _some(
        rng,
        chance=0.2,
        eos_token_id=lambda: words.span(2, earliest=0.4),
        stop_strings=lambda: _texts(rng, words),
    )
    if "eos_token_id" in stops:
        stops |= _some(
            rng,
            min_new_tokens=lambda: rng.choice([1, 5, 20]),
            exponential_decay_length_penalty=lambda: (rng.choice([3, 12]), 1.2),
            forced_eos_token_id=lambda: stops["eos_token_id"][0],
        )
    if "stop_strings" in stops:
        stops["tokenizer"] = pair_tokenizer()
    return stops


def _texts(rng: random.Random, words: _Words) -> list[str]:
    """Stop strings of one to three tokens; some begin or end inside a token."""
    texts = []
    for _ in range(rng.randint(1, 2)):
        text = pair_tokenizer().decode(words.span(3, earliest=0.4))
        texts.append(text[rng.randint(0, 1) :] or text)
    return texts


def _outputs(rng: random.Random) -> Arguments:
    if rng.random() < 0.3:
        return {"return_dict_in_generate": False}
    wanted = _some(
        rng,
        output_scores=lambda: True,
        output_logits=lambda: True,
        output_hidden_states=lambda: True,
    )
    return {"return_dict_in_generate": True, **wanted}


def _place_prompt(rng: random.Random, case: Case) -> None:
    """Pads the prompt, or puts a part of it into a cache that the user brings."""
    place = rng.random()
    if place < 0.15:
        case.n_padding = rng.randint(1, 9)
    elif place < 0.3 and case.prompt.shape[1] > 1:
        case.n_cached = rng.randint(1, case.prompt.shape[1] - 1)


def _some(rng: random.Random, chance: float = 0.25, **options: Callable[[], Any]) -> Arguments:
    """Each option with the same chance."""
    return {name: draw() for name, draw in options.items() if rng.random() < chance}
