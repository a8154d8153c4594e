"""Options that several sub-commands share, as dataclasses; `spread` turns fields into options."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import ssr_hf

from .console import InputError

_MODEL = "Model"
_PROMPT = "Prompt"
_GENERATION = "Generation"
_SPECULATION = "Self-speculation (defaults as in SelfSpeculationConfig)"


def _option(panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """How a model is held."""

    dtype: Annotated[
        str, _option(_MODEL, "--dtype", help="float32, bfloat16, float16, or auto: as stored.")
    ] = "auto"
    device: Annotated[
        str | None, _option(_MODEL, "--device", help="cpu, cuda, ...; the fastest by default.")
    ] = None
    threads: Annotated[
        int | None,
        _option(
            _MODEL, "--threads", min=1, metavar="N",
            help="CPU threads; by default as measured for the tiny reasoner, else torch's choice.",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelOptions(PlacementOptions):
    """Which model, and how it is held."""

    model: Annotated[
        str | None,
        _option(
            _MODEL, "--model", "-m", metavar="ID|PATH",
            help="Hub id, local directory or GGUF file; by default the tiny reasoner inside.",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is asked."""

    prompt: Annotated[
        str | None, _option(_PROMPT, "--prompt", "-p", metavar="TEXT", help="The user's message.")
    ] = None
    prompt_file: Annotated[
        Path | None,
        _option(_PROMPT, "--prompt-file", help="A file with the message; - reads standard input."),
    ] = None
    raw: Annotated[
        bool, _option(_PROMPT, "--raw", help="Use the text as it is, without chat template.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How tokens are selected, and how many."""

    max_new_tokens: Annotated[
        int | None,
        _option(
            _GENERATION, "--max-new-tokens", "-n", min=1, metavar="N",
            help="Longest generation; by default what the context holds, at most 4096.",
        ),
    ] = None  # fmt: skip
    temperature: Annotated[
        float | None,
        _option(
            _GENERATION, "--temperature", "-t", min=0.0, metavar="T", help="Sample; 0 is greedy."
        ),
    ] = None
    top_p: Annotated[
        float | None,
        _option(
            _GENERATION, "--top-p", min=0.0, max=1.0, metavar="P", help="Sample from the nucleus."
        ),
    ] = None
    top_k: Annotated[
        int | None,
        _option(_GENERATION, "--top-k", min=1, metavar="K", help="Sample from the K likeliest."),
    ] = None
    seed: Annotated[
        int,
        _option(
            _GENERATION,
            "--seed",
            min=0,
            max=2**63 - 1,
            metavar="N",
            help="Of sampling and the built-in prompts.",
        ),
    ] = 0  # fmt: skip

    def __post_init__(self) -> None:
        if self.temperature is not None and not math.isfinite(self.temperature):
            raise InputError(
                f"--temperature is {self.temperature}. A finite number is accepted; try 0.6."
            )
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise InputError(
                "--temperature 0 is greedy and contradicts --top-p and --top-k. Raise the "
                "temperature, or leave the others out."
            )

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; greedy otherwise."""
        if self.temperature is not None:
            return self.temperature > 0
        return self.top_p is not None or self.top_k is not None

    def generate_kwargs(self) -> dict[str, Any]:
        """Arguments of `generate`, on top of the model's own generation config."""
        if not self.samples:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in given.items() if value is not None}
        return {"do_sample": True, **given}

    def describe(self) -> str:
        """For people, such as `sampled (temperature 0.6, seed 0)`."""
        if not self.samples:
            return "greedy"
        values = {"temperature": self.temperature, "top-p": self.top_p, "top-k": self.top_k}
        given = [f"{name} {value:g}" for name, value in values.items() if value is not None]
        return f"sampled ({', '.join([*given, f'seed {self.seed}'])})"


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """The settings of `SelfSpeculationConfig`."""

    draft_budget: Annotated[
        str | None,
        _option(
            _SPECULATION, "--draft-budget", metavar="N[,N...]",
            help="Thinking tokens after which an answer is drafted; several draft again.",
        ),
    ] = None  # fmt: skip
    draft_interval: Annotated[
        int | None,
        _option(
            _SPECULATION,
            "--draft-interval",
            metavar="N",
            help="Then draft again every so many tokens.",
        ),
    ] = None
    max_draft_tokens: Annotated[
        int | None, _option(_SPECULATION, "--max-draft-tokens", metavar="N", help="Longest draft.")
    ] = None
    thinking_budget: Annotated[
        int | None,
        _option(
            _SPECULATION,
            "--thinking-budget",
            metavar="N",
            help="Thinking tokens before it is ended.",
        ),
    ] = None
    reuse: Annotated[
        str | None,
        _option(_SPECULATION, "--reuse", help="prefix+suffix, prefix, suffix or none."),
    ] = None
    lane: Annotated[
        str | None,
        _option(_SPECULATION, "--lane", help="auto, lockstep, stream or sequential."),
    ] = None
    suffix_max_match: Annotated[
        int | None,
        _option(_SPECULATION, "--suffix-max-match", metavar="N", help="Longest matched suffix."),
    ] = None
    suffix_max_tokens: Annotated[
        int | None,
        _option(_SPECULATION, "--suffix-max-tokens", metavar="N", help="Longest proposed span."),
    ] = None
    end_of_thinking: Annotated[
        str | None,
        _option(_SPECULATION, "--end-of-thinking", metavar="TEXT", help="Marker, where not found."),
    ] = None
    start_of_thinking: Annotated[
        str | None,
        _option(
            _SPECULATION, "--start-of-thinking", metavar="TEXT", help="Marker, where not found."
        ),
    ] = None
    adaptive: Annotated[
        bool | None,
        _option(
            _SPECULATION,
            "--adaptive/--no-adaptive",
            show_default=False,
            help="Follow measured cost and acceptance, or the settings alone.",
        ),
    ] = None
    reference: Annotated[
        bool,
        _option(_SPECULATION, "--reference", help="Start from the published setting of SSR."),
    ] = False
    config_file: Annotated[
        Path | None,
        _option(
            _SPECULATION, "--config", metavar="FILE",
            help="Start from the JSON that SelfSpeculationConfig.to_json() writes.",
        ),
    ] = None  # fmt: skip

    def config(self) -> ssr_hf.SelfSpeculationConfig:
        """The settings, those given on top of the defaults, the published setting or a file's.

        Raises:
            `ConfigError`: A value is out of range; the message names it.
            `InputError`: The file cannot be used, or it contradicts `--reference`.
        """
        start = self._start()
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del given["reference"], given["config_file"]
        suffix = {
            name.removeprefix("suffix_"): given.pop(name)
            for name in list(given)
            if name.startswith("suffix_")
        }
        given["draft_budget"] = _parse_budgets(self.draft_budget)
        changes = {name: value for name, value in given.items() if value is not None}
        suffix = {name: value for name, value in suffix.items() if value is not None}
        if suffix:
            changes["suffix"] = dataclasses.replace(start.suffix, **suffix)
        return dataclasses.replace(start, **changes)

    def _start(self) -> ssr_hf.SelfSpeculationConfig:
        if self.reference and self.config_file is not None:
            raise InputError("--reference and --config are both given. One of them is accepted.")
        if self.config_file is not None:
            return _read_config(self.config_file)
        base = ssr_hf.SelfSpeculationConfig
        return base.reference() if self.reference else base()


def _read_config(path: Path) -> ssr_hf.SelfSpeculationConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path} cannot be read: {error}") from error
    try:
        return ssr_hf.SelfSpeculationConfig.from_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--config {path} cannot be used: {error}") from error


def _parse_budgets(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--draft-budget is {text!r}. One integer or increasing integers separated by commas "
            "are accepted, such as 128 or 64,128."
        ) from None
