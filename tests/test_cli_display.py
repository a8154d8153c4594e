"""What a terminal shows: colours, wrapping and widths."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from tiny_tokenizers import family_tokenizer

from ssr_hf import DraftReport, Round, SpeculationStats, ThinkingMarkers
from ssr_hf.cli.chart import print_chart
from ssr_hf.cli.comparing import Comparison, medians
from ssr_hf.cli.console import Meter, busy
from ssr_hf.cli.painting import TextPainter, legend
from ssr_hf.cli.report import comparison_table, drafts_line
from ssr_hf.cli.running import Run
from ssr_hf.cli.timeline import answer_start, timeline

TOKENIZER = family_tokenizer("deepseek_r1")
MARKERS = ThinkingMarkers.from_tokenizer(TOKENIZER)
DIM, GREEN, CYAN = "2", "32", "36"


def terminal(width: int) -> Console:
    """A terminal of this width that writes into memory."""
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system="standard",
        highlight=False,
    )


def written(console: Console) -> str:
    """Everything written, with escape codes."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain_lines(console: Console) -> list[str]:
    """The lines without escape codes."""
    return Text.from_ansi(written(console)).plain.splitlines()


def paint(text: str, width: int, source: str = "model", size: int = 1) -> Console:
    """Streams `text` in rounds of `size` tokens."""
    console = terminal(width)
    painter = TextPainter(console, TOKENIZER, MARKERS, frozenset([TOKENIZER.eos_token_id]))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    for at in range(0, len(ids), size):
        painter(ids[at : at + size], [source] * len(ids[at : at + size]))
    painter.finish()
    return console


def stats_of(*rounds: Round, drafts: tuple[DraftReport, ...] = ()) -> SpeculationStats:
    return SpeculationStats(
        rounds=rounds, drafts=drafts, thinking_tokens=3, answer_tokens=9, thinking_ended=True
    )


def round_of(phase: str, source: str, accepted: int, start: float, seconds: float) -> Round:
    """A round that offers two tokens more than it accepts, if it offers any."""
    n_proposed = 0 if source == "none" else accepted + 2
    return Round(
        phase=phase,
        source=source,
        n_fed=n_proposed + 1,
        n_proposed=n_proposed,
        n_accepted=accepted,
        n_committed=accepted + 1,
        rows=1,
        start=start,
        seconds=seconds,
    )


STATS = stats_of(
    round_of("prefill", "none", 0, 0.0, 0.2),
    round_of("thinking", "none", 0, 0.2, 0.3),
    round_of("thinking", "suffix", 1, 0.5, 0.1),
    round_of("answering", "draft", 4, 0.6, 0.1),
    round_of("answering", "suffix", 1, 0.7, 0.1),
    round_of("answering", "none", 0, 0.8, 0.2),
    drafts=(DraftReport(0, 2, 6, 0, "full", accepted_prefix=4, start=0.25, seconds=0.3),),
)

LONG = "A sentence that is long enough to be wrapped more than once, whatever the width is. " * 3
DATA = '  {"name": "Sara", "quantity": 64, "colour": "purple", "item": "wagons", "city": "Oslo"},'


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("text", [LONG, f"rows = [\n{DATA}\n{DATA}\n]", "x" * 300, "漢字" * 90])
def test_wrapping(width: int, text: str) -> None:
    """Lines wider than the terminal, words torn apart, text lost, indentation lost."""
    lines = plain_lines(paint(text, width))
    assert max(map(cell_len, lines)) <= width
    assert "".join("".join(lines).split()) == "".join(text.split())
    if text is LONG:
        assert {word for line in lines for word in line.split()} == set(text.split())
        assert lines[0].startswith("  A") and lines[1].startswith("    ")
    if text.startswith("rows"):
        assert [line for line in lines if "Sara" in line] == [
            line for line in lines if line.startswith("    {")
        ]


def test_continued_lines_hang_below_their_beginning() -> None:
    """Continued rows of data that cannot be told from new ones."""
    first, second, *_ = plain_lines(paint(DATA, 60))
    assert first.startswith("    {") and second.startswith("      ") and second[6] != " "


def test_rounds_do_not_change_the_text() -> None:
    """Text that depends on how many tokens came at once."""
    text = f"{LONG}\n{DATA}\n\nEnd."
    assert plain_lines(paint(text, 80, size=1)) == plain_lines(paint(text, 80, size=7))


def test_colours_say_who_proposed_a_token() -> None:
    """Provenance shown in a wrong colour, or thinking as bright as the answer."""
    console = terminal(80)
    painter = TextPainter(console, TOKENIZER, MARKERS)
    for text, source in [("abc ", "suffix"), ("</think>", "model"), ("def ", "draft"),
                         ("ghi ", "suffix"), ("jkl", "model")]:  # fmt: skip
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        painter(ids, [source] * len(ids))
    painter.finish()
    ansi = written(console)
    assert f"\x1b[{DIM};{CYAN}mabc" in ansi
    assert f"\x1b[{GREEN}mdef" in ansi and f"\x1b[{CYAN}mghi" in ansi
    assert ansi.rstrip().endswith("jkl")
    assert f"\x1b[{GREEN}m■" in legend_ansi()


def legend_ansi() -> str:
    console = terminal(80)
    console.print(legend())
    return written(console)


