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
        cache = self.model_kwargs.get("cache")
        return self.returns_dict or bool(getattr(cache, "_is_user_defined", False))

    @property
    def keeps_hidden_states(self) -> bool:
        """Whether hidden states are returned."""
        return self.returns_dict and bool(self.generation_config.output_hidden_states)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end the text."""
        eos = getattr(self.generation_config, "_eos_token_tensor", None)
        return frozenset() if eos is None else frozenset(eos.flatten().tolist())

    @property
    def pure_processors(self) -> LogitsProcessorList:
        """The processors without side effects, which a draft may call, too."""
        return LogitsProcessorList(
            processor
            for processor in self.logits_processor
            if type(processor) in compat.SIDE_EFFECT_FREE_PROCESSORS
        )

    @property
    def longest_text(self) -> int:
        """Most tokens of a text that may hold candidates or drafts, prompt included."""
        config = self.model.config.get_text_config()
        positions = [
            getattr(config, "max_position_embeddings", None),
            # Phi-3 rebuilds its whole cache where a text crosses this length.
            getattr(config, "original_max_position_embeddings", None),
        ]
        limits = [limit - self._n_unseen for limit in positions if limit is not None]
        if self.stopping_criteria.max_length is not None:
            limits.append(self.stopping_criteria.max_length)
        return min(limits, default=2**62)

    @property
    def _n_unseen(self) -> int:
        """Positions of the prompt that have no id: those of a given cache or of embeddings."""
        position_ids = self.model_kwargs.get("position_ids")
        if position_ids is None:
            return 0
        return max(0, int(position_ids.max()) + 1 - self.input_ids.shape[1])
