"""The README is true: its code runs, its commands work, its tables are those of the code."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import metadata, requires
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import typer
from families import FAMILIES
from packaging.specifiers import SpecifierSet
from pip._internal.commands import create_command
from typer.testing import CliRunner

import ssr_hf
from ssr_hf import SelfSpeculationConfig, StepSpeculationConfig, SuffixConfig
from ssr_hf.assets import TINY_REASONER_DIR
from ssr_hf.cli import app as ssr_hf_app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HUB_ID = re.compile(r"\bQwen/[\w.-]+")
LACKS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is None

# What is appended to a command so that it ends soon; the last value of an option counts.
SHORTER = {
    "ssr-hf demo": ["--runs", "1", "-n", "24"],
    "ssr-hf generate": ["-n", "24"],
    "ssr-hf trace": ["-n", "24"],
    "ssr-hf check": ["--tokens", "16"],
    "scripts/bench_generate.py": ["--n-prompts", "1", "--max-new-tokens", "24"],
    "scripts/check_lossless.py": ["--tokens", "16"],
}


class Block(NamedTuple):
    """A fenced block and the line of the file on which its code begins."""

    language: str
    code: str
    line: int


class Command(NamedTuple):
    """One command of a shell block, in words."""

    words: tuple[str, ...]
    line: int

    @property
    def text(self) -> str:
        return shlex.join(self.words)


def blocks(text: str, language: str) -> list[Block]:
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start()) + 2)
        for found in FENCE.finditer(text)
        if found[1] == language
    ]


def commands(text: str) -> Iterator[Command]:
    """Every command of every shell block; continued lines are one, `a && b` are two."""
    for block in blocks(text, "bash"):
        for number, line in enumerate(block.code.replace("\\\n", " ").splitlines()):
            for part in line.split(" && "):
                words = tuple(shlex.split(part, comments=True))
                if words:
                    yield Command(words, block.line + number)


COMMANDS = [
    pytest.param(command, id=f"{name}:{command.line} {command.text[:40]}")
    for name, text in (("README", README), ("CONTRIBUTING", CONTRIBUTING), ("scripts", MEASURED))
    for command in commands(text)
]


def section(heading: str) -> str:
    """The text below a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", README, re.M | re.S)
    assert found, f"the README has no heading {heading!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in `text`, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = {at for at, row in enumerate(cells) if at and set(row[0]) <= set("-: ")}
    return [row for at, row in enumerate(cells) if at not in heads and at + 1 not in heads]


def load_script(path: str) -> ModuleType:
    """A script as a module, without running it."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that a reader copies and that fails; blocks are run in order, as one session.

    The tiny reasoner stands in for models of the Hub, and generations are cut short.
    """
    monkeypatch.chdir(tmp_path)
    found = blocks(README, "python")
    assert len(found) >= 6
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in found:
        code = HUB_ID.sub(TINY_REASONER_DIR.as_posix(), block.code)
        code = re.sub(r"(max_new_tokens\W+)\d+", r"\g<1>32", code)
        code = code.replace('dtype="auto"', 'dtype="float32"')
        source = "\n" * (block.line - 1) + code
        exec(compile(source, str(ROOT / "README.md"), "exec"), namespace)
    assert namespace["output"].step_speculation is not None
    assert (tmp_path / "profile.json").is_file()


