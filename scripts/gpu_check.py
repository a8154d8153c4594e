"""Check and measure self-speculation on a CUDA device: random weights, no network, no data.

    python scripts/gpu_check.py                      # under 8 minutes on one H200-class GPU
    python scripts/gpu_check.py --shape 0.6B --length 4096

Checks, in float32 on small models with full, sliding, convolutional and recurrent layers:

- every lane gives the tokens of plain `generate`, greedy and sampled, while drafts are accepted and
  rejected;
- drafts of the stream lane are those of the sequential lane, and the parent's text is the same,
  while the draft's kernels are held up and freed memory is overwritten at once; the parent stays in
  the buffers that the draft reads or leaves them, in the default stream or in one of the caller's.

Measurements, in bfloat16 on models with the shapes of Qwen3-0.6B and Qwen3-4B, flash attention 2
where it is installed, no `torch.compile`: a plain step beside the weights' bandwidth ceiling; steps
while a draft is written, and what a draft of 500 tokens adds to a chain of thought of 2000;
verification by block length; whole generations; peak memory.

Whole generations are scripted, since random weights write nothing worth drafting: a logits
processor dictates a random text, to plain `generate`, too, and each token of a draft is replaced by
the dictated one with probability p, else by another. The draft runs all its forwards and selects
its tokens, so it costs what a real one costs; only what it says is scripted. Spans come from the
draft alone.

The last line on stdout is one JSON document. Exit code 0: every check holds, or there is no CUDA
device; 1: some check does not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer
from gpu_report import print_tables
from lane_checks import (
    FAMILIES,
    NO_SPECIAL_IDS,
    Check,
    build,
    build_small,
    check_lossless,
    check_stream,
    use_exact_float32,
)
from lane_timing import (
    kv_bytes_per_token,
    measure_lane,
    measure_peak,
    measure_step,
    measure_verification,
    row_bytes,
)
from rich.console import Console
from scripted_text import Lengths, measure_generations
from transformers import PreTrainedModel, Qwen3Config
from transformers.utils import is_flash_attn_2_available

from ssr_hf.lanes import LANE_TYPES

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

QWEN3: dict[str, Any] = {
    **NO_SPECIAL_IDS,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
# GB per second by part of the device's name, as its vendor states it; the first match counts.
BANDWIDTHS = {
    "B200": 8000.0,
    "H200": 4800.0,
    "H100 PCIe": 2000.0,
    "H100": 3350.0,
    "A100-SXM4-80GB": 2039.0,
    "A100 80GB": 1935.0,
    "A100": 1555.0,
    "L40S": 864.0,
    "L4": 300.0,
    "RTX 5090": 1792.0,
    "RTX 4090": 1008.0,
}
# What the overhead of a draft refers to: the setting of the paper.
DRAFT_TOKENS, THINKING_TOKENS = 500, 2000
GENERATION = Lengths(prompt=256, thinking=240, draft_budget=60, answer=240)


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Args:
        families (`tuple[str, ...]`): Small models of the checks.
        seeds (`int`): Seeds of the stream lane's checks.
        check_tokens (`int`): Tokens of each text that is checked.
        length (`int`): Tokens in the cache where steps are timed.
        steps (`int`): Plain steps that are timed, and tokens of the timed drafts.
        blocks (`tuple[int, ...]`): Tokens of the verified blocks.
        repeats (`int`): Blocks of each length.
        generation (`Lengths`): Tokens of whole generations.
        runs (`tuple[tuple[str, float], ...]`): Lane and probability of a right draft token.
        seconds (`float`): After so long, no further generation is begun.
    """

    families: tuple[str, ...] = tuple(FAMILIES)
    seeds: int = 2
    check_tokens: int = 64
    length: int = 1024
    steps: int = 128
    blocks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    repeats: int = 7
    generation: Lengths = GENERATION
    runs: tuple[tuple[str, float], ...] = (
        ("lockstep", 0.0),
        ("lockstep", 0.5),
        ("lockstep", 0.9),
        ("lockstep", 1.0),
        ("stream", 0.9),
    )
    seconds: float = 360.0


def run_checks(plan: Plan, device: torch.device) -> Iterator[Check]:
    """Every check of every family."""
    for family in plan.families:
        model = build_small(family, device)
        lanes = supported_lanes(model)
        yield from check_lossless(family, model, lanes, plan.check_tokens, seed=0)
        if "stream" not in lanes:
            reason = getattr(LANE_TYPES["stream"].support(model), "reason", "")
            yield Check(f"stream lane: {family}", passed=True, detail=f"refused: {reason}")
            continue
        for seed in range(plan.seeds):
            yield from check_stream(family, model, plan.check_tokens, plan.check_tokens, seed)


def supported_lanes(model: PreTrainedModel) -> tuple[str, ...]:
    """Lanes that are safe with this model on its device."""
    return tuple(name for name, lane in LANE_TYPES.items() if lane.support(model).supported)


