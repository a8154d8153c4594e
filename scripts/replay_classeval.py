"""Replay the commit rule over pairs of real outputs, to choose span settings without a model.

    python scripts/replay_classeval.py classeval_pairs.jsonl --tokenizer HuggingFaceTB/SmolLM2-135M
    python scripts/replay_classeval.py classeval_pairs.jsonl --tokenizer SmolLM2-135M.Q4_1.gguf

Each line of the file has the text fields `kind`, `model`, `prompt`, `draft` and `final`. The final
text is what the model would write; a round offers candidates, accepts their longest common prefix
with it and adds one token. With prefix reuse the first round offers the whole draft; every other
round offers the span that the setting proposes. The context is the final text so far, the sources
are draft, prompt and final text so far; there is no chain of thought.

One row per setting and kind of pair: emitted tokens per forward (all tokens over all forwards),
accepted tokens of the draft's prefix per pair, and proposed tokens per emitted token, of the whole
draft and of the spans. The last line on stdout is one JSON document.

Stock prompt lookup takes the leftmost match in one text, so it is shown on the prompt alone, as
`generate(prompt_lookup_num_tokens=10)` sees it, and with the draft appended to the prompt, so that
it has the same material as the index.

Tried here and not kept, in tokens per forward on the three kinds against 12.3 / 15.4 / 5.4 of the
index: counts pooled over all sources (11.9 / 14.9 / 5.3), the path chosen from the last `max_match`
tokens only (12.1 / 15.2 / 5.4; 6.8 / 7.8 / 3.7 instead of 7.6 / 8.7 / 3.9 at depth 4), the source
chosen anew at each token (no gain), spans only from matches of two tokens or more (11.2 / 14.2 /
4.9), skipping the newest token when nothing matches it (gain below 0.6 %).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from bench_common import load_tokenizer
from rich.console import Console
from rich.table import Table

from ssr_hf.config import SelfSpeculationConfig, SuffixConfig
from ssr_hf.suffix_index import SuffixIndex

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft and what was written in the end, as token ids."""

    kind: str
    prompt_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    final_ids: tuple[int, ...]


class Proposer(Protocol):
    """Proposes the candidates of a round; `commit` tells it what was emitted since."""

    def propose(self) -> Sequence[int]: ...

    def commit(self, token_ids: Sequence[int]) -> None: ...


class NoSpans:
    """Plain decoding."""

    def __init__(self, pair: Pair) -> None:
        pass

    def propose(self) -> Sequence[int]:
        return ()

    def commit(self, token_ids: Sequence[int]) -> None:
        pass


class IndexSpans:
    """Spans of the suffix index."""

    def __init__(self, pair: Pair, config: SuffixConfig) -> None:
        self._config = config
        self._index = SuffixIndex(max_match=config.max_match, sources=config.sources)
        self._context: list[int] = []
        self._add("draft", pair.draft_ids)
        self._add("prompt", pair.prompt_ids)

    def _add(self, source: str, token_ids: Sequence[int]) -> None:
        if source in self._config.sources:
            self._index.append(source, token_ids)

    def propose(self) -> Sequence[int]:
        span = self._index.propose(
            self._context,
            max_tokens=self._config.max_tokens,
            factor=self._config.factor,
            min_probability=self._config.min_probability,
        )
        return span.token_ids if span else ()

    def commit(self, token_ids: Sequence[int]) -> None:
        self._context.extend(token_ids)
        self._add("answer", token_ids)


