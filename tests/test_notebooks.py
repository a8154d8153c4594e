"""The notebooks are valid and their code cells run, without jupyter."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
LACKS_MATPLOTLIB = find_spec("matplotlib") is None


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path: Path) -> list[tuple[str, str, bool]]:
    """Id, source and whether it draws, of each code cell."""
    return [
        (cell["id"], "".join(cell["source"]), "plot" in cell["metadata"].get("tags", ()))
        for cell in read(path)["cells"]
        if cell["cell_type"] == "code"
    ]


def test_there_is_a_notebook() -> None:
    """A renamed directory, which would leave the tests below without anything to run."""
    assert [path.name for path in NOTEBOOKS] == ["quickstart.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_valid_and_clean(path: Path) -> None:
    """A file that jupyter refuses, or one committed with outputs of somebody's machine."""
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert isinstance(cell["metadata"], dict) and isinstance(cell["source"], list)
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_cells_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that no longer fits the library; the notebook itself asserts identical output."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ran = []
    for name, source, draws in code_cells(path):
        if draws and LACKS_MATPLOTLIB:
            continue
        exec(compile(source, f"{path.name}:{name}", "exec"), namespace)
        ran.append(name)
    assert {"load", "generate", "statistics"} <= set(ran)
    assert namespace["stats"].new_tokens == len(namespace["new_tokens"])
