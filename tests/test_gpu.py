"""What only a CUDA device can show. The parts themselves are tested on a CPU, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gpu_check
import lane_checks
import lane_timing
import pytest
import torch
from families import FAMILIES
from stream_watch import before_forward, wait_for_draft
from transformers import PreTrainedModel, Qwen3Config

import ssr_hf
from ssr_hf.cache.support import Unsupported
from ssr_hf.errors import UnsupportedError
from ssr_hf.lanes import LANE_TYPES
from ssr_hf.lanes.sequential import SequentialLane
from ssr_hf.lanes.stream import StreamLane

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SHAPE: dict[str, Any] = {
    **gpu_check.QWEN3,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 64,
}


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """Convolutions in TF32 differ between one token and several."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    lane_checks.use_exact_float32()
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("family", lane_checks.FAMILIES)
def test_every_lane_is_lossless(family: str) -> None:
    """Kernels, random numbers or memory of the device that a lane uses in another way."""
    model = lane_checks.build_small(family, CUDA)
    lanes = gpu_check.supported_lanes(model)
    checks = list(lane_checks.check_lossless(family, model, lanes, 64, seed=1))
    assert all(check.passed for check in checks), [c for c in checks if not c.passed]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", lane_checks.FAMILIES)
def test_stream_lane_with_everything_against_it(family: str, seed: int) -> None:
    """A tensor that crosses streams without being recorded, or is read before it is written."""
    model = lane_checks.build_small(family, CUDA)
    support = StreamLane.support(model)
    if isinstance(support, Unsupported):
        pytest.skip(f"the stream lane refuses this model: {support.reason}")
    checks = list(lane_checks.check_stream(family, model, 64, 64, seed))
    assert all(check.passed for check in checks), [c for c in checks if not c.passed]


@pytest.mark.parametrize(
    "context",
    [torch.inference_mode, lambda: torch.autocast("cuda", dtype=torch.bfloat16)],
    ids=["inference", "autocast"],
)
def test_stream_lane_takes_over_the_settings_of_its_caller(context: Callable[[], Any]) -> None:
    """Modes are thread-local: a draft in another dtype, or one that keeps every activation."""
    model = lane_checks.build_small("full", CUDA)
    drafts = []
    with torch.no_grad(), context():
        for lane_type in (SequentialLane, StreamLane):
            session = lane_timing.Session(model, 64)
            drafts.append(session.run_draft(lane_type(session.target), 48).token_ids)
    assert drafts[0] == drafts[1]


def test_sampled_drafts_are_judged_in_the_parents_stream() -> None:
    """Distributions that the second stream made, read or freed too early by the first."""
    model = lane_checks.build_small("full", CUDA)
    declared = lane_checks.declare(model, 64, seed=0, **lane_checks.SAMPLED)
    ssr_hf.enable(model)
    texts = {}
    for lane in ("sequential", "stream"):
        config = {
            "end_of_thinking": [declared.new_ids[declared.n_thinking]],
            "draft_budget": 4,
            "draft_interval": 6,
            "max_draft_tokens": 8,
            "acceptance": "rejection_sampling",
            "lane": lane,
            "adaptive": False,
        }
        # How far a draft comes must not depend on time: it is part of what is judged.
        with before_forward(model, wait_for_draft):
            texts[lane] = lane_checks.new_tokens(
                model,
                declared.prompt,
                seed=0,
                max_new_tokens=64,
                self_speculation=config,
                **lane_checks.SAMPLED,
            )
    assert texts["stream"] == texts["sequential"]
    n_thinking = declared.n_thinking + 1
    assert texts["stream"][:n_thinking] == declared.new_ids[:n_thinking]


@pytest.mark.parametrize("lane", ["lockstep", "stream"])
def test_memory_of_a_draft_is_within_its_formula(lane: str) -> None:
    """Memory that the second stream keeps, or a copy of the cache that nobody meant."""
    model = lane_checks.build(Qwen3Config(**SHAPE), CUDA, torch.bfloat16)
    length, n_tokens = 2048, 128
    for lane_type in (None, LANE_TYPES[lane]):  # workspaces of the kernels
        lane_timing.measure_peak(model, lane_type, length, n_tokens)
    plain = lane_timing.measure_peak(model, None, length, n_tokens)
    extra = lane_timing.measure_peak(model, LANE_TYPES[lane], length, n_tokens) - plain
    bound = lane_timing.row_bytes(lane_timing.kv_bytes_per_token(model), length + n_tokens)
    # Two more buffers while a layer moves, and the logits of a step.
    assert extra <= 1.5 * bound + 2**23


def moe_on_cuda() -> PreTrainedModel:
    model = FAMILIES["qwen3_moe"].builder().eval().to(CUDA)
    model.set_experts_implementation("grouped_mm")
    return model


def test_experts_that_the_host_switches_are_refused() -> None:
    """The host switches experts on this device while decoding: not for two threads."""
    model = ssr_hf.enable(moe_on_cuda())
    prompt = torch.randint(1, 256, (1, 5), device=CUDA)
    config = {"end_of_thinking": [3], "lane": "stream"}
    with pytest.raises(UnsupportedError, match="batched_mm"):
        model.generate(prompt, max_new_tokens=4, self_speculation=config)


def test_the_script_runs_in_16_bit() -> None:
    """A measurement that only works in the float32 of a CPU."""
    plan = gpu_check.Plan(
        families=("full",),
        seeds=1,
        check_tokens=32,
        length=128,
        steps=16,
        blocks=(1, 16),
        repeats=2,
        generation=gpu_check.Lengths(prompt=16, thinking=40, draft_budget=8, answer=24),
        runs=(("lockstep", 1.0), ("stream", 0.5)),
    )
    result = gpu_check.run(plan, {"tiny": SHAPE}, CUDA, torch.bfloat16, "sdpa")
    assert result["passed"], [check for check in result["checks"] if not check["passed"]]
    assert result["device"] == torch.cuda.get_device_name(CUDA)
