"""The web demo: text streams in on the left, coloured by who proposed it, statistics on the right.

This file can serve as the `app.py` of a Hugging Face Space. Other models:
`build_app(model, tokenizer)`.
"""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

import ssr_hf
from ssr_hf.demo.streaming import Pieces, Progress, encode, stream

LABELS = {"draft": "draft, accepted", "suffix": "suffix match, accepted", "marker": "end marker"}
COLOURS = {"draft": "#bfe5cb", "suffix": "#bfe3ea", "marker": "#e0cfee"}
REDRAW_SECONDS = 0.05
WARM_UP_TOKENS = 12
MISSING_GRADIO = (
    "The web demo needs gradio, which is not installed. Run pip install gradio, or see the "
    "same in a terminal with ssr-hf demo."
)
_INTRODUCTION = """
## Self-speculation for reasoning models
While the model thinks, it drafts its answer in the same forwards. When thinking ends, the draft
is verified at once: **coloured text cost no forward of its own**, and every token is the one that
plain `generate` writes.
"""


def build_app(model: Any = None, tokenizer: Any = None) -> Any:
    """Builds the app.

    Args:
        model (`PreTrainedModel`, *optional*): A reasoning model; the tiny reasoner that comes with
            the package when None.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer, with a chat template.

    Returns:
        `gradio.Blocks`: Ready to `launch()`.

    Raises:
        `ImportError`: gradio is not installed.
        `SelfSpeculationError`: The model has no thinking markers or cannot be accelerated.

    Example:

    ```python
    >>> from ssr_hf.demo import build_app
    >>> app = build_app()  # doctest: +SKIP
    >>> app.launch()  # doctest: +SKIP

    ```
    """
    if find_spec("gradio") is None:
        raise ImportError(MISSING_GRADIO)
    import gradio

    if model is None:
        model, tokenizer = ssr_hf.load_tiny_reasoner()
        ssr_hf.fit_threads(model)
    ssr_hf.enable(model)
    examples = [problem.prompt for problem in ssr_hf.tiny_reasoner_prompts(4, seed=0)]
    _warm_up(model, tokenizer, examples[0])

    def answer(*values: Any) -> Iterator[tuple[str, str]]:
        try:
            yield from respond(model, tokenizer, *values)
        except ssr_hf.SelfSpeculationError as error:
            raise gradio.Error(str(error)) from error

    with gradio.Blocks(title="ssr_hf") as app:
        gradio.Markdown(_INTRODUCTION)
        with gradio.Row():
            with gradio.Column(scale=3):
                prompt = gradio.Textbox(examples[0], label="Prompt", lines=8)
                run = gradio.Button("Generate", variant="primary")
                text = gradio.HTML(label="Text")
            with gradio.Column(scale=2):
                draft_budget = gradio.Slider(
                    16, 512, 128, step=16, label="Draft after so many thinking tokens"
                )
                max_new_tokens = gradio.Slider(64, 1024, 768, step=64, label="Longest generation")
                compare = gradio.Checkbox(True, label="Compare with plain generate")
                figures = gradio.Markdown()
        gradio.Examples([[example] for example in examples], [prompt])
        inputs = [prompt, draft_budget, max_new_tokens, compare]
        run.click(answer, inputs, [text, figures])
    return app


def _warm_up(model: Any, tokenizer: Any, prompt: str) -> None:
    """Takes what only a first call costs, such as probing the model, out of the first click."""
    # A draft, too, asks the model something once.
    config = ssr_hf.SelfSpeculationConfig(draft_budget=2, adaptive=False)
    for _ in stream(model, tokenizer, prompt, config, WARM_UP_TOKENS):
        pass


def respond(
    model: Any,
    tokenizer: Any,
    prompt: str,
    draft_budget: int,
    max_new_tokens: int,
    compare: bool,
) -> Iterator[tuple[str, str]]:
    """What the app shows while it generates, and in the end next to plain generate.

    Yields:
        `tuple[str, str]`: Coloured text as HTML and statistics as Markdown.
    """
    config = ssr_hf.SelfSpeculationConfig(draft_budget=int(draft_budget)).without_history()
    progress = Progress()
    shown_at = 0.0
    for progress in stream(model, tokenizer, prompt, config, int(max_new_tokens)):
        if progress.seconds - shown_at > REDRAW_SECONDS:
            shown_at = progress.seconds
            yield coloured(progress.pieces), _figures(progress)
    text, figures = coloured(progress.pieces), _figures(progress)
    yield text, figures
    if not compare:
        return
    yield text, f"{figures}\n\nRunning plain generate ..."
    inputs = encode(model, tokenizer, prompt)
    began = time.perf_counter()
    plain = model.generate(**inputs, max_new_tokens=int(max_new_tokens), do_sample=False)
    seconds = time.perf_counter() - began
    same = torch.equal(plain, progress.output.sequences)
    rows = (
        ("plain generate", f"{seconds:.2f} s"),
        ("speed-up", f"{seconds / progress.seconds:.2f}x"),
        ("identical output", "yes" if same else "**no**"),
    )
    yield text, "\n".join([figures, *(f"| {name} | {value} |" for name, value in rows)])


def coloured(pieces: Pieces) -> str:
    """Labelled text as HTML, with a legend."""
    legend = " ".join(_span(LABELS[source], source) for source in ("draft", "suffix"))
    text = "".join(_span(text, source) for text, source in pieces)
    return f"<p>{legend}</p><pre style='white-space: pre-wrap; line-height: 1.5'>{text}</pre>"


def _span(text: str, source: str | None) -> str:
    if source is None:
        return html.escape(text)
    style = f"background: {COLOURS[source]}; color: #1b1d21; border-radius: 2px"
    return f"<span style='{style}'>{html.escape(text)}</span>"


def _figures(progress: Progress) -> str:
    """Statistics as a Markdown table."""
    accepted = progress.accepted
    rows = {
        "tokens": progress.n_tokens,
        "forwards": progress.forwards,
        "tokens per forward": f"{progress.n_tokens / max(1, progress.forwards):.2f}",
        "accepted from drafts": accepted.get("draft", 0),
        "accepted from suffix matches": accepted.get("suffix", 0),
        "self-speculation": f"{progress.seconds:.2f} s",
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|:--|--:|", *lines])


def main() -> None:
    """Starts the app; ends with exit code 2 where gradio is missing."""
    try:
        app = build_app()
    except ImportError as error:
        sys.stderr.write(f"error  {error}\n")
        raise SystemExit(2) from None
    app.launch()


if __name__ == "__main__":
    main()