@pytest.mark.parametrize("command", COMMANDS)
def test_shell_commands_are_accepted(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command, a file or an option that does not exist (any more), or one that fails.

    Commands of this project run, shortened, with the tiny reasoner in place of models of the Hub.
    Of other tools the options are checked.
    """
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl")
    program, *arguments = command.words
    if program == "pip":
        check_pip(arguments)
    elif program == "ssr-hf":
        run_typer(ssr_hf_app, f"ssr-hf {arguments[0]}", arguments)
    elif program == "python" and arguments[0] == "-m":
        check_module(arguments[1])
    elif program == "python":
        run_script(arguments)
    elif program in ("ruff", "mypy"):
        check_tool(program, arguments)
    else:
        assert (program, *arguments) == ("bash", ".ci/run")
        subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)


def write_prompts(path: Path) -> None:
    problems = ssr_hf.tiny_reasoner_prompts(2, seed=0)
    lines = [json.dumps({"id": n, "prompt": p.prompt}) for n, p in enumerate(problems)]
    path.write_text("\n".join(lines), encoding="utf-8")


def check_pip(arguments: list[str]) -> None:
    action, *rest = arguments
    options, requirements = create_command(action).parse_args(rest)
    required = [*requirements, *options.editables]
    assert required
    for requirement in required:
        found = re.fullmatch(r"(\.|[\w-]+)(?:\[([\w,]+)\])?", requirement)
        assert found, requirement
        if found[1] == ".":
            assert set((found[2] or "").split(",")) <= {"", *extras()}, requirement
        else:
            assert any(re.match(rf"{found[1]}\b", known) for known in requires("ssr-hf") or ())


def extras() -> set[str]:
    """Names of the optional dependencies."""
    _, _, rest = PYPROJECT.partition("[project.optional-dependencies]\n")
    return set(re.findall(r"^([\w-]+) = \[", rest.partition("\n\n")[0], re.MULTILINE))


def check_module(name: str) -> None:
    if name == "build":  # a tool for releases, in no extra
        return
    if name == "ssr_hf.demo":
        name = "ssr_hf.demo.__main__"
    assert importlib.util.find_spec(name) is not None


def check_tool(program: str, arguments: list[str]) -> None:
    assert f"[tool.{program}" in PYPROJECT
    options = [word for word in arguments if word.startswith("-")]
    if not options or shutil.which(program) is None:
        return
    run = subprocess.run([program, arguments[0], "--help"], capture_output=True, text=True)
    assert all(option in run.stdout for option in options), run.stdout


def run_script(arguments: list[str]) -> None:
    script, *rest = arguments
    module = load_script(script)
    script_app = getattr(module, "app", None)
    if script_app is None:
        script_app = typer.Typer()
        script_app.command()(module.main)
    rest = [str(ROOT / word) if word == "README.md" else word for word in rest]
    run_typer(script_app, script, rest)


def run_typer(app: typer.Typer, name: str, arguments: list[str]) -> None:
    """Runs a command, shortened; parses it where it reads what only the reader has."""
    words = [HUB_ID.sub(str(TINY_REASONER_DIR), word) for word in arguments]
    if any("DIR" in word or word.endswith(".gguf") or word == "openai/gsm8k" for word in words):
        parse(app, words)
        return
    result = CliRunner().invoke(app, [*words, *SHORTER.get(name, [])])
    if "--plot" in words and LACKS_MATPLOTLIB:
        assert result.exit_code == 2
        assert "matplotlib" in result.stderr
        parse(app, words)
        return
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() or {"--output", "--write"} & set(words)


def parse(app: typer.Typer, words: list[str]) -> None:
    """Parses without running; unknown options and values of a wrong type are refused."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("test", list(words))
    if hasattr(command, "resolve_command"):
        name, inner, rest = command.resolve_command(context, list(words))
        inner.make_context(name, rest, parent=context)


def test_a_wrong_command_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of commands that accept everything."""
    monkeypatch.chdir(tmp_path)
    for words in (("demo", "--no-such-option"), ("generate", "--input", "missing.jsonl")):
        with pytest.raises(AssertionError):
            run_typer(ssr_hf_app, f"ssr-hf {words[0]}", list(words))
    with pytest.raises(AssertionError):
        check_pip(["install", ".[no-such-extra]"])
    with pytest.raises(AssertionError):
        check_module("no_such_module")


def test_the_two_commands_are_those_of_the_continuous_integration() -> None:
    """A `.ci/run` that installs or tests in another way than a reader does."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for name in ("install-and-run", "install-and-test"):
        assert f"run_readme_command {name}\n" in script
        assert README.count(f"<!-- {name} -->\n\n```bash\n") == 1


def defaults(config: type, prefix: str = "") -> dict[str, Any]:
    """The true default of every field, by the name it has in the README."""
    instance = config()
    return {f"{prefix}{f.name}": getattr(instance, f.name) for f in dataclasses.fields(config)}


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("Options", {**defaults(SelfSpeculationConfig), **defaults(SuffixConfig, "suffix.")}),
        ("SpecReason", defaults(StepSpeculationConfig)),
    ],
    ids=["Options", "SpecReason"],
)
def test_options_table_has_every_field_with_its_default(
    heading: str, expected: dict[str, Any]
) -> None:
    """A new option that nobody documents, or a default that changed in the code alone."""
    stated = {}
    for name, default, meaning in rows(section(heading)):
        assert meaning
        value = default.strip("`")
        stated[name.strip("`")] = (
            SuffixConfig() if value == "SuffixConfig()" else ast.literal_eval(value)
        )
    assert stated == expected


