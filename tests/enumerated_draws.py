"""The exact distribution of a random program: it runs once for every way its draws can go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

# Branches less likely than this are rounding errors.
PRUNED = 1e-7


def outcomes(run: Callable[[], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Probability of all that `run` may return; each `torch.multinomial` in it is a branch."""
    distribution: dict[tuple[int, ...], float] = defaultdict(float)
    pending: list[tuple[int, ...]] = [()]
    while pending:
        path = pending.pop()
        taken: list[int] = []
        weight = 1.0

        def multinomial(
            probabilities: Tensor,
            num_samples: int,
            generator: torch.Generator | None = None,
            path: tuple[int, ...] = path,
            taken: list[int] = taken,
        ) -> Tensor:
            nonlocal weight
            row = probabilities.double().flatten()
            row = (row / row.sum()).tolist()
            if len(taken) < len(path):
                token_id = path[len(taken)]
            else:
                token_id, *others = (i for i, share in enumerate(row) if share > PRUNED)
                pending.extend((*taken, other) for other in others)
            taken.append(token_id)
            weight *= row[token_id]
            return torch.tensor([token_id]).view(*probabilities.shape[:-1], num_samples)

        with mock.patch.object(torch, "multinomial", multinomial):
            text = run()
        distribution[text] += weight
    return distribution
