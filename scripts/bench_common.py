"""What several benchmarks share: models, data sets, counted forwards and saved results."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import ssr_hf

TINY = "tiny"


def load(name: str, dtype: str = "float32") -> tuple[Any, Any]:
    """Model and tokenizer: a Hub id, a directory, a GGUF file, or the embedded model by `tiny`."""
    if name == TINY:
        return ssr_hf.load_tiny_reasoner()
    return load_model(name, dtype), load_tokenizer(name)


def load_model(name: str, dtype: str = "float32") -> Any:
    """The model alone."""
    if name == TINY:
        return ssr_hf.load_tiny_reasoner()[0]
    model = AutoModelForCausalLM.from_pretrained(**_source(name), dtype=getattr(torch, dtype))
    return model.eval()


def load_tokenizer(name: str) -> Any:
    """A tokenizer from a Hub id, a directory or a GGUF file."""
    return AutoTokenizer.from_pretrained(**_source(name))


def _source(name: str) -> dict[str, str]:
    """What `from_pretrained` is given."""
    path = Path(name)
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": name}


def read_rows(
    source: str, fields: Sequence[str], n_rows: int, subset: str | None = None, split: str = "test"
) -> list[dict[str, Any]]:
    """The first rows of a data set.

    Args:
        source (`str`): A JSONL file, which may be compressed, a folder, or a data set of the Hub.
        fields (`Sequence[str]`): Columns that it must have.
        n_rows (`int`): Most rows.
        subset (`str`, *optional*): Name of a part of the data set; not for files.
        split (`str`): Likewise.

    Returns:
        `list[dict[str, Any]]`: The rows, in order.

    Raises:
        `typer.BadParameter`: `datasets` is not installed, or a column is missing.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise typer.BadParameter("data sets need `pip install datasets`") from error
    if Path(source).is_file():
        data = load_dataset("json", data_files=source, split="train")
    else:
        data = load_dataset(source, subset, split=split)
    missing = [field for field in fields if field not in data.column_names]
    if missing:
        columns = ", ".join(data.column_names)
        raise typer.BadParameter(f"{source} has no column {missing[0]!r}; it has {columns}")
    return list(data.select(range(min(n_rows, len(data)))))


def require_saving(path: Path | None) -> None:
    """Refuses `--save` before anything is measured where results could not be saved.

    Raises:
        `typer.BadParameter`: `evaluate` is not installed.
    """
    if path is not None and find_spec("evaluate") is None:
        raise typer.BadParameter("--save needs `pip install evaluate`")


def save_results(path: Path | None, facts: dict[str, Any]) -> None:
    """Writes what a benchmark found, with time and commit; a folder gets a file of its own."""
    if path is not None:
        import evaluate

        evaluate.save(path, **facts)


class ForwardCounter:
    """Counts a model's forwards while it is entered.

    Args:
        model (`PreTrainedModel`): The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.forwards = 0

    def __enter__(self) -> ForwardCounter:
        def count(*_: Any) -> None:
            self.forwards += 1

        self._handle = self._model.register_forward_hook(count)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
