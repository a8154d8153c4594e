"""The layers of the package, checked on its real import graph.

A module may import what stands above it in `LAYERS`, or what lies in its own sub-package. Imports
for annotations only are held to the same order, so that none of them hides a cycle.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import ssr_hf
from ssr_hf.lanes import LANE_TYPES

PACKAGE = "ssr_hf"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE

LAYERS = (
    "errors",
    "config",
    "acceptance",
    "records",
    "suffix_index",
    "tokens",
    "detokenizer",
    "compat",
    "markers",
    "budget",
    "commit",
    "stats",
    "profile",
    "pacing",
    "cache",
    "target",
    "rows",
    "lanes",
    "drafting",
    "candidates",
    "specreason",
    "outputs",
    "decoding",
    "host_call",
    "assembly",
    "refusals",
    "generation",
)
# Data and its loader: they import no layer, and no layer imports them.
ASSETS = "assets"
APPLICATIONS = ("cli", "demo", "evaluation", "benchmark")

# A new release of transformers is met here and nowhere else.
MAY_IMPORT_TRANSFORMERS = {
    "compat",
    "cache",
    "budget",
    "candidates",
    "rows",
    "outputs",
    "specreason",
    "host_call",
    "assembly",
    "refusals",
    "generation",
}
WITHOUT_TORCH = (
    "errors",
    "config",
    "records",
    "suffix_index",
    "detokenizer",
    "markers",
    "profile",
    "pacing",
    "stats",
    ASSETS,
)
EXTRAS = {
    "accelerate",
    "datasets",
    "evaluate",
    "flash_attn",
    "gguf",
    "gradio",
    "matplotlib",
    "peft",
}


class Import(NamedTuple):
    """One imported module, or one imported name of a module of the package.

    `module` is its full name, `name` what is taken from it (None for `import x`), `typing_only`
    whether it stands under `TYPE_CHECKING`, `lazy` whether it stands in a function.
    """

    module: str
    name: str | None
    line: int
    typing_only: bool
    lazy: bool

    @property
    def distribution(self) -> str:
        return self.module.partition(".")[0]


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its full name."""
    paths = sorted(ROOT.rglob("*.py"))
    return {_name(path): path for path in paths}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(module: str) -> tuple[Import, ...]:
    """Everything that `module` imports, wherever the import stands."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return tuple(_walk(tree, package, typing_only=False, lazy=False))


def _walk(node: ast.AST, package: str, typing_only: bool, lazy: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, None, node.lineno, typing_only, lazy)
    elif isinstance(node, ast.ImportFrom):
        source = _absolute(node, package)
        for alias in node.names:
            inner = f"{source}.{alias.name}"
            found = (inner, None) if inner in modules() else (source, alias.name)
            yield Import(*found, node.lineno, typing_only, lazy)
    elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        for child in node.body:
            yield from _walk(child, package, True, lazy)
        for child in node.orelse:
            yield from _walk(child, package, typing_only, lazy)
    else:
        lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, package, typing_only, lazy)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def own_imports(module: str) -> Iterator[Import]:
    """What `module` imports of the package itself."""
    return (entry for entry in imports(module) if entry.distribution == PACKAGE)


def unit(module: str) -> str:
    """The top-level file or sub-package that `module` belongs to; `""` for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def where(module: str, entry: Import) -> str:
    """An import, for a failure message."""
    return f"{module}:{entry.line} imports {entry.module}"


def violations(allowed: set[str] | None, module: str) -> list[str]:
    """Imports of `module` outside its own unit that are not in `allowed`; None allows all."""
    return [
        where(module, entry)
        for entry in own_imports(module)
        if unit(entry.module) != unit(module)
        and allowed is not None
        and unit(entry.module) not in allowed
    ]


def test_every_module_has_a_layer() -> None:
    """A new file that nobody placed: nothing would be checked for it."""
    placed = {"", ASSETS, *LAYERS, *APPLICATIONS}
    assert {unit(module) for module in modules()} <= placed
    assert set(LAYERS) <= {unit(module) for module in modules()}
    assert len(set(LAYERS)) == len(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_up(layer: str) -> None:
    """A lower part that reaches for a higher one: the loop can then no longer be read in order."""
    above = set(LAYERS[: LAYERS.index(layer)])
    found = [v for module in modules() if unit(module) == layer for v in violations(above, module)]
    assert not found, f"{layer} may import {sorted(above)} only"


def test_private_names_of_others_are_met_in_one_place() -> None:
    """A private attribute of torch or transformers outside of `compat`: a release that drops it."""
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules().items()}
    own = {node.name for tree in trees.values() for node in ast.walk(tree) if _is_definition(node)}
    own |= {"_replace", "_asdict"}  # of named tuples, documented in spite of their names
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if ast.unparse(node.value) == "self" else set()
    found = [
        f"{name}:{node.lineno} uses {attribute}"
        for name, tree in trees.items()
        if unit(name) != "compat"
        for node in ast.walk(tree)
        for attribute in _attributes(node)
        if re.match("_[a-z]", attribute) and attribute not in own
    ]
    assert not found


