"""Index of token sequences that proposes spans for verification.

Text that is about to be written often repeats text that is already known: the draft, the prompt,
the chain of thought, the answer so far. The index finds the longest suffix of the context that
occurs in such a source and follows its most frequent continuation (suffix decoding, arXiv
2411.04975; with a single occurrence this is prompt lookup).

Each source has its own suffix automaton of bounded depth. A state is the class of all contexts that
end at the same places; its transitions are the tokens that came next. Every state knows how often
it was reached and which continuation leads, so neither appending nor proposing ever scans a source:
the cost of a token depends on the depth, not on the length, and repeated text adds no states.
`scripts/bench_suffix_index.py` measures both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from .errors import ConfigError, message

_ROOT = 0
HISTORY = "history"
# Tokens of a path that still count as its context, beyond the match that it starts from.
_PATH_CONTEXT = 16


@dataclass(frozen=True, slots=True)
class Span:
    """A proposal of [`SuffixIndex.propose`]: tokens that may follow the context.

    Args:
        token_ids (`tuple[int, ...]`): The proposed tokens, at least one.
        match_length (`int`): Tokens of the context's suffix that were found, at most `max_match`.
        source (`str`): Name of the source that all tokens come from.
        probabilities (`tuple[float, ...]`): For each token the estimated probability that the span
            is right up to and including it, in (0, 1), never rising.
    """

    token_ids: tuple[int, ...]
    match_length: int
    source: str
    probabilities: tuple[float, ...]

    @property
    def probability(self) -> float:
        """Estimated probability that the whole span is right."""
        return self.probabilities[-1]


class _Automaton:
    """Suffix automaton of one source, exact for contexts of at most `depth` tokens.

    Longer contexts are not told apart; their length is stored as `depth + 1`.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        # One entry per state; the root is the empty context.
        self.transitions: list[dict[int, int]] = [{}]  # token that came next -> state reached
        self.link: list[int] = [_ROOT]  # state of the longest suffix that ends at more places
        self.length: list[int] = [0]  # tokens of the state's longest context
        self.token: list[int] = [-1]  # last token of the state's contexts
        self.count: list[int] = [0]  # times the state was reached
        self.followed: list[int] = [0]  # times any token came next
        self.leader: list[int] = [_ROOT]  # state reached most often from here, ties: most recently
        self.tail = _ROOT  # the last `depth` tokens of the open sequence

    def append(self, token: int) -> None:
        """Extend the open sequence by one token."""
        tail = self.tail
        reached = self.transitions[tail].get(token)
        if reached is None:
            reached = self._add(tail, token)
        elif self.length[reached] > self.length[tail] + 1:
            reached = self._split(tail, token, reached)
        self._record(tail, token)
        self.tail = self._bounded(reached)

    def _bounded(self, state: int) -> int:
        """The state of the last `depth` tokens of the contexts of `state`."""
        shorter = self.link[state]
        return shorter if self.length[shorter] == self.depth else state

    def _new_state(self, token: int, length: int) -> int:
        self.transitions.append({})
        self.link.append(_ROOT)
        self.length.append(length)
        self.token.append(token)
        self.count.append(0)
        self.followed.append(0)
        self.leader.append(_ROOT)
        return len(self.link) - 1

    def _add(self, tail: int, token: int) -> int:
        """Create the state of `token` after a context that it never followed."""
        transitions, link = self.transitions, self.link
        state = self._new_state(token, min(self.length[tail], self.depth) + 1)
        node = tail
        while token not in transitions[node]:
            transitions[node][token] = state
            if node == _ROOT:
                return state
            node = link[node]
        known = transitions[node][token]
        if self.length[known] > self.length[node] + 1:
            known = self._split(node, token, known)
        link[state] = known
        return state

    def _split(self, node: int, token: int, known: int) -> int:
        """Move the contexts that `node` and its suffixes reach out of `known`, to a new state.

        They now end at a place where the longer contexts of `known` do not. `_record` always comes
        next and makes the new state the leader wherever `known` was.
        """
        transitions, link = self.transitions, self.link
        state = self._new_state(token, self.length[node] + 1)
        transitions[state] = transitions[known].copy()
        link[state] = link[known]
        self.count[state] = self.count[known]
        self.followed[state] = self.followed[known]
        self.leader[state] = self.leader[known]
        link[known] = state
        while transitions[node].get(token) == known:
            transitions[node][token] = state
            if node == _ROOT:
                break
            node = link[node]
        return state

    def _record(self, node: int, token: int) -> None:
        """Count `token` as the continuation of `node` and of all its suffixes."""
        transitions, link, count = self.transitions, self.link, self.count
        followed, leader = self.followed, self.leader
        counted = _ROOT
        while True:
            reached = transitions[node][token]
            if reached != counted:
                count[reached] += 1
                counted = reached
            if node == _ROOT:
                return
            followed[node] += 1
            # This continuation is the newest, so an equal count is enough to take the lead.
            if count[reached] >= count[leader[node]]:
                leader[node] = reached
            node = link[node]

    def match(self, context: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of `context` after which a token came."""
        transitions, link, length = self.transitions, self.link, self.length
        node, matched = _ROOT, 0
        for token in context:
            reached = transitions[node].get(token)
            while reached is None and node != _ROOT:
                node = link[node]
                matched = length[node]
                reached = transitions[node].get(token)
            if reached is not None:
                node, matched = reached, matched + 1
        # The context is usually the tail of a source itself; after that occurrence nothing came.
        while node != _ROOT and not self.followed[node]:
            node = link[node]
            matched = length[node]
        return node, matched

    def follow(
        self, node: int, matched: int, max_tokens: int, min_probability: float
    ) -> tuple[list[int], list[float]]:
        """The leading path from `node`, a match of `matched` tokens, and its probabilities."""
        path: list[int] = []
        probabilities: list[float] = []
        share = 1.0
        while len(path) < max_tokens and self.followed[node]:
            reached = self.leader[node]
            share *= self.count[reached] / self.followed[node]
            probability = share * matched / (matched + len(path) + 1)
            if probability < min_probability:
                break
            probabilities.append(probability)
            path.append(self.token[reached])
            node = self._bounded(reached)
        return path, probabilities


class History:
    """What the model wrote in earlier calls, as a source of spans in later ones.

    Holds the last `max_tokens` tokens, give or take one text; the older half goes at once. Safe for
    several threads. A copy of a history is empty.

    Args:
        max_tokens (`int`, *optional*, defaults to 8192):
            Tokens to hold; each takes 250 to 400 bytes.

    Example:

    ```python
    >>> from ssr_hf.suffix_index import History, SuffixIndex
    >>> history = History()
    >>> history.add([5, 6, 7, 8])
    >>> SuffixIndex(history=history).propose([1, 5, 6], max_tokens=64, factor=1).token_ids
    (7, 8)

    ```
    """

    def __init__(self, max_tokens: int = 8192) -> None:
        self.max_tokens = max_tokens
        self.lock = threading.Lock()
        self._vocabulary_size = 0
        self._forget()

    def __reduce__(self) -> tuple[type[History], tuple[int]]:
        return History, (self.max_tokens,)

    @staticmethod
    def _empty() -> _Automaton:
        return _Automaton(2 * _PATH_CONTEXT)

    def _forget(self) -> None:
        self._older = self._empty()
        self._newer = self._empty()
        self._n_newer = 0

    def bind(self, vocabulary_size: int) -> None:
        """Says which ids exist; texts in another vocabulary are forgotten."""
        with self.lock:
            if vocabulary_size != self._vocabulary_size:
                self._vocabulary_size = vocabulary_size
                self._forget()

    @property
    def automata(self) -> tuple[_Automaton, _Automaton]:
        """What to search while `lock` is held."""
        return self._newer, self._older

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes a text of its own."""
        with self.lock:
            if self._n_newer >= self.max_tokens // 2:
                self._older, self._newer, self._n_newer = self._newer, self._empty(), 0
            self._newer.tail = _ROOT
            for token in token_ids[-(self.max_tokens // 2) :]:
                self._newer.append(token)
            self._n_newer += len(token_ids)


class SuffixIndex:
    """Proposes the tokens that followed the longest matching suffix of a context.

    Sources are separate: no match reaches from one into another, nor from one sequence of a source
    into the next. Every call sees all tokens appended before it. Not safe for use by two threads.

    Args:
        max_match (`int`, *optional*, defaults to 16):
            Longest context suffix that is matched, in tokens.
        sources (`Sequence[str]`, *optional*):
            Names of sources in order of preference at equal match length. A source that is not
            named here ranks behind these, in the order of first use.
        history (`History`, *optional*):
            Texts of earlier calls; they rank last, as the source `"history"`.

    Raises:
        `ConfigError`: `max_match` is less than 1.

    Example:

    ```python
    >>> from ssr_hf.suffix_index import SuffixIndex
    >>> index = SuffixIndex(sources=("draft", "answer"))
    >>> index.append("draft", [5, 6, 7, 8, 9])
    >>> index.propose([1, 6, 7], max_tokens=64, factor=1)
    Span(token_ids=(8, 9), match_length=2, source='draft', probabilities=(0.6666666666666666, 0.5))

    ```
    """

    def __init__(
        self, *, max_match: int = 16, sources: Sequence[str] = (), history: History | None = None
    ) -> None:
        if max_match < 1:
            accepted = "An integer of at least 1 is accepted"
            raise ConfigError(message(f"max_match is {max_match!r}", accepted, "Set max_match=16"))
        self.max_match = max_match
        self._automata = {source: self._empty() for source in sources}
        self._history = history

    def _empty(self) -> _Automaton:
        return _Automaton(self.max_match + _PATH_CONTEXT)

    def _automaton(self, source: str) -> _Automaton:
        if source not in self._automata:
            self._automata[source] = self._empty()
        return self._automata[source]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources in order of preference."""
        return tuple(self._automata)

    def start(self, source: str) -> None:
        """Begin a new sequence of `source`; the sequences before it stay."""
        self._automaton(source).tail = _ROOT

    def append(self, source: str, token_ids: Iterable[int]) -> None:
        """Extend the open sequence of `source`."""
        append = self._automaton(source).append
        for token in token_ids:
            append(token)

    def propose(
        self,
        context: Sequence[int],
        *,
        max_tokens: int,
        factor: float,
        min_probability: float = 0.0,
    ) -> Span | None:
        """The span to verify after `context`, or `None` where there is none.

        The longest match decides the source, at equal length the preferred one does. From there the
        most frequent continuation is followed, at equal frequency the most recent one; the match
        and the path itself are the context of the next choice.

        A span of `n` tokens after a match of `m` has the probability `m / (m + n)` times, for each
        token, the share of its context's occurrences that it followed. The first factor is the
        product of `k / (k + 1)` over the matched lengths `k = m ... m + n - 1`: on real text a
        token whose context of `k` tokens occurred once is right about that often. So `factor` alone
        is the bound `1 / (1 + factor)` on the probability of a path without alternatives.

        Args:
            context (`Sequence[int]`):
                The true tokens so far, of which the last `max_match` are read. Calls need not
                continue one another.
            max_tokens (`int`):
                Most tokens of a span.
            factor (`float`):
                A match of `m` tokens proposes at most `factor * m` tokens.
            min_probability (`float`, *optional*, defaults to 0.0):
                A span ends before its probability falls below this. A token is worth its place when
                its probability exceeds the cost of one more candidate over the cost of one emitted
                token.

        Returns:
            `Span` or `None`: One to `min(max_tokens, int(factor * match_length))` tokens.
        """
        suffix = context[-self.max_match :]
        with self._history.lock if self._history is not None else nullcontext():
            found: tuple[str, _Automaton] | None = None
            node, matched = _ROOT, 0
            for source, automaton in self._searched():
                state, length = automaton.match(suffix)
                if length > matched:
                    found, node, matched = (source, automaton), state, length
                if matched == len(suffix):
                    break  # no other match is longer
            if found is None:
                return None
            source, automaton = found
            budget = int(min(max_tokens, factor * matched))
            path, probabilities = automaton.follow(node, matched, budget, min_probability)
        return Span(tuple(path), matched, source, tuple(probabilities)) if path else None

    def _searched(self) -> Iterator[tuple[str, _Automaton]]:
        """Sources in order of preference, the history last."""
        yield from self._automata.items()
        if self._history is not None:
            for automaton in self._history.automata:
                yield HISTORY, automaton
