"""From what `--model` names to a model, its tokenizer and its thinking markers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ssr_hf

from .console import InputError, busy
from .options import ModelOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TINY_REASONER = "tiny reasoner"
_CONFIG_FILES = ("config.json", "adapter_config.json")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Session:
    """A model that is ready to generate, with self-speculation enabled."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    markers: ssr_hf.ThinkingMarkers

    @property
    def context(self) -> int | None:
        """Most tokens of a whole text, prompt included; None where there is no limit."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text and are not shown."""
        configured = self.model.generation_config.eos_token_id
        several = configured if isinstance(configured, list) else [configured]
        ids = [*several, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id]
        return frozenset(index for index in ids if index is not None)

    def facts(self) -> dict[str, Any]:
        """What a measured figure has to travel with."""
        return {
            "model": self.name,
            "architecture": type(self.model).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("ssr-hf", "torch", "transformers")},
        }

    def describe(self) -> str:
        """The model and where it runs, in one line."""
        facts = self.facts()
        size = f"{facts['parameters'] / 1e6:,.1f} M parameters"
        threads = facts["threads"]
        place = facts["device"]
        if self.model.device.type == "cpu":
            place += f", {threads} thread{'s' if threads > 1 else ''}"
        return f"{facts['model']} · {size} · {facts['dtype']} · {place}"


def open_session(options: ModelOptions, config: ssr_hf.SelfSpeculationConfig) -> Session:
    """Loads the model and finds its markers.

    Args:
        options (`ModelOptions`): Which model, and how it is held.
        config (`SelfSpeculationConfig`): May name the markers.

    Returns:
        `Session`: Ready to generate.

    Raises:
        `InputError`: The model cannot be loaded, or it has no thinking markers.
    """
    dtype = _dtype(options.dtype)
    device = _device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = _load(options.model, dtype)
    model = model.to(device).eval()
    if options.model is None and options.threads is None and model.device.type == "cpu":
        ssr_hf.fit_threads(model)
    try:
        markers = ssr_hf.ThinkingMarkers.from_tokenizer(
            tokenizer, config.end_of_thinking, config.start_of_thinking
        )
    except ssr_hf.MarkerError as error:
        raise InputError(f"{error} On the command line: --end-of-thinking TEXT.") from error
    return Session(
        name=_name(options.model),
        model=ssr_hf.enable(model),
        tokenizer=tokenizer,
        markers=markers,
    )


def _name(source: str | None) -> str:
    if source is None:
        return TINY_REASONER
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source


def _load(source: str | None, dtype: torch.dtype | None) -> tuple[Any, Any]:
    if source is None:
        with busy(f"Loading the {TINY_REASONER}"):
            return ssr_hf.load_tiny_reasoner(dtype)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location, extra = _locate(source)
    # Downloads and conversions draw bars of their own, which a spinner would disturb.
    has_bars = bool(extra) or not Path(location).is_dir()
    try:
        with busy(f"Loading {source}", spins=not has_bars):
            tokenizer = AutoTokenizer.from_pretrained(location, **extra)
            model = AutoModelForCausalLM.from_pretrained(location, dtype=dtype or "auto", **extra)
    except Exception as error:  # a damaged file raises whatever its reader does
        reason = " ".join(str(error).split())
        raise InputError(
            f"The model {source!r} cannot be loaded: {reason.rstrip('.')}. A Hub id, a local "
            "directory of a causal language model or a GGUF file is accepted."
        ) from error
    return model, tokenizer


def _locate(source: str) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` is given for a path, a Hub id or a GGUF file in either place."""
    path = Path(source).expanduser()
    is_gguf = path.suffix == ".gguf"
    if is_gguf and path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    if source and any((path / name).is_file() for name in _CONFIG_FILES):
        return str(path), {}
    parts = source.split("/")
    if is_gguf and len(parts) == 3 and all(parts):
        return "/".join(parts[:2]), {"gguf_file": parts[2]}
    is_path = path.exists() or source.startswith((".", "/", "~")) or len(parts) > 2 or is_gguf
    if is_path or not source.strip():
        raise InputError(
            f"There is no model at {source!r}. A Hub id such as Qwen/Qwen3-0.6B, a local directory "
            "with config.json or a GGUF file is accepted. Leave the model out to use the tiny "
            "reasoner inside."
        )
    return source, {}


def _dtype(name: str) -> torch.dtype | None:
    if name not in _DTYPES:
        raise InputError(f"--dtype is {name!r}. One of {', '.join(_DTYPES)} is accepted.")
    return None if name == "auto" else getattr(torch, name)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {name!r} cannot be used: {reason}") from error
    return device