def _is_definition(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.ClassDef))


def _attributes(node: ast.AST) -> Iterator[str]:
    """The attribute that `x.name` reads, or `getattr(x, "name", ...)`."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    is_getattr = isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
    if is_getattr and isinstance(node.args[1], ast.Constant):
        yield node.args[1].value


def test_assets_stand_alone() -> None:
    """Data that drags the library in, or a part of the library that depends on the tiny model."""
    own = [m for m in modules() if unit(m) == ASSETS]
    assert not [v for module in own for v in violations(set(), module)]
    layers = [m for m in modules() if unit(m) in LAYERS]
    assert not [where(m, e) for m in layers for e in own_imports(m) if unit(e.module) == ASSETS]


def test_modules_have_no_import_cycle() -> None:
    """Two modules that need each other, sub-packages and imports for annotations included."""
    graph = {
        module: {entry.module for entry in own_imports(module)} - {module} for module in modules()
    }
    assert set(graphlib.TopologicalSorter(graph).static_order()) == set(modules())


def test_lanes_do_not_know_each_other() -> None:
    """A lane that leans on another one, so that adding or dropping one changes both."""
    lanes = {lane.__module__ for lane in LANE_TYPES.values()}
    inside = [module for module in modules() if module.startswith(f"{PACKAGE}.lanes.")]
    found = [
        where(module, entry)
        for module in inside
        for entry in own_imports(module)
        if entry.module in lanes - {module}
    ]
    assert lanes < set(inside)
    assert not found


def test_who_imports_transformers() -> None:
    """The host's private ways spread over the package: each release would break many files."""
    found = {
        unit(module)
        for module in modules()
        for entry in imports(module)
        if entry.distribution == "transformers" and not entry.typing_only and not entry.lazy
    }
    assert found - set(APPLICATIONS) == MAY_IMPORT_TRANSFORMERS


@pytest.mark.parametrize("layer", WITHOUT_TORCH)
def test_pure_python_stays_pure(layer: str) -> None:
    """Tensors in parts that run once per token: they would wait for the device."""
    found = [
        where(module, entry)
        for module in modules()
        if unit(module) == layer
        for entry in imports(module)
        if entry.distribution in ("torch", "numpy") and not (entry.typing_only or entry.lazy)
    ]
    assert not found


def test_applications_use_the_public_surface() -> None:
    """An application that works only as long as internals stay: users could not write it."""
    public = set(ssr_hf.__all__)
    found = [
        where(module, entry)
        for module in modules()
        if unit(module) in APPLICATIONS
        for entry in own_imports(module)
        if unit(entry.module) not in (unit(module), "")
        or (entry.module == PACKAGE and entry.name not in public | {None})
    ]
    assert not found


def test_applications_name_nothing_private() -> None:
    """`ssr_hf.something` in an application that is a sub-module and not a public name."""
    found = [
        f"{module}:{node.lineno} uses {PACKAGE}.{node.attr}"
        for module in modules()
        if unit(module) in APPLICATIONS
        for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == PACKAGE
        and node.attr not in ssr_hf.__all__
    ]
    assert not found


def test_extras_are_loaded_lazily_in_applications_only() -> None:
    """An optional dependency that becomes necessary for everyone."""
    found = [
        where(module, entry)
        for module in modules()
        for entry in imports(module)
        if entry.distribution in EXTRAS and not entry.typing_only
        if not entry.lazy or unit(module) not in APPLICATIONS
    ]
    assert not found


def test_the_reader_of_imports_sees_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that overlooks a form of import, so that all the tests above pass on anything."""
    source = (
        "import torch.nn\n"
        "from . import compat\n"
        "from .lanes import Lane as L\n"
        "if TYPE_CHECKING:\n    from .target import Target\n"
        "def f():\n    from ssr_hf.cache import fork\n"
    )
    found = list(_walk(ast.parse(source), PACKAGE, typing_only=False, lazy=False))
    assert found == [
        Import("torch.nn", None, 1, False, False),
        Import("ssr_hf.compat", None, 2, False, False),
        Import("ssr_hf.lanes", "Lane", 3, False, False),
        Import("ssr_hf.target", "Target", 5, True, False),
        Import("ssr_hf.cache.fork", None, 7, False, True),
    ]
    monkeypatch.setitem(globals(), "imports", lambda module: tuple(found))
    assert violations({"lanes", "target"}, f"{PACKAGE}.generation") == [
        "ssr_hf.generation:2 imports ssr_hf.compat",
        "ssr_hf.generation:7 imports ssr_hf.cache.fork",
    ]