def test_statistics_table_has_every_figure() -> None:
    """A figure without a definition, or a definition of a figure that is gone."""
    stats = ssr_hf.SpeculationStats
    fields = {f.name for f in dataclasses.fields(stats)}
    properties = {name for name, value in vars(stats).items() if isinstance(value, property)}
    stated = [name.strip("`") for name, _ in rows(section("Statistics"))]
    assert sorted(stated) == sorted(fields | properties)


def test_support_section_is_generated() -> None:
    """Tables that promise another support than the code gives."""
    script = load_script("scripts/support_table.py")
    hint = "run python scripts/support_table.py --write README.md"
    assert script.replaced(README) == README, hint


def test_tested_families_are_those_of_the_matrix() -> None:
    """A family that is promised and not tested."""
    text = section("What is supported").partition("families:")[2]
    named = set(re.findall(r"`(\w+)`", text.partition("candidates.")[0]))
    assert named == set(FAMILIES)


def test_requirements_are_those_of_the_package() -> None:
    """A supported range that is written down twice and differs."""
    for requirement in re.findall(r"It needs `(.*?)` and `(.*?)`", README)[0]:
        assert f'"{requirement}"' in PYPROJECT


def test_python_is_one_that_the_host_takes() -> None:
    """A Python that is promised and for which pip finds no transformers."""
    stated = re.findall(r"Python (\d+\.\d+) or later", README)
    own = re.findall(r'^requires-python = ">=(.*)"$', PYPROJECT, re.MULTILINE)
    assert stated == own
    accepted = SpecifierSet(metadata("transformers")["Requires-Python"])
    assert own[0] in accepted


def mapped_files() -> dict[str, str]:
    """Path and comment of every line of the file map."""
    found: dict[str, str] = {}
    parents: list[str] = []
    for line in blocks(section("Files"), "text")[0].code.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, comment = line.strip().partition(" ")
        parents = [*parents[:depth], name]
        found["".join(parents)] = comment.strip()
    return found


def test_file_map_has_every_file() -> None:
    """A file that a newcomer cannot place, or one that the map invents."""
    mapped = mapped_files()
    missing = [
        path.relative_to(ROOT).as_posix()
        for folder in ("ssr_hf", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in mapped
    ]
    assert not missing
    assert not [path for path in mapped if not (ROOT / path).exists()]
    assert not [path for path, comment in mapped.items() if path.endswith(".py") and not comment]


def anchors_of(path: Path) -> set[str]:
    """The link targets that the headings of a file make."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "notebooks/README.md",
        "scripts/README.md",
        "tests/README.md",
    ],
)
def test_links_lead_somewhere(name: str) -> None:
    """A link to a file that moved, or to a heading that was renamed."""
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, heading = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), target
        assert not heading or heading in anchors_of(linked), target


def test_benchmark_table_has_the_columns_of_the_benchmark() -> None:
    """Figures under headings that the script does not print."""
    table = MEASURED.partition("<!-- benchmarks -->")[2].lstrip()
    columns = [cell.strip() for cell in table.splitlines()[0].split("|")[1:-1]]
    script = (ROOT / "scripts" / "bench_generate.py").read_text(encoding="utf-8")
    assert len(columns) > 5
    assert not [column for column in columns if f'"{column}"' not in script]


def test_one_version_everywhere() -> None:
    """A release whose citation or changelog names another version."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {ssr_hf.__version__}\n" in citation
    assert f'\nversion = "{ssr_hf.__version__}"\n' in PYPROJECT
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[(Unreleased|\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)


def test_the_map_of_the_tests_is_complete() -> None:
    """A test file that nobody can place, or a test that is named and gone."""
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    files = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/test_*.py")}
    assert not [name for name in files if f"`{name}`" not in text]
    defined = {
        name for code in files.values() for name in re.findall(r"^def (test_\w+)", code, re.M)
    }
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named <= defined | {name.removesuffix(".py") for name in files}
