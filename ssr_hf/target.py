"""The model together with its cache: what a forward needs, and nothing about the text's meaning.

The cache holds a committed prefix. Committed tokens that it does not hold yet are *pending* and are
fed with the next forward, in front of that round's candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import compat
from .cache.checkpoint import Checkpoint, stop_recording
from .cache.fork import cache_tensors, fork
from .cache.growth import amortise
from .cache.growth import settle as settle_growth

if TYPE_CHECKING:
    from transformers import Cache, GenerationConfig, PreTrainedModel
    from transformers.utils import ModelOutput

    from .tokens import TokenSequence


class RoundCheckpoint(Protocol):
    """The cache before a forward, until it is known what stays of it."""

    def keep(self, n_kept: int) -> int:
        """Keeps the first `n_kept` tokens that were fed; returns how many the cache holds."""

    def restore(self) -> None:
        """Puts the cache back as it was, also after a forward that failed half-way."""


class Target:
    """Runs forwards for one generation and keeps its cache equal to the committed text.

    Args:
        model (`PreTrainedModel`): The model whose tokens are generated.
        sequence (`TokenSequence`): The text; `Target` reads it, the commit rule writes it.
        model_kwargs (`dict[str, Any]`): What `generate` prepared for the forward, cache included.
        keeps_hidden_states (`bool`): Whether `hidden_states` is filled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sequence: TokenSequence,
        model_kwargs: dict[str, Any],
        keeps_hidden_states: bool = False,
    ) -> None:
        self.model = model
        self.sequence = sequence
        self.n_pending = 0
        self.kwargs = model_kwargs
        self.n_fed = 0  # tokens of the last forward, in each row
        self._checkpoint: RoundCheckpoint | None = None
        self._outputs: ModelOutput | None = None
        self._n_read = 0  # positions of the last forward that were known before it
        # Per committed token the states of every layer, as plain `generate` returns them.
        self.hidden_states: tuple[tuple[torch.Tensor, ...], ...] | None = (
            () if keeps_hidden_states else None
        )

    @property
    def cache(self) -> Cache:
        """The cache of the model; available after `prefill`."""
        return self.kwargs["cache"]

    @property
    def outputs(self) -> ModelOutput:
        """What the model returned last; valid until the next forward."""
        assert self._outputs is not None, "no forward has run yet"
        return self._outputs

    def prefill(self, generation_config: GenerationConfig) -> torch.Tensor:
        """Reads the prompt; returns the logits `[1, 1, V]` of its last position."""
        self._outputs = compat.prefill(
            self.model, self.sequence.ids, generation_config, self.kwargs
        )
        self.kwargs["cache"] = compat.returned_cache(self.model, self._outputs)
        amortise(self.cache)
        return self._outputs.logits[:, -1:]

    def forward(self, candidate_ids: tuple[int, ...] = ()) -> torch.Tensor:
        """Feeds the pending tokens and the candidates.

        Returns:
            `torch.Tensor` of shape `(1, m + 1, V)`: Logits that judge each of the `m` candidates
            and select the token after them.
        """
        n_candidates = len(candidate_ids)
        self._checkpoint = None
        if n_candidates:
            self._checkpoint = Checkpoint(self.cache, self.n_pending + n_candidates)
        input_ids = self.sequence.with_candidates(candidate_ids)
        kwargs = compat.grow_kwargs(self.model, self.kwargs, n_candidates, None)
        self._outputs = compat.forward(self.model, input_ids, self.n_pending + n_candidates, kwargs)
        self._n_read, self.n_fed = self.n_pending, self.n_pending + n_candidates
        return self._outputs.logits[:, -n_candidates - 1 :]

    def forward_rows(
        self, input_ids: torch.Tensor, kwargs: dict[str, Any], checkpoint: RoundCheckpoint
    ) -> torch.Tensor:
        """Feeds rows `[2, n]`, of which row 0 begins with the pending tokens; see `TwoRows`.

        Args:
            input_ids (`torch.Tensor` of shape `(2, n)`): What to feed.
            kwargs (`dict[str, Any]`): Arguments of the forward for these rows.
            checkpoint (`RoundCheckpoint`): Told by `keep` how many tokens of row 0 were kept.

        Returns:
            `torch.Tensor` of shape `(2, n, V)`: Logits at every token.
        """
        n_tokens = input_ids.shape[1]
        self._checkpoint = checkpoint
        self._outputs = compat.forward(self.model, input_ids, n_tokens, kwargs)
        self._n_read, self.n_fed = self.n_pending, n_tokens
        return self._outputs.logits[:, -n_tokens:]

    def keep(self, n_committed: int) -> None:
        """Follows a commit of `n_committed` tokens after the last forward.

        The last committed token is never in the cache yet: plain `generate` feeds it with the next
        step, too.
        """
        if self.hidden_states is not None:
            self.hidden_states += tuple(self._states_of(index) for index in range(n_committed))
        n_kept = self.n_pending + n_committed - 1
        n_in_cache = n_kept
        if self._checkpoint is not None:
            n_in_cache = self._checkpoint.keep(n_kept)
            self._checkpoint = None
        self.n_pending = n_kept - n_in_cache + 1
        self.kwargs = compat.grow_kwargs(self.model, self.kwargs, n_committed, self._outputs)

    def _states_of(self, index: int) -> tuple[torch.Tensor, ...]:
        """States `[1, 1, H]` that gave the `index`-th committed token; `[1, T, H]` for a prompt.

        The last token that was known before the forward gave the first one.
        """
        layers = self.outputs.hidden_states
        if self._n_read == 0:
            return tuple(layers)
        first = self._n_read - 1 + index
        return tuple(states[:1, first : first + 1] for states in layers)

    def settle(self) -> int:
        """Feeds pending tokens but the last, so that the cache is as plain `generate` leaves it.

        A forward that fails half-way leaves the cache as it was.

        Returns:
            `int`: Forwards that this took, 0 or 1.
        """
        if self.n_pending <= 1:
            return 0
        n_tokens = self.n_pending - 1
        kwargs = dict(self.kwargs)
        for name in compat.PER_TOKEN_KWARGS:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., :-1]
        checkpoint = Checkpoint(self.cache, n_tokens)
        try:
            compat.forward(self.model, self.sequence.ids[:, :-1], n_tokens, kwargs)
        except BaseException:
            checkpoint.restore()
            raise
        checkpoint.keep(n_tokens)
        self.n_pending = 1
        return 1

    def abandon_round(self) -> None:
        """Puts the cache back as it was before a forward that no commit followed."""
        if self._checkpoint is not None:
            self._checkpoint.restore()
            self._checkpoint = None

    def close(self, keeps_cache: bool) -> None:
        """Leaves an ordinary cache without candidates or recording, also after an exception.

        Args:
            keeps_cache (`bool`): Whether the cache outlives the generation.
        """
        self.abandon_round()
        if self.kwargs.get("cache") is not None:
            stop_recording(self.cache)
            settle_growth(self.cache, keeps_cache)

    def fork(self, sequence: TokenSequence) -> Target:
        """An independent target on a forked cache.

        Args:
            sequence (`TokenSequence`): The committed text of this target and what follows it in the
                fork; the tokens that follow are pending there.

        Returns:
            `Target`: Shares no state that either of the two writes.
        """
        n_added = len(sequence) - len(self.sequence)
        kwargs = compat.grow_kwargs(self.model, self.kwargs, n_added, None)
        child = Target(self.model, sequence, {**kwargs, "cache": fork(self.cache)})
        child.n_pending = self.n_pending + n_added
        return child

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the cache."""
        return cache_tensors(self.cache)

    def n_positions(self) -> int:
        """Positions of the text: more than ids after a prefilled cache or embeddings."""
        mask = self.kwargs.get("attention_mask")
        if mask is not None:
            return mask.shape[-1]
        if all(self.cache.is_linear):
            return len(self.sequence)
        return self.cache.get_seq_length() + self.n_pending
