"""Whether two threads may run one model at the same time, each with a cache of its own.

Forwards share nothing but the weights, which they only read. Where a model changes itself or its
weights while it runs, a draft in a second thread could change the parent's tokens; there the check
says no.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import compat
from ..cache.support import Support, Supported, Unsupported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN_FORWARD = "Use lane='lockstep', where a draft rides in the forward of its parent"
STREAM_DEVICES = ("cpu", "cuda")
# Whose kernels the host runs for recurrent layers, where they are installed.
TUNING_PACKAGES = ("fla", "mamba_ssm")


class Hazard(NamedTuple):
    """What makes a second thread unsafe: how to see it, why it is, what to do instead."""

    is_present: Callable[[PreTrainedModel], bool]
    reason: str
    hint: str = OWN_FORWARD


def two_thread_support(model: PreTrainedModel) -> Support:
    """Whether a draft may run in a second thread beside the forwards of its parent.

    Args:
        model (`PreTrainedModel`): The model that both run.

    Returns:
        `Supported` or `Unsupported`: The latter names the first hazard that was found.
    """
    for hazard in HAZARDS:
        if hazard.is_present(model):
            return Unsupported(hazard.reason, hazard.hint)
    return Supported()


def _is_compiled(model: PreTrainedModel) -> bool:
    return any(compat.is_compiled(module) for module in model.modules())


def _moves_weights(model: PreTrainedModel) -> bool:
    hooks = map(compat.accelerate_hook, model.modules())
    return any(_hook_moves_weights(hook) for hook in hooks if hook is not None)


def _hook_moves_weights(hook: Any) -> bool:
    if hasattr(hook, "hooks"):
        return any(_hook_moves_weights(part) for part in hook.hooks)
    # Only hooks that align devices can say that they leave the weights in place.
    return bool(getattr(hook, "offload", True))


def _is_sharded(model: PreTrainedModel) -> bool:
    return (model.tp_size or 1) > 1 or (model.fsdp_size or 1) > 1


def _recomputes_positions(model: PreTrainedModel) -> bool:
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
        if any(kind and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            return True
    return False


def _switches_experts(model: PreTrainedModel) -> bool:
    return (
        model.device.type != "cpu" and "grouped_mm" in model.get_experts_implementation().values()
    )


def _tunes_kernels(model: PreTrainedModel) -> bool:
    if model.device.type == "cpu":
        return False
    packages = any(importlib.util.find_spec(name) is not None for name in TUNING_PACKAGES)
    return bool(model.use_kernels or (compat.is_recurrent(model) and packages))


def _is_spread(model: PreTrainedModel) -> bool:
    return len({parameter.device for parameter in model.parameters()}) > 1


def _has_no_streams(model: PreTrainedModel) -> bool:
    return model.device.type not in STREAM_DEVICES


HAZARDS = (
    Hazard(_is_compiled, "it is compiled, and compiled code is entered by one thread at a time"),
    Hazard(_moves_weights, "hooks move its weights between devices during the forward"),
    Hazard(_is_sharded, "its shards on several devices wait for each other in a fixed order"),
    Hazard(
        _recomputes_positions,
        "its rotary positions (dynamic or longrope) are recomputed in place for each text length",
    ),
    Hazard(
        _switches_experts,
        "generate switches its experts from grouped_mm to batched_mm while decoding",
        "Use lane='lockstep', or load the model with experts_implementation='batched_mm'",
    ),
    Hazard(
        _tunes_kernels,
        "its Triton kernels tune themselves when they are called, which is not safe in two threads",
    ),
    Hazard(
        _is_spread, "its weights lie on several devices, and the second stream is on one of them"
    ),
    Hazard(_has_no_streams, "its device is neither a CPU nor a CUDA device"),
)
