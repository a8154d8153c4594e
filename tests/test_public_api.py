"""The public surface: what it names, that its examples run, and that nothing else happens.

`import ssr_hf` must leave the process as it was: no CUDA call, nothing patched, no random number
drawn. `enable` may change one instance, never a class.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import logging
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from helpers import enabled
from transformers import GenerationMixin

import ssr_hf

DOCTEST_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PUBLIC = [name for name in ssr_hf.__all__ if name != "__version__"]
CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(ssr_hf, name))]


def module_names() -> list[str]:
    """Every module of the package but the entry points, which run when they are imported."""
    found = pkgutil.walk_packages(ssr_hf.__path__, prefix="ssr_hf.")
    return ["ssr_hf", *(info.name for info in found if not info.name.endswith("__main__"))]


def test_all_is_sorted_and_complete() -> None:
    """A name that is public by accident, or one that is listed and cannot be imported."""
    assert list(ssr_hf.__all__) == sorted(set(ssr_hf.__all__))
    visible = {
        name
        for name, value in vars(ssr_hf).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    imported_helpers = {"annotations", "version"}
    assert visible - imported_helpers == set(PUBLIC)


def test_version_is_that_of_the_installed_package() -> None:
    """A version that is written down twice and differs after a release."""
    assert ssr_hf.__version__ == importlib.metadata.version("ssr-hf")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_documented(name: str) -> None:
    """A public name without description or without an example that can be run."""
    text = inspect.getdoc(getattr(ssr_hf, name)) or ""
    assert text.partition("\n")[0].strip()
    assert "Example:" in text and ">>>" in text, f"{name} needs an example"


@pytest.mark.parametrize("name", CLASSES)
def test_public_members_are_documented(name: str) -> None:
    """A method or property of a public class that says nothing about itself."""
    undocumented = [
        member
        for member, value in vars(getattr(ssr_hf, name)).items()
        if not member.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, (property, classmethod)))
        and not inspect.getdoc(getattr(getattr(ssr_hf, name), member))
    ]
    assert not undocumented


def doctests() -> Iterator[Any]:
    """One parameter per docstring with an example, methods included."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module_name in module_names():
        module = importlib.import_module(module_name)
        for test in finder.find(module, module_name):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("example", list(doctests()))
def test_examples_run(example: doctest.DocTest) -> None:
    """An example that shows what the code no longer does."""
    runner = doctest.DocTestRunner(optionflags=DOCTEST_FLAGS)
    report: list[str] = []
    result = runner.run(example, out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


IMPORT = """
import json, logging, os, random, signal, sys, threading, types, warnings
import torch
import transformers.modeling_utils
from transformers import AutoTokenizer, EosTokenCriteria, GenerationMixin
from transformers.generation import candidate_generator

def refuse(name):
    def touched(*args, **kwargs):
        raise RuntimeError(f"torch.cuda.{name} was called")
    return touched

for name, value in list(vars(torch.cuda).items()):
    if isinstance(value, types.FunctionType):
        setattr(torch.cuda, name, refuse(name))

def settings():
    return {
        "environment": dict(os.environ),
        "random": random.getstate(),
        "torch random": torch.get_rng_state().tolist(),
        "threads": (threading.active_count(), torch.get_num_threads()),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "warnings": list(warnings.filters),
        "handlers": list(logging.root.handlers),
        "levels": (logging.root.level, logging.getLogger("transformers").level),
        "signal": signal.getsignal(signal.SIGINT),
        "hooks": (sys.excepthook, sys.path[:]),
    }

def members():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "transformers"):
            for key, value in list(vars(module).items()):
                found[name, key] = value
                for attribute, inner in vars(value).items() if isinstance(value, type) else ():
                    found[name, key, attribute] = inner
    return found

loaded_before, settings_before, before = set(sys.modules), settings(), members()
failure = None
try:
    import ssr_hf
except RuntimeError as error:
    failure = str(error)
settings_after, after = settings(), members()
try:
    torch.cuda.is_available()
except RuntimeError:
    is_guarded = True
print(json.dumps({
    "failure": failure,
    "is_guarded": is_guarded,
    "loaded": sorted(set(sys.modules) - loaded_before),
    "watched": len(before),
    "changed": [k for k, v in before.items() if k in after and after[k] is not v],
    "settings": [k for k, v in settings_before.items() if settings_after[k] != v],
}))
"""


@pytest.fixture(scope="module")
def fresh_import() -> dict[str, Any]:
    """What `import ssr_hf` did in a process where torch and transformers were loaded before."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_import_touches_no_cuda(fresh_import: dict[str, Any]) -> None:
    """A device that is initialised on import: it costs memory and breaks processes that fork."""
    assert fresh_import["is_guarded"]
    assert fresh_import["failure"] is None


def test_import_loads_no_application(fresh_import: dict[str, Any]) -> None:
    """A library that brings its command line, its demo or an optional dependency along."""
    loaded = fresh_import["loaded"]
    assert "ssr_hf.generation" in loaded
    applications = ("ssr_hf.cli", "ssr_hf.demo", "ssr_hf.evaluation", "ssr_hf.benchmark")
    extras = ("accelerate", "datasets", "evaluate", "gguf", "gradio", "matplotlib", "peft", "typer")
    assert not [name for name in loaded if name.startswith((*applications, *extras))]


def test_import_changes_nothing(fresh_import: dict[str, Any]) -> None:
    """A patch of the host or of a global setting, which every other user of the process meets."""
    assert fresh_import["watched"] > 10_000
    assert not fresh_import["changed"]
    assert not fresh_import["settings"]


HOST_CLASSES = (
    GenerationMixin,
    transformers.PreTrainedModel,
    transformers.Qwen3ForCausalLM,
    transformers.Cache,
    transformers.DynamicCache,
    transformers.cache_utils.DynamicLayer,
    transformers.LogitsProcessorList,
    transformers.StoppingCriteriaList,
    torch.nn.Module,
)


def test_generating_leaves_classes_and_other_models_alone() -> None:
    """An `enable` that patches a class: every other model in the process would change with it."""
    before = [dict(vars(host)) for host in HOST_CLASSES]
    model, tokenizer = ssr_hf.load_tiny_reasoner()
    other, _ = ssr_hf.load_tiny_reasoner()
    inputs = tokenizer("Keep any colour but red.", return_tensors="pt")
    handlers = list(logging.root.handlers)
    with enabled(model):
        settings = {"max_new_tokens": 24, "do_sample": False, "tokenizer": tokenizer}
        model.generate(**inputs, **settings, self_speculation={"draft_budget": 4})
        assert "generate" not in vars(other)
        assert other.generate.__func__ is GenerationMixin.generate
    assert model.generate.__func__ is GenerationMixin.generate
    assert logging.root.handlers == handlers
    for host, members in zip(HOST_CLASSES, before, strict=True):
        after = dict(vars(host))
        changed = [name for name in members | after if members.get(name) is not after.get(name)]
        assert not changed, host
