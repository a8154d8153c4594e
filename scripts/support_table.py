"""Print what is supported, as Markdown, from the tables that the code itself uses.

    python scripts/support_table.py
    python scripts/support_table.py --write README.md

`--write` replaces what stands in a file between `BEGIN` and `END`; a test compares the README.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from transformers import DynamicCache

from ssr_hf.cache.layers import LAYER_KINDS
from ssr_hf.cache.support import UNSUPPORTED_CACHES, Unsupported, cache_support
from ssr_hf.lanes import LANE_TYPES
from ssr_hf.lanes.concurrency import HAZARDS
from ssr_hf.markers import PRESETS

BEGIN = "<!-- support: written by scripts/support_table.py -->"
END = "<!-- support: end -->"

BAR = r"\|"  # inside a cell

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def render() -> str:
    """The whole section."""
    return "\n\n".join((_caches(), _markers(), _lanes(), _hazards()))


def _caches() -> str:
    layers_by_kind: dict[str, list[str]] = {}
    for layer, kind in LAYER_KINDS.items():
        if layer.__module__.startswith("transformers."):  # not the package's own stand-in
            layers_by_kind.setdefault(_first_sentence(type(kind)), []).append(layer.__name__)
    supported = [(_code(names), "yes", why) for why, names in layers_by_kind.items()]
    refused = [(_code([cache.__name__]), "no", why) for cache, why in UNSUPPORTED_CACHES.items()]
    headings = ("cache, or layers of a cache", "supported", "how, or why not")
    return _table(headings, [*supported, *refused, *_others()])


def _others() -> Iterable[tuple[str, str, str]]:
    """Caches that are refused for what they do, not for their class."""
    offloaded = DynamicCache()
    offloaded.offloading = True
    for name, cache in (("offloaded cache", offloaded), ("no cache", None)):
        support = cache_support(cache)
        assert isinstance(support, Unsupported), f"{name} is supported now"
        yield name, "no", support.reason


def _markers() -> str:
    rows = [
        (preset.families, _code([preset.start]), _code(preset.end, " or ")) for preset in PRESETS
    ]
    return _table(("model family", "thinking begins", "thinking ends"), rows)


def _lanes() -> str:
    rows = [(_code([name]), _first_sentence(lane)) for name, lane in LANE_TYPES.items()]
    return _table(("lane", "how drafts run"), rows)


def _hazards() -> str:
    lines = [f"- {hazard.reason}" for hazard in HAZARDS]
    return "\n".join(["The lane `stream` is refused for a model if", "", *lines])


def _first_sentence(documented: type) -> str:
    sentence = " ".join((documented.__doc__ or "").split("\n\n")[0].split()).rstrip(".")
    return sentence[:1].lower() + sentence[1:]


def _code(texts: Sequence[str], between: str = ", ") -> str:
    return between.join(f"`{text}`" for text in texts)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(_line(cells) for cells in (headings, ["---"] * len(headings), *rows))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def replaced(text: str) -> str:
    """`text` with the section between the two comments brought up to date."""
    before, found, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise typer.BadParameter(f"the file has no lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{render()}\n\n{END}{after}"


@app.command()
def main(
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Bring the section of this file up to date.")
    ] = None,
) -> None:
    """Print what is supported, as Markdown."""
    if write is None:
        typer.echo(render())
        return
    write.write_text(replaced(write.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    app()
