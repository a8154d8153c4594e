"""Which models the stream lane refuses, and that it says so before anything runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook, add_hook_to_module
from families import FAMILIES, build_model, random_prompt
from helpers import generate
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

import ssr_hf
from ssr_hf import compat
from ssr_hf.cache.support import Supported, Unsupported
from ssr_hf.errors import UnsupportedError
from ssr_hf.lanes import LANE_TYPES
from ssr_hf.lanes.concurrency import HAZARDS
from ssr_hf.lanes.stream import StreamLane

TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def fresh(family: str = "llama") -> PreTrainedModel:
    """A model of its own: `build_model` shares."""
    return FAMILIES[family].builder().eval()


def compiled() -> PreTrainedModel:
    model = fresh()
    model.compile()
    return model


def compiled_forward() -> PreTrainedModel:
    model = fresh()
    model.forward = torch.compile(model.forward)
    return model


def compiled_layer() -> PreTrainedModel:
    model = fresh()
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


def offloaded() -> PreTrainedModel:
    return cpu_offload(fresh(), execution_device=torch.device("cpu"))


def offloaded_as_a_whole() -> PreTrainedModel:
    model = fresh()
    aligned = AlignDevicesHook(execution_device="cpu", io_same_device=True)
    return add_hook_to_module(model, SequentialHook(aligned, CpuOffload("cpu")))


def sharded() -> PreTrainedModel:
    model = fresh()
    model._tp_size = 2
    return model


def dynamic_positions() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=rope)).eval()


def long_positions() -> PreTrainedModel:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
    }
    config = Phi3Config(**TINY, rope_parameters=rope, original_max_position_embeddings=64)
    return Phi3ForCausalLM(config).eval()


def switching_experts() -> PreTrainedModel:
    model = fresh("qwen3_moe").to("meta")
    model.set_experts_implementation("grouped_mm")
    return model


def hub_kernels() -> PreTrainedModel:
    model = fresh().to("meta")
    model._use_kernels = True
    return model


def spread() -> PreTrainedModel:
    model = fresh()
    model.lm_head.to("meta")
    return model


def without_streams() -> PreTrainedModel:
    return fresh().to("meta")


REFUSED: dict[str, list[Callable[[], PreTrainedModel]]] = {
    "it is compiled": [compiled, compiled_forward, compiled_layer],
    "hooks move its weights": [offloaded, offloaded_as_a_whole],
    "its shards": [sharded],
    "its rotary positions": [dynamic_positions, long_positions],
    "generate switches its experts": [switching_experts],
    "its Triton kernels": [hub_kernels],
    "its weights lie on several devices": [spread],
    "its device is neither": [without_streams],
}
CASES = [(reason, build) for reason, builds in REFUSED.items() for build in builds]


@pytest.mark.parametrize(("reason", "build"), CASES, ids=[build.__name__ for _, build in CASES])
def test_unsafe_models_are_not_supported(reason: str, build: Callable[[], PreTrainedModel]) -> None:
    """Two threads in a model that changes while it runs: wrong tokens, or a crash much later."""
    support = StreamLane.support(build())
    assert isinstance(support, Unsupported)
    assert support.reason.startswith(reason)
    assert "lane='lockstep'" in support.hint


def test_refusal_comes_before_the_prompt_is_read() -> None:
    """A lane that is refused late, or without saying why and what to do."""
    model = sharded()
    support = StreamLane.support(model)
    prompt = random_prompt(model, 4, seed=0)
    ssr_hf.enable(model)
    with (
        mock.patch.object(type(model), "__call__", side_effect=AssertionError("a forward ran")),
        pytest.raises(UnsupportedError) as refusal,
    ):
        generate(model, prompt, self_speculation={"end_of_thinking": [5], "lane": "stream"})
    text = str(refusal.value)
    assert text.startswith("lane='stream' is not safe with this LlamaForCausalLM")
    assert isinstance(support, Unsupported)
    assert support.reason in text
    assert support.hint in text
    assert "'lockstep' and 'sequential'" in text


@pytest.mark.parametrize("lane", ["auto", "lockstep", "sequential"])
def test_the_other_lanes_run_what_the_stream_lane_refuses(lane: str) -> None:
    """A refusal of one lane that takes the others with it."""
    model = long_positions()
    prompt = random_prompt(model, 4, seed=0)
    plain = generate(model, prompt, max_new_tokens=12).sequences
    ssr_hf.enable(model)
    config = {"end_of_thinking": [plain[0, 9].item()], "lane": lane, "draft_budget": 2}
    fast = generate(model, prompt, max_new_tokens=12, self_speculation=config).sequences
    assert fast.tolist() == plain.tolist()


def test_every_hazard_is_tested() -> None:
    """A check that was added without a model that trips it."""
    assert [
        hazard.reason.startswith(reason) for hazard, reason in zip(HAZARDS, REFUSED, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_supported_on_a_cpu(family: str) -> None:
    """A hazard that is seen where there is none turns the lane off for everybody."""
    model = build_model(family)
    assert all(lane.support(model) == Supported() for lane in LANE_TYPES.values())


def test_hooks_that_leave_weights_in_place_are_supported() -> None:
    """`device_map` on one device adds hooks that move nothing."""
    model = fresh()
    aligned = AlignDevicesHook(execution_device="cpu", io_same_device=True)
    add_hook_to_module(model, SequentialHook(aligned, AlignDevicesHook()))
    assert StreamLane.support(model) == Supported()


@pytest.mark.parametrize("package", [None, "fla", "mamba_ssm"])
@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_5", "mamba2"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kernels_that_tune_themselves_are_foreseen(
    device: str, family: str, package: str | None
) -> None:
    """Triton's autotuner keeps a call's arguments on the kernel: two threads crash in it."""
    model = fresh(family).to(device)
    with mock.patch.object(
        importlib.util, "find_spec", lambda name: name if name == package else None
    ):
        support = StreamLane.support(model)
    refused = not support.supported and support.reason.startswith("its Triton kernels")
    assert refused == (device != "cpu" and FAMILIES[family].is_recurrent and package is not None)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_switch_of_experts_is_foreseen(implementation: str, device: str) -> None:
    """The host decides when it switches; a check that guesses otherwise lets two threads in."""
    model = fresh("qwen3_moe").to(device)
    model.set_experts_implementation(implementation)
    before = model.get_experts_implementation()
    with compat.decode_optimisation(model):
        switches = model.get_experts_implementation() != before
    support = StreamLane.support(model)
    refused = not support.supported and support.reason.startswith("generate switches")
    assert refused == switches
