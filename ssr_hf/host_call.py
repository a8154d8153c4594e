"""What `generate` prepared for one decoding, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import LogitsProcessorList

from . import compat

if TYPE_CHECKING:
    import torch
    from transformers import (
        GenerationConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True, slots=True)
class HostCall:
    """One call of `generate`, as it reaches a decoding function.

    Args:
        model (`PreTrainedModel`): The model.
        input_ids (`torch.LongTensor` of shape `(1, T)`): The prompt.
        logits_processor (`LogitsProcessorList`): In the order in which plain decoding runs them.
        stopping_criteria (`StoppingCriteriaList`): All of them.
        generation_config (`GenerationConfig`): With every default filled in.
        model_kwargs (`dict[str, Any]`): For the forward; the cache included.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Given by the user.
        streamer (`BaseStreamer`, *optional*): Given by the user.
    """

    model: PreTrainedModel
    input_ids: torch.LongTensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase | None = None
    streamer: BaseStreamer | None = None

    @property
    def returns_dict(self) -> bool:
        """Whether more than the sequences is returned."""
        return bool(self.generation_config.return_dict_in_generate)

    @property
    def keeps_cache(self) -> bool:
        """Whether the cache outlives the call: it is returned, or it is the user's."""
        return self.returns_dict or compat.is_given_by_user(self.model_kwargs.get("cache"))

    @property
    def keeps_hidden_states(self) -> bool:
        """Whether hidden states are returned."""
        return self.returns_dict and bool(self.generation_config.output_hidden_states)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end the text."""
        return compat.eos_token_ids(self.generation_config)

    @property
    def pure_processors(self) -> LogitsProcessorList:
        """The processors without side effects, which a draft may call, too."""
        return LogitsProcessorList(
            processor
            for processor in self.logits_processor
            if type(processor) in compat.SIDE_EFFECT_FREE_PROCESSORS
        )

    def decode_plainly(self, logits_processor: LogitsProcessorList, synced_gpus: bool) -> Any:
        """What `generate` does without a decoding function."""
        return compat.sample(
            self.model,
            self.input_ids,
            logits_processor=logits_processor,
            stopping_criteria=self.stopping_criteria,
            generation_config=self.generation_config,
            synced_gpus=synced_gpus,
            streamer=self.streamer,
            **self.model_kwargs,
        )

    @property
    def longest_text(self) -> int:
        """Most tokens of a text that may hold candidates or drafts, prompt included."""
        n_unseen = self._n_unseen
        n_positions = self.input_ids.shape[1] + n_unseen
        longest = compat.longest_uniform_text(self.model, n_positions) - n_unseen
        limit = self.stopping_criteria.max_length
        return longest if limit is None else min(longest, limit)

    @property
    def _n_unseen(self) -> int:
        """Positions of the prompt that have no id: those of a given cache or of embeddings."""
        position_ids = self.model_kwargs.get("position_ids")
        if position_ids is None:
            return 0
        return max(0, int(position_ids.max()) + 1 - self.input_ids.shape[1])