class StockSpans:
    """What `transformers.generation.candidate_generator.PromptLookupCandidateGenerator` proposes.

    The tokens after the leftmost occurrence of the last two tokens or else of the last one.
    """

    def __init__(self, text_ids: Sequence[int], num_tokens: int = 10, max_ngram: int = 2) -> None:
        self._text: list[int] = []
        self._num_tokens = num_tokens
        self._max_ngram = max_ngram
        self._first_end: dict[tuple[int, ...], int] = {}  # n-gram -> where it first ended
        self.commit(text_ids)

    def propose(self) -> Sequence[int]:
        n_text = len(self._text)
        for size in range(min(self._max_ngram, n_text - 1), 0, -1):
            end = self._first_end[tuple(self._text[-size:])]
            if end < n_text:
                return self._text[end : end + self._num_tokens]
        return ()

    def commit(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self._text.append(token)
            for size in range(1, min(self._max_ngram, len(self._text)) + 1):
                self._first_end.setdefault(tuple(self._text[-size:]), len(self._text))


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to choose candidates."""

    name: str
    verifies_prefix: bool
    proposer: Callable[[Pair], Proposer]


def index_setting(name: str, config: SuffixConfig, *, verifies_prefix: bool = True) -> Setting:
    return Setting(name, verifies_prefix, lambda pair: IndexSpans(pair, config))


def settings() -> list[Setting]:
    """The settings of the table."""
    default = SuffixConfig()
    return [
        Setting("none", False, NoSpans),
        Setting("prefix only", True, NoSpans),
        index_setting("suffix only", default, verifies_prefix=False),
        Setting("stock prompt lookup", False, lambda pair: StockSpans(pair.prompt_ids)),
        Setting(
            "stock prompt lookup, draft in prompt",
            False,
            lambda pair: StockSpans([*pair.prompt_ids, *pair.draft_ids]),
        ),
        index_setting("reference (4, 16, 4, draft)", SelfSpeculationConfig.reference().suffix),
        index_setting("default", default),
        index_setting("16, 64, 8", SuffixConfig(min_probability=0.0)),
        index_setting("16, 64, 8, p 0.05", SuffixConfig(min_probability=0.05)),
        index_setting("16, 64, 8, p 0.1", SuffixConfig(min_probability=0.1)),
        index_setting("16, 64, 4", SuffixConfig(factor=4.0, min_probability=0.0)),
        index_setting(
            "32, 128, 8, p 0.05", SuffixConfig(max_match=32, max_tokens=128, min_probability=0.05)
        ),
    ]


@dataclass(slots=True)
class Tally:
    """Counts over the replayed pairs of one kind under one setting."""

    pairs: int = 0
    tokens: int = 0
    forwards: int = 0
    accepted_prefix: int = 0
    proposed_draft: int = 0
    proposed_spans: int = 0

    def add(self, other: Tally) -> None:
        self.pairs += other.pairs
        self.tokens += other.tokens
        self.forwards += other.forwards
        self.accepted_prefix += other.accepted_prefix
        self.proposed_draft += other.proposed_draft
        self.proposed_spans += other.proposed_spans

    @property
    def figures(self) -> dict[str, float]:
        """The columns of the table."""
        return {
            "tokens_per_forward": self.tokens / self.forwards,
            "accepted_prefix_per_pair": self.accepted_prefix / self.pairs,
            "draft_tokens_proposed_per_token": self.proposed_draft / self.tokens,
            "span_tokens_proposed_per_token": self.proposed_spans / self.tokens,
        }


def count_accepted(candidate_ids: Sequence[int], true_ids: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n_accepted = 0
    for candidate, true in zip(candidate_ids, true_ids, strict=False):
        if candidate != true:
            break
        n_accepted += 1
    return n_accepted


def replay(pair: Pair, setting: Setting) -> Tally:
    """Emit `pair.final_ids` round by round."""
    proposer = setting.proposer(pair)
    tally = Tally(pairs=1, tokens=len(pair.final_ids))
    n_emitted = 0
    while n_emitted < tally.tokens:
        remaining = pair.final_ids[n_emitted:]
        if setting.verifies_prefix and n_emitted == 0:
            n_accepted = count_accepted(pair.draft_ids, remaining)
            tally.accepted_prefix = n_accepted
            tally.proposed_draft = len(pair.draft_ids)
        else:
            candidate_ids = proposer.propose()
            n_accepted = count_accepted(candidate_ids, remaining)
            tally.proposed_spans += len(candidate_ids)
        tally.forwards += 1
        # The forward that accepts n candidates also gives the token after them.
        emitted = remaining[: n_accepted + 1]
        proposer.commit(emitted)
        n_emitted += len(emitted)
    return tally


def replay_all(pairs: Iterable[Pair], setting: Setting) -> dict[str, Tally]:
    """Tallies by kind of pair, in the order of first appearance."""
    tallies: dict[str, Tally] = {}
    for pair in pairs:
        tallies.setdefault(pair.kind, Tally()).add(replay(pair, setting))
    return tallies


def read_pairs(path: Path, tokenizer: Any) -> list[Pair]:
    """The tokenized pairs of a JSON Lines file."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Pair(
            kind=f"{row['kind']}: {row['model']}",
            prompt_ids=encode(row["prompt"]),
            draft_ids=encode(row["draft"]),
            final_ids=encode(row["final"]),
        )
        for row in rows
    ]


def table_of(kind: str, tallies: dict[str, Tally]) -> Table:
    """One kind of pair, a row per setting."""
    n_pairs = max(tally.pairs for tally in tallies.values())
    table = Table(title=f"{kind} ({n_pairs} pairs)", title_justify="left")
    table.add_column("setting")
    for column in ("tokens / forward", "accepted prefix", "draft / token", "spans / token"):
        table.add_column(column, justify="right")
    for name, tally in tallies.items():
        table.add_row(name, *(f"{figure:.2f}" for figure in tally.figures.values()))
    return table


@app.command()
def main(
    pairs_file: Annotated[Path, typer.Argument(help="JSON Lines file of pairs.", exists=True)],
    tokenizer: Annotated[str, typer.Option(help="Hub id, directory or GGUF file.")],
    limit: Annotated[int | None, typer.Option(help="Use the first pairs only.")] = None,
) -> None:
    """Replay the commit rule over pairs of a draft and a final text."""
    pairs = read_pairs(pairs_file, load_tokenizer(tokenizer))[:limit]
    by_kind: dict[str, dict[str, Tally]] = {}
    for setting in settings():
        for kind, tally in replay_all(pairs, setting).items():
            by_kind.setdefault(kind, {})[setting.name] = tally
    console = Console(width=110)
    for kind, tallies in by_kind.items():
        console.print(table_of(kind, tallies))
    rows = [
        {"kind": kind, "setting": name, **asdict(tally), **tally.figures}
        for kind, tallies in by_kind.items()
        for name, tally in tallies.items()
    ]
    print(json.dumps({"pairs_file": pairs_file.name, "tokenizer": tokenizer, "rows": rows}))


if __name__ == "__main__":
    app()