def test_no_colours_without_a_terminal() -> None:
    """Escape codes or wrapping in a file."""
    console = Console(file=io.StringIO(), width=40)
    painter = TextPainter(console, TOKENIZER, MARKERS)
    ids = TOKENIZER.encode(LONG, add_special_tokens=False)
    painter(ids, ["draft"] * len(ids))
    painter.finish()
    assert written(console) == LONG + "\n"


def test_control_characters_do_not_reach_the_terminal() -> None:
    """A model that writes escape sequences and takes over the terminal."""
    lines = plain_lines(paint("a\x1b[31mb\x07c\td\r\n", 80))
    assert lines[0].strip() == "a[31mbc    d"


def test_timeline_joins_neighbours() -> None:
    """Time between two rounds of a kind that gets lost."""
    stats = stats_of(
        round_of("thinking", "none", 0, 0.1, 0.1), round_of("thinking", "none", 0, 0.3, 0.2)
    )
    (span,) = timeline(stats)
    assert (span.start, span.seconds) == pytest.approx((0.1, 0.4))
    assert (span.tokens, span.rounds) == (2, 2)


def test_timeline_joins_and_sorts() -> None:
    """Rounds attributed to a wrong kind of work."""
    spans = [(span.kind, span.tokens, span.rounds) for span in timeline(STATS)]
    assert spans == [
        ("prompt", 1, 1),
        ("thinking", 1, 1),
        ("suffix", 2, 1),
        ("verification", 5, 1),
        ("suffix", 2, 1),
        ("decoding", 1, 1),
        ("draft", 6, 0),
    ]
    assert answer_start(STATS) == pytest.approx(0.6)


@pytest.mark.parametrize("width", [80, 120])
def test_chart(width: int) -> None:
    """Rows wider than the terminal, or bars at a wrong time."""
    console = terminal(width)
    print_chart(console, STATS)
    lines = plain_lines(console)
    assert max(map(cell_len, lines)) <= width
    rows = {line.split()[0]: line for line in lines[:-1]}
    n_cells = width - 45
    bar = {name: row[16 : 16 + n_cells] for name, row in rows.items()}
    at = {name: row.index(row.strip()[0]) / n_cells for name, row in bar.items()}
    assert at["prompt"] == 0
    for name, start in (
        ("thinking", 0.2),
        ("draft", 0.25),
        ("verification", 0.6),
        ("decoding", 0.8),
    ):
        assert at[name] == pytest.approx(start, abs=1.5 / n_cells)
    assert lines[-1].index("▲") == pytest.approx(16 + 0.6 * n_cells, abs=1)
    assert "4/6 accepted" in rows["verification"] and "6 tokens" in rows["draft"]


def test_chart_shows_what_is_short() -> None:
    """A verification too short to be seen, although it is the point of the method."""
    stats = stats_of(
        round_of("answering", "draft", 4, 0.5, 0.0001), round_of("answering", "none", 0, 1.0, 9.0)
    )
    console = terminal(80)
    print_chart(console, stats)
    row = next(line for line in plain_lines(console) if "verification" in line)
    assert row[16 : 80 - 29].strip() == "░"


def run_of(seconds: float, stats: SpeculationStats | None) -> Run:
    times = tuple(seconds * at / 12 for at in range(1, 13))
    return Run(
        token_ids=tuple(range(12)), times=times, seconds=seconds, speculation=stats, cache_layers=()
    )


@pytest.mark.parametrize("width", [80, 120])
def test_result_table(width: int) -> None:
    """A table that breaks at 80 columns, or a speed-up that is upside down."""
    comparison = Comparison(plain=run_of(1200.0, None), speculative=run_of(300.0, STATS))
    console = terminal(width)
    console.print(comparison_table(medians([comparison])))
    console.print(drafts_line(STATS, "shown above: "))
    lines = plain_lines(console)
    assert max(map(cell_len, lines)) <= width
    speed_up = next(line for line in lines if "speed-up" in line).split()
    assert speed_up == ["speed-up", "2.00x", "4.00x", "4.00x", "4.00x"]
    assert next(line for line in lines if "plain generate" in line).split()[2:] == [
        "12", "12", "1200.00", "300.00", "900.00",
    ]  # fmt: skip
    assert "1 draft, 4/6 accepted" in lines[-1]


def test_table_without_an_answer() -> None:
    """A division by zero where thinking did not end."""
    stats = SpeculationStats(rounds=STATS.rounds, thinking_tokens=12)
    comparison = Comparison(plain=run_of(4.0, None), speculative=run_of(2.0, stats))
    figures = comparison.figures()
    assert figures["plain"]["answer_seconds"] is None
    assert figures["speed_up"]["answer_seconds"] is None
    console = terminal(80)
    console.print(comparison_table(medians([comparison])))
    assert "–" in written(console)


def test_progress_is_a_line_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Silence for minutes where there is no terminal, or a line for every token."""
    clock = [0.0]
    monkeypatch.setattr("ssr_hf.cli.console.time.monotonic", lambda: clock[0])
    with Meter("Generating", 4) as meter:
        for second in range(30):
            clock[0] = float(second)
            meter.update(second // 10, f"{second} tokens")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "Generating: 0 of 4, 2 tokens",
        "Generating: 1 of 4, 12 tokens",
        "Generating: 2 of 4, 22 tokens",
    ]


def test_short_work_is_silent(capsys: Any) -> None:
    """Noise on stderr for what takes no time."""
    with busy("Loading"):
        pass
    assert capsys.readouterr() == ("", "")
