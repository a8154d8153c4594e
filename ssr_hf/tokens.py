"""The text of one generation as token ids, growing without copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MINIMUM_SPARE = 256


class TokenSequence:
    """Committed token ids of one row, as a tensor view and as Python integers.

    `ids` is a view of shape `[1, T]` into a buffer that only ever grows at its end, so that views
    handed to processors, criteria and streamers keep their content.

    Args:
        input_ids (`torch.LongTensor` of shape `(1, T)`): The prompt.
    """

    def __init__(self, input_ids: torch.Tensor) -> None:
        self._buffer = input_ids
        self._length = input_ids.shape[1]
        self.token_ids: list[int] = input_ids[0].tolist()
        self.prompt_length = self._length

    def __len__(self) -> int:
        return self._length

    @property
    def device(self) -> torch.device:
        """Where the ids live: the device of the prompt."""
        return self._buffer.device

    @property
    def ids(self) -> torch.Tensor:
        """The committed ids, `[1, T]`."""
        return self._buffer[:, : self._length]

    def with_candidates(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The committed ids followed by candidates, `[1, T + m]`; valid until the next append."""
        if not token_ids:
            return self.ids
        self._write(token_ids)
        return self._buffer[:, : self._length + len(token_ids)]

    def append(self, token_ids: Sequence[int]) -> None:
        """Commits tokens."""
        self._write(token_ids)
        self._length += len(token_ids)
        self.token_ids.extend(token_ids)

    def _write(self, token_ids: Sequence[int]) -> None:
        end = self._length + len(token_ids)
        if end > self._buffer.shape[1]:
            spare = max(MINIMUM_SPARE, end)
            self._buffer = torch.cat([self.ids, self.ids.new_zeros(1, spare)], dim=1)
        if len(token_ids) == 1:
            self._buffer[0, self._length] = token_ids[0]
        else:
            new_ids = torch.tensor(token_ids, dtype=self._buffer.dtype, device=self.device)
            self._buffer[0, self._length : end] = new_ids
