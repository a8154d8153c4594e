"""When thinking, drafts, verification, suffix rounds and decoding took place in one generation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import ssr_hf

# From top to bottom of a picture.
KINDS = ("prompt", "thinking", "draft", "verification", "suffix", "decoding")


@dataclass(frozen=True)
class Span:
    """A stretch of time in which one kind of work was done.

    Args:
        kind (`str`): One of `KINDS`: `"prompt"` is its forward, `"thinking"` and `"decoding"` are
            rounds of single tokens before and after the end of thinking, `"draft"` is a draft being
            written, `"verification"` rounds offer a whole draft, `"suffix"` rounds spans of it or
            of other text.
        start (`float`): Seconds since the call began.
        seconds (`float`): How long.
        tokens (`int`): Tokens emitted, or for a draft written, in this time.
        proposed (`int`): Tokens offered.
        accepted (`int`): Offered tokens that were accepted.
        rounds (`int`): Forwards; 0 for a draft.
    """

    kind: str
    start: float
    seconds: float
    tokens: int
    proposed: int = 0
    accepted: int = 0
    rounds: int = 1


def timeline(stats: ssr_hf.SpeculationStats) -> list[Span]:
    """The spans of one generation, neighbouring rounds of a kind joined.

    Args:
        stats (`SpeculationStats`): What the generation reported.

    Returns:
        `list[Span]`: Spans of rounds in order, then those of drafts.
    """
    spans: list[Span] = []
    for entry in stats.rounds:
        span = _span_of(entry)
        if spans and spans[-1].kind == span.kind:
            spans[-1] = _join(spans[-1], span)
        else:
            spans.append(span)
    drafts = [
        Span(
            kind="draft",
            start=draft.start,
            seconds=draft.seconds,
            tokens=draft.n_tokens - draft.n_inherited,
            accepted=draft.accepted_prefix,
            rounds=0,
        )
        for draft in stats.drafts
    ]
    return spans + drafts


def answer_start(stats: ssr_hf.SpeculationStats) -> float | None:
    """When thinking had ended, in seconds since the call began; None if it did not."""
    if not stats.thinking_ended:
        return None
    n_tokens = 0
    for entry in stats.rounds:
        n_tokens += entry.n_committed
        if n_tokens >= stats.thinking_tokens:
            return entry.start + entry.seconds
    return None


def _span_of(entry: ssr_hf.Round) -> Span:
    by_source = {"draft": "verification", "suffix": "suffix"}
    by_phase = {"prefill": "prompt", "thinking": "thinking", "closing": "thinking"}
    kind = by_source.get(entry.source) or by_phase.get(entry.phase, "decoding")
    return Span(
        kind=kind,
        start=entry.start,
        seconds=entry.seconds,
        tokens=entry.n_committed,
        proposed=entry.n_proposed,
        accepted=entry.n_accepted,
    )


def _join(first: Span, second: Span) -> Span:
    return Span(
        kind=first.kind,
        start=first.start,
        seconds=second.start + second.seconds - first.start,
        tokens=first.tokens + second.tokens,
        proposed=first.proposed + second.proposed,
        accepted=first.accepted + second.accepted,
        rounds=first.rounds + second.rounds,
    )


def as_record(stats: ssr_hf.SpeculationStats) -> dict[str, Any]:
    """Rounds, spans and figures, for machines."""
    return {
        "answer_start": answer_start(stats),
        "spans": [asdict(span) for span in timeline(stats)],
        "rounds": [entry._asdict() for entry in stats.rounds],
        "speculation": stats.to_dict(),
    }
