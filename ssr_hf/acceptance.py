"""The rejection-sampling rule: sampled drafts are accepted with probability min(1, p / q).

A candidate `x` was drawn from the draft's distribution `q`; the model's own distribution is `p`.
Speculative sampling (arXiv 2211.17192) keeps `x` with probability `min(1, p(x) / q(x))` and else
draws from `max(0, p - q)`, normalised. Both choices together are one distribution per candidate,
from which one token is drawn (`judged_distribution`); averaged over `x` it is `p` exactly. A
candidate without known `q` (a span of the suffix index) stands for a `q` with all mass on it; there
the rule draws from `p` itself, so such candidates need no rule of their own.

A longer chain of thought judges the draft of a shorter one by the same rule. What it selects is a
sample of the longer one's own distribution, and this is what the new draft keeps as its `q`.

All of this is exact only while no decision depends on tokens that are still to be judged: a draft
that is verified only if it did not end early is no sample of `q` any more. With sampled drafts,
therefore, branch points follow from the chain of thought alone, whether or not an earlier draft has
ended, and no round passes a branch point or the beginning or end of thinking (`DraftSchedule`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

# Below this a probability counts as this much, so that no quotient is 0 / 0.
SMALLEST_PROBABILITY = torch.finfo(torch.float32).tiny


def judged_distribution(
    target_probabilities: torch.Tensor, draft_probabilities: torch.Tensor, token_id: int
) -> torch.Tensor:
    """The distribution of the token that stands where a candidate was offered.

    Args:
        target_probabilities (`torch.Tensor` of shape `(V,)`): The model's own distribution, `p`.
        draft_probabilities (`torch.Tensor` of shape `(V,)`): The candidate's own, `q`.
        token_id (`int`): The candidate.

    Returns:
        `torch.Tensor` of shape `(V,)`: `min(1, p / q)` at the candidate, and the rest of the mass
        spread like `max(0, p - q)`.

    Example:

    ```python
    >>> import torch
    >>> from ssr_hf.acceptance import judged_distribution
    >>> p, q = torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5])
    >>> judged_distribution(p, q, token_id=0)
    tensor([0.5000, 0.5000])
    >>> judged_distribution(p, q, token_id=1)
    tensor([0., 1.])

    ```
    """
    quotients = target_probabilities / draft_probabilities.clamp_min(SMALLEST_PROBABILITY)
    accepted = quotients[token_id].clamp_max(1.0)
    residual = (target_probabilities - draft_probabilities).clamp_min(0.0)
    # Without a residual p equals q, and the candidate holds all mass.
    residual *= (1.0 - accepted) / residual.sum().clamp_min(SMALLEST_PROBABILITY)
    residual[token_id] += accepted
    return residual


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drawn token and the distribution it was drawn from.

    Most rows are zero outside a few tokens (top-k, top-p); these are kept without the zeros, which
    is exact. Other rows are kept whole: 4 bytes per token of the vocabulary.

    Args:
        token_id (`int`): The token.
        probabilities (`torch.Tensor` of shape `(V,)` or `(k,)`): Of all tokens or of `support`.
        support (`torch.LongTensor` of shape `(k,)`, *optional*): The tokens of nonzero probability.
    """

    token_id: int
    probabilities: torch.Tensor
    support: torch.Tensor | None = None

    @classmethod
    def draw(
        cls, scores: torch.Tensor, generator: torch.Generator, judged: Proposal | None = None
    ) -> Proposal:
        """Draws a token of a draft.

        Args:
            scores (`torch.Tensor` of shape `(1, V)`): Processed scores of the draft's next token.
            generator (`torch.Generator`): The draft's own source of randomness.
            judged (`Proposal`, *optional*): What an earlier draft proposes here; it is kept or
                replaced by the same rule that the model applies to this draft.

        Returns:
            `Proposal`: Distributed as `scores` say, whatever was judged.
        """
        probabilities = torch.nn.functional.softmax(scores[0], dim=-1)
        # Scores that leave no token must not end the generation because of a draft.
        probabilities = probabilities.nan_to_num(nan=1.0 / scores.shape[-1])
        selecting = probabilities if judged is None else judged.judge(probabilities[None])[0]
        token_id = int(torch.multinomial(selecting, num_samples=1, generator=generator).item())
        support = probabilities.nonzero()[:, 0]
        # A kept token costs 12 bytes with its index, a whole row 4 bytes per token.
        if 3 * len(support) >= len(probabilities):
            return cls(token_id, probabilities)
        return cls(token_id, probabilities[support], support)

    def judge(self, target_probabilities: torch.Tensor) -> torch.Tensor:
        """The distribution from which the model selects where this token was proposed.

        Args:
            target_probabilities (`torch.Tensor` of shape `(1, V)`): The model's own distribution.

        Returns:
            `torch.Tensor` of shape `(1, V)`: See `judged_distribution`.
        """
        row = target_probabilities[0]
        draft_probabilities = self.probabilities
        if self.support is not None:
            draft_probabilities = torch.zeros_like(row)
            draft_probabilities[self.support] = self.probabilities
        return judged_distribution(row, draft_probabilities, self.token_id)[None]


def draft_seed(device: torch.device) -> int:
    """A seed for drafts that follows from the generator of `device` without drawing from it.

    It differs from call to call, as the text does, and is the same again after
    `torch.manual_seed`.

    Args:
        device (`torch.device`): Where tokens are drawn.

    Returns:
        `int`: From 0 to 2 ** 63 - 1.
    """
    if device.type == "cpu":
        state = torch.get_rng_state()
    elif device.type == "mps":
        state = torch.mps.get_rng_state()
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def draft_generator(seed: int, stage: int, device: torch.device) -> torch.Generator:
    """The generator of one draft.

    Args:
        seed (`int`): From `draft_seed`.
        stage (`int`): Which draft of the generation it is; every draft has draws of its own.
        device (`torch.device`): Where tokens are drawn.

    Returns:
        `torch.Generator`: Independent of the global one.
    """
    return torch.Generator(device).manual_seed((seed + stage) % 2**63)