def measure_model(model: PreTrainedModel, plan: Plan, deadline: float) -> dict[str, Any]:
    """Every figure of one model."""
    plain_ms = measure_step(model, plan.length, plan.steps)
    lanes = {
        name: measure_lane(model, lane_type, plan.length, plan.steps, plain_ms)
        for name, lane_type in LANE_TYPES.items()
    }
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "attention": model.config._attn_implementation,
        "plain_ms": plain_ms,
        "bandwidth": bandwidth(model, plain_ms),
        "lanes": {
            name: {
                **asdict(cost),
                "overhead_percent": cost.overhead(plain_ms, DRAFT_TOKENS, THINKING_TOKENS),
            }
            for name, cost in lanes.items()
        },
        "verification_ms": measure_verification(model, plan.length, plan.blocks, plan.repeats),
        "memory": measure_memory(model, plan.length, plan.steps),
        "generations": measure_generations(model, plan.generation, plan.runs, deadline),
    }


def bandwidth(model: PreTrainedModel, plain_ms: float) -> dict[str, float | None]:
    """Bytes of weights that a step reads, per second, beside what the device can read."""
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if not model.config.tie_word_embeddings:
        # A step reads one row of it.
        n_bytes -= model.get_input_embeddings().weight.nbytes
    ceiling = None
    if model.device.type == "cuda":
        name = torch.cuda.get_device_name(model.device)
        ceiling = next((own for part, own in BANDWIDTHS.items() if part in name), None)
    return {
        "weights_gb": n_bytes / 1e9,
        "gb_per_second": n_bytes / plain_ms / 1e6,
        "ceiling_gb_per_second": ceiling,
        "ceiling_ms": None if ceiling is None else n_bytes / ceiling / 1e6,
    }


def measure_memory(model: PreTrainedModel, length: int, n_tokens: int) -> dict[str, Any]:
    """Peak bytes that a draft adds to a run without one, in all and per 1000 tokens of text."""
    text = length + n_tokens
    plain = measure_peak(model, None, length, n_tokens)
    bound = row_bytes(kv_bytes_per_token(model), text)
    rows = {"text_tokens": text, "plain_mb": plain / 1e6, "formula_mb_per_1k": bound / text / 1e3}
    for name in ("lockstep", "stream"):
        extra = measure_peak(model, LANE_TYPES[name], length, n_tokens) - plain
        rows[f"{name}_extra_mb"] = extra / 1e6
        rows[f"{name}_mb_per_1k"] = extra / text / 1e3
    return rows


def run(
    plan: Plan,
    shapes: Mapping[str, dict[str, Any]],
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
) -> dict[str, Any]:
    """Checks and measures everything; the result is what is printed as JSON."""
    start = time.perf_counter()
    use_exact_float32()
    checks = list(run_checks(plan, device))
    checks_seconds = time.perf_counter() - start
    models = {}
    for name, fields in shapes.items():
        model = build(Qwen3Config(**fields), device, dtype, attention)
        models[name] = measure_model(model, plan, start + plan.seconds)
        del model
        for row in models[name]["generations"]:
            if "same_text" in row:
                title = f"dictated text: {name}, {row['lane']}, p = {row['p']}"
                checks.append(Check(title, row["same_text"]))
    return {
        "passed": all(check.passed for check in checks),
        "checks": [asdict(check) for check in checks],
        "models": models,
        "device": describe(device),
        "dtype": str(dtype).removeprefix("torch."),
        "plan": asdict(plan),
        "overhead_refers_to": {"draft_tokens": DRAFT_TOKENS, "thinking_tokens": THINKING_TOKENS},
        "versions": {
            **{name: version(name) for name in ("ssr-hf", "torch", "transformers")},
            "flash-attn": version("flash-attn") if is_flash_attn_2_available() else None,
            "cuda": torch.version.cuda,
        },
        "seconds": {"checks": checks_seconds, "all": time.perf_counter() - start},
    }


def describe(device: torch.device) -> str:
    """The device by the name that its vendor gave it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@app.command()
def main(
    shape: Annotated[
        list[str] | None, typer.Option(help=f"Model to measure: {', '.join(SHAPES)}.")
    ] = None,
    length: Annotated[int, typer.Option(min=16, help="Tokens in the cache.")] = Plan.length,
    attention: Annotated[
        str | None, typer.Option(help="Attention; flash attention 2 or sdpa when left out.")
    ] = None,
) -> None:
    """Check and measure self-speculation on the CUDA device."""
    if not torch.cuda.is_available():
        print("no CUDA device")
        return
    unknown = sorted(set(shape or ()) - set(SHAPES))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(SHAPES)}")
    flash = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    result = run(
        replace(Plan(), length=length),
        {name: SHAPES[name] for name in shape or SHAPES},
        torch.device("cuda", torch.cuda.current_device()),
        torch.bfloat16,
        attention or flash,
    )
    print_tables(result, Console())
    print(json.dumps(result))
    if not result["passed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
