"""Tests of marker discovery and of the phase tracker; docstrings name the bug they would catch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_tokenizers import (
    FAMILIES,
    MARKER_MERGES,
    build_tokenizer,
    family_tokenizer,
    ids_of,
    plain_tokenizer,
    prompt_ids,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ssr_hf.errors import MarkerError
from ssr_hf.markers import PRESETS, Phase, PhaseTracker, ThinkingMarkers

NONE, THINKING, CLOSING, ANSWERING = Phase
HARMONY_END = "<|end|><|start|>assistant<|channel|>final<|message|>"
HARMONY_START = "<|channel|>analysis<|message|>"
MARKER_TEXTS = {
    "qwen3": ("<think>", "</think>"),
    "qwen3_5": ("<think>", "</think>"),
    "smollm3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "deepseek_v3_1": ("<think>", "</think>"),
    "gpt_oss": (HARMONY_START, HARMONY_END),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "magistral": ("[THINK]", "[/THINK]"),
}
TOOL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
}
TOOL_TURN = [
    {"role": "user", "content": "Q"},
    TOOL_CALL,
    {"role": "tool", "content": "42"},
]

every_family = pytest.mark.parametrize("family", sorted(FAMILIES))


def push_all(tracker: PhaseTracker, ids: Iterable[int]) -> list[Phase]:
    return [tracker.push(token_id) for token_id in ids]


def track(family: str, messages: object, generated: str = "", **switches: object) -> PhaseTracker:
    """A tracker after a prompt of the family's template and some generated text."""
    tokenizer = family_tokenizer(family)
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    tracker = PhaseTracker(markers, prompt_ids(tokenizer, messages, **switches))  # type: ignore[arg-type]
    push_all(tracker, ids_of(tokenizer, generated))
    return tracker


# Discovery


@every_family
def test_discovery_finds_the_markers_of_every_family(family: str) -> None:
    """Would catch a preset row whose text does not encode to the family's own tokens."""
    tokenizer = family_tokenizer(family)
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    start, end = MARKER_TEXTS[family]
    assert tokenizer.decode(markers.start[0]) == markers.start_text[0] == start
    assert tokenizer.decode(markers.closing) == markers.end_text[0] == end


@pytest.mark.parametrize("row", PRESETS, ids=lambda row: row.families)
def test_every_preset_is_found_in_a_vocabulary_of_its_own(row: object) -> None:
    """Would catch a row that shadows another one, or whose `special` pieces are misspelt."""
    pieces = [*row.special, *row.pause]  # type: ignore[attr-defined]
    markers = ThinkingMarkers.from_tokenizer(build_tokenizer(added=list(dict.fromkeys(pieces))))
    assert markers.end_text == row.end  # type: ignore[attr-defined]


def test_c8_a_tokenizer_without_markers_raises_and_says_what_was_tried() -> None:
    """Skywork-R1V#42: a guessed marker would be drafted into models that never think."""
    with pytest.raises(MarkerError) as failure:
        ThinkingMarkers.from_tokenizer(plain_tokenizer())
    text = str(failure.value)
    assert all(row.end[0] in text for row in PRESETS)
    assert "end_of_thinking='</think>'" in text


def test_c8_several_families_in_one_vocabulary_are_ambiguous() -> None:
    """Would catch a silent first match: the wrong marker never ends thinking."""
    tokens = ["<think>", "</think>", "[THINK]", "[/THINK]"]
    with pytest.raises(MarkerError, match="Several") as failure:
        ThinkingMarkers.from_tokenizer(build_tokenizer(added=tokens))
    assert "'</think>'" in str(failure.value)
    assert "'[/THINK]'" in str(failure.value)
    chosen = ThinkingMarkers.from_tokenizer(build_tokenizer(added=tokens), "[/THINK]")
    assert chosen.start_text == ("[THINK]",)


def test_the_chat_template_settles_what_the_vocabulary_leaves_open() -> None:
    """Would catch a merged vocabulary refused although its template uses one marker only."""
    tokenizer = build_tokenizer(
        added=["<think>", "</think>", "[THINK]", "[/THINK]"],
        chat_template="{{ messages[0].content.split('[/THINK]')[-1] }}",
    )
    assert ThinkingMarkers.from_tokenizer(tokenizer).end_text == ("[/THINK]",)


def test_harmony_that_is_plain_text_has_no_token_to_pause_at() -> None:
    """Would catch `<` taken for the end of a message where `<|end|>` is several tokens."""
    template = "<|start|>assistant<|channel|>final<|message|>{{ messages }}<|end|>"
    markers = ThinkingMarkers.from_tokenizer(plain_tokenizer(template))
    assert (markers.end_text[0], markers.pause) == (HARMONY_END, frozenset())


def test_kimi_markers_that_are_plain_text_are_found_through_the_chat_template() -> None:
    """Kimi's triangles are not tokens of its vocabulary: a search among tokens misses them."""
    tokenizer = plain_tokenizer(chat_template="{{ messages[0].content.split('◁/think▷')[-1] }}")
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    assert markers.end_text == ("◁/think▷",)
    tracker = PhaseTracker(markers, ids_of(tokenizer, "question"))
    phases = push_all(tracker, ids_of(tokenizer, "◁think▷ab◁/think▷c"))
    assert phases[-1] is ANSWERING
    assert (tracker.blocks, tracker.n_thinking, tracker.n_answer) == (1, 2, 1)


def test_markers_are_accepted_as_text_as_ids_and_as_alternatives() -> None:
    """Would catch `[5, 6]` read as two markers, or a list of alternatives as one."""
    tokenizer = family_tokenizer("qwen3")
    (end,) = tokenizer.encode("</think>", add_special_tokens=False)
    (call,) = tokenizer.encode("<tool_call>", add_special_tokens=False)

    def ends(spec: object) -> tuple[tuple[int, ...], ...]:
        return ThinkingMarkers.from_tokenizer(tokenizer, spec).end  # type: ignore[arg-type]

    for spec in ("</think>", end, [end], ["</think>"], [[end]]):
        assert ends(spec) == ((end,),)
    assert ends([end, call]) == ((end, call),)
    assert ends([torch.tensor(end).numpy()[()]]) == ((end,),)
    assert ends(["</think>", [call]]) == ends([(end,), "<tool_call>"]) == ((end,), (call,))


def test_a_known_end_marker_brings_its_start_marker() -> None:
    """Would catch thinking counted from the prompt on where the model opens it by itself."""
    tokenizer = family_tokenizer("qwen3")
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    assert ThinkingMarkers.from_tokenizer(tokenizer, "</think>") == markers
    no_start = ThinkingMarkers.from_tokenizer(tokenizer, start_of_thinking=[])
    assert (no_start.start, no_start.end) == ((), markers.end)


@pytest.mark.parametrize(
    "spec", [[], [[]], "", [263_000], [-1], [True], [None], [1.5], ["</think>", 1.5]]
)
def test_impossible_markers_are_refused(spec: object) -> None:
    """Would catch an empty or unknown marker that matches everywhere, or fails in the forward."""
    with pytest.raises(MarkerError):
        ThinkingMarkers.from_tokenizer(family_tokenizer("qwen3"), end_of_thinking=spec)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", [(), ((),), ((-1,),), (("</think>",),)])
def test_impossible_ids_are_refused_without_a_tokenizer(end: object) -> None:
    """Would catch markers built by hand that can never be matched."""
    with pytest.raises(MarkerError):
        ThinkingMarkers(start=(), end=end)  # type: ignore[arg-type]


def test_a_marker_that_does_not_survive_the_tokenizer_is_refused() -> None:
    """Would catch `<unk>` taken for the end of thinking."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    with pytest.raises(MarkerError, match="reads back as"):
        ThinkingMarkers.from_tokenizer(tokenizer, "</think>")


def test_a_processor_is_accepted_in_place_of_its_tokenizer() -> None:
    """Would catch a crash for multimodal models, whose users hold a processor."""
    tokenizer = family_tokenizer("gemma4")
    markers = ThinkingMarkers.from_tokenizer(SimpleNamespace(tokenizer=tokenizer))
    assert markers == ThinkingMarkers.from_tokenizer(tokenizer)


def test_a_vocabulary_that_prefixes_a_space_writes_the_marker_without_it() -> None:
    """Would catch drafts that begin with ` </think>` on SentencePiece vocabularies."""
    alphabet = ["▁", "\n", *"abchiknt</>"]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert wrapped.tokenize("</think>")[0] == "▁"
    markers = ThinkingMarkers.from_tokenizer(wrapped, "</think>")
    assert wrapped.convert_ids_to_tokens(markers.closing) == list("</think>")


# The prompt decides the first phase


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_r1"])
def test_c1_the_template_opens_thinking(family: str) -> None:
    """vllm#13125, DeepSeek-R1#352: the output has only a closing tag, so thinking is missed."""
    tracker = track(family, "Q")
    assert (tracker.phase, tracker.blocks, tracker.n_thinking) == (THINKING, 1, 0)
    push_all(tracker, ids_of(family_tokenizer(family), "abc</think>\n\nA"))
    assert (tracker.phase, tracker.n_thinking, tracker.n_answer) == (ANSWERING, 3, 3)


@pytest.mark.parametrize("family", ["qwen3", "smollm3", "magistral", "gpt_oss", "gemma4"])
def test_c1_the_model_opens_thinking_with_its_first_tokens(family: str) -> None:
    """Would catch thinking only looked for in the prompt."""
    start, end = MARKER_TEXTS[family]
    tracker = track(family, "Q", enable_thinking=True)
    assert (tracker.phase, tracker.blocks) == (NONE, 0)
    tokenizer = family_tokenizer(family)
    assert push_all(tracker, ids_of(tokenizer, start))[-1] is THINKING
    push_all(tracker, ids_of(tokenizer, "abc"))
    assert (tracker.phase, tracker.blocks, tracker.n_thinking) == (THINKING, 1, 3)
    push_all(tracker, ids_of(tokenizer, end + "A"))
    assert (tracker.phase, tracker.n_thinking, tracker.n_answer) == (ANSWERING, 3, 1)


@pytest.mark.parametrize(
    ("family", "switches"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3_5", {"enable_thinking": False}),
        ("smollm3", {"enable_thinking": False}),
        ("gemma4", {"enable_thinking": False}),
        ("gemma4", {}),
        ("deepseek_v3_1", {}),
    ],
)
def test_c2_the_template_closes_thinking(family: str, switches: dict[str, bool]) -> None:
    """vllm#53284, Qwen3#1297: with thinking off everything counted as reasoning."""
    tracker = track(family, "Q", **switches)
    assert (tracker.phase, tracker.blocks, tracker.n_answer) == (ANSWERING, 0, 0)
    tracker.push(ids_of(family_tokenizer(family), "A")[0])
    assert (tracker.phase, tracker.n_answer, tracker.remaining_closing()) == (ANSWERING, 1, ())


def test_c2_no_think_in_the_system_message() -> None:
    """Would catch a decision by the `enable_thinking` flag instead of by the prompt."""
    messages = [{"role": "system", "content": "/no_think"}, {"role": "user", "content": "Q"}]
    assert track("smollm3", messages).phase is ANSWERING


HISTORY = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1", "reasoning": "R", "reasoning_content": "R"},
    {"role": "user", "content": "What is <think>, </think>, [THINK] or <channel|>?"},
    {"role": "assistant", "content": "A2", "reasoning": "R", "reasoning_content": "R"},
    {"role": "user", "content": "And <think>?"},
]


@pytest.mark.parametrize(
    ("family", "switches", "phase"),
    [
        ("qwen3", {}, NONE),
        ("qwen3", {"enable_thinking": False}, ANSWERING),
        ("qwen3_5", {}, THINKING),
        ("deepseek_r1", {}, THINKING),
        ("deepseek_v3_1", {}, ANSWERING),
        ("deepseek_v3_1", {"thinking": True}, THINKING),
        ("smollm3", {}, NONE),
        ("gpt_oss", {}, NONE),
        ("gemma4", {"enable_thinking": True}, NONE),
        ("gemma4", {}, ANSWERING),
        ("magistral", {}, NONE),
    ],
)
def test_c3_markers_of_earlier_turns_and_of_user_text_do_not_count(
    family: str, switches: dict[str, bool], phase: Phase
) -> None:
    """vllm PR#32490: a `</think>` or a final channel in the history means "already ended"."""
    assert track(family, HISTORY, **switches).phase is phase


def test_c3_user_text_before_turn_tags_that_are_not_special() -> None:
    """Would catch `<think>` in a question: DeepSeek does not flag its turn tags as special."""
    tokenizer = family_tokenizer("deepseek_r1")
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    unopened = prompt_ids(tokenizer, "What is <think>?")[: -len("<think>\n") + 6]
    assert tokenizer.decode(unopened).endswith("<｜Assistant｜>")
    assert PhaseTracker(markers, unopened).phase is NONE


def test_c3_white_space_tokens_do_not_separate_turns() -> None:
    """Would catch a line break that is an added token, as in some vocabularies."""
    tokenizer = build_tokenizer(special=["<bos>"], added=["<think>", "</think>", "\n\n"])
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    ids = ids_of(tokenizer, "<bos>Q<think>\n\n")
    assert len(ids) == 4
    assert PhaseTracker(markers, ids).phase is THINKING


def test_c3_history_that_keeps_its_thinking() -> None:
    """Would catch an unstripped history, such as training templates write."""
    tokenizer = family_tokenizer("qwen3")
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    turn = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    closed = turn + "<think>\nR\n</think>\n\nA"
    cut = turn + "<think>\nR"

    def phase(text: str) -> Phase:
        return PhaseTracker(markers, ids_of(tokenizer, text)).phase

    assert phase(closed + "<|im_end|>\n" + turn) is NONE
    assert phase(cut + "<|im_end|>\n" + turn) is NONE
    assert phase(closed) is ANSWERING  # continue_final_message with an answer begun
    assert phase(cut) is THINKING  # ... and with thinking begun
    assert phase(cut + "<tool_call>{}</tool_call>") is THINKING


def test_c3_without_turn_boundaries_the_white_space_rule_decides() -> None:
    """Would catch a plain-text chat format in which the first turn closes thinking for good."""
    tokenizer = build_tokenizer()
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "</think>", "<think>")
    end_only = ThinkingMarkers.from_tokenizer(tokenizer, "</think>")

    def phase(text: str, of: ThinkingMarkers = markers) -> Phase:
        return PhaseTracker(of, ids_of(tokenizer, text)).phase

    assert phase("User: Q\nBot: <think>\n\n</think>\n\n") is ANSWERING
    assert phase("User: Q\nBot: <think>R</think>A\nUser: Q\nBot: ") is NONE
    assert phase("User: Q\nBot: <think>R</think>A\nUser: Q\nBot: <think>\n") is THINKING
    assert phase("User: Q\nBot: R</think>A\nUser: Q\nBot: ", end_only) is THINKING
    assert phase("User: Q\nBot: </think>\n", end_only) is ANSWERING


def test_c3_ids_alone_decide_by_how_much_follows_the_closed_block() -> None:
    """Would catch markers given as ids that need a tokenizer after all."""
    markers = ThinkingMarkers(start=((7,),), end=((8,),))
    assert PhaseTracker(markers, [1, 7, 2, 8, 2]).phase is ANSWERING
    assert PhaseTracker(markers, [1, 7, 2, 8, 3, 4, 5, 6]).phase is NONE
    assert PhaseTracker(markers, [1, 8, 3, 4, 5, 6, 8]).phase is ANSWERING
    assert PhaseTracker(markers, []).phase is NONE
    with_boundary = ThinkingMarkers(start=((7,),), end=((8,),), boundaries=frozenset({9}))
    assert PhaseTracker(with_boundary, [1, 7, 2, 8, 9, 1]).phase is NONE
    assert PhaseTracker(with_boundary, [1, 7, 2, 8, 3, 4, 5, 6]).phase is ANSWERING


def test_an_end_marker_alone_means_thinking_from_the_first_token() -> None:
    """Would catch models that never write a start marker: nothing would ever be drafted."""
    markers = ThinkingMarkers(start=(), end=((8,),), boundaries=frozenset({9}))
    tracker = PhaseTracker(markers, [9, 1, 2, 8, 3, 9, 4])
    assert (tracker.phase, tracker.blocks, tracker.n_thinking) == (THINKING, 1, 0)
    assert push_all(tracker, [5, 5, 8, 1]) == [THINKING, THINKING, ANSWERING, ANSWERING]
    assert (tracker.n_thinking, tracker.n_answer) == (2, 1)
    assert PhaseTracker(markers, [9, 1, 8]).phase is ANSWERING


def test_left_padding_does_not_change_the_phase() -> None:
    """Would catch padding counted as prompt text in batches."""
    tokenizer = family_tokenizer("qwen3_5")
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    ids = prompt_ids(tokenizer, "Q")
    pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert PhaseTracker(markers, [pad] * 9 + ids).phase is PhaseTracker(markers, ids).phase


# Markers of several tokens


def test_c6_the_first_piece_of_a_marker_is_not_the_marker() -> None:
    """sglang#24843: `</` of any closing tag taken for the end of thinking."""
    tokenizer = plain_tokenizer()
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "</think>")
    assert tokenizer.convert_ids_to_tokens(markers.closing) == ["</", "think", ">"]
    tracker = PhaseTracker(markers, [])
    phases = push_all(tracker, ids_of(tokenizer, "</b>x</think>"))
    expected = [CLOSING, THINKING, THINKING, THINKING, CLOSING, CLOSING, ANSWERING]
    assert phases == expected
    assert tracker.n_thinking == 4


@pytest.mark.parametrize("before", ["", "x", "x."])
@pytest.mark.parametrize("after", ["A", "\nA", "\n\nA"])
def test_c6_a_marker_merged_with_its_neighbours_is_recognised(before: str, after: str) -> None:
    """vllm PR#24998: `.</` and `>` with a line break are one token each, so ids never match."""
    tokenizer = plain_tokenizer()
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "</think>", "<think>")
    tracker = PhaseTracker(markers, ids_of(tokenizer, "<|im_start|>assistant\n<think>\n"))
    assert tracker.phase is THINKING
    push_all(tracker, ids_of(tokenizer, before + "</think>" + after))
    assert tracker.phase is ANSWERING
    assert tracker.blocks == 1
    assert tracker.n_thinking == len(before.rstrip("."))
    assert tracker.n_answer == len(after) - after.startswith("\n")


def test_c6_a_partial_marker_says_what_completes_it() -> None:
    """Would catch a doubled or a gapped marker when the model has begun it itself."""
    tokenizer = plain_tokenizer()
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "</think>")
    for begun in ("", "<", "</", ".</", "</think", ".</think", "a</th"):
        tracker = PhaseTracker(markers, [])
        push_all(tracker, ids_of(tokenizer, "x" + begun))
        rest = tokenizer.decode(tracker.remaining_closing())
        assert ("x" + begun + rest).endswith("</think>"), begun
        assert "</</" not in "x" + begun + rest, begun
        for left in range(len(tracker.remaining_closing()), 0, -1):
            assert len(tracker.remaining_closing()) == left, begun
            tracker.push(tracker.remaining_closing()[0])
        assert tracker.phase is ANSWERING, begun


@pytest.mark.parametrize("merges", [[], [("/", "t")]], ids=["by_ids", "by_text"])
def test_c6_a_marker_of_characters_that_several_tokens_write(merges: list[Any]) -> None:
    """Would catch forcing that starts over inside a character, doubled or for ever."""
    tokenizer = build_tokenizer(merges=merges)
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "◁/think▷")
    begun = [index for char in "◁/think" for index in ids_of(tokenizer, char)]
    assert (begun == list(markers.closing[: len(begun)])) is (not merges)
    tracker = PhaseTracker(markers, [])
    push_all(tracker, begun)
    assert tracker.closing_progress == len(begun)
    for left in (3, 2, 1):
        assert tracker.phase is CLOSING
        assert len(tracker.remaining_closing()) == left
        tracker.push(tracker.remaining_closing()[0])
    assert tracker.phase is ANSWERING
    assert tracker.n_thinking == 0


def test_c6_every_byte_of_a_marker_is_progress() -> None:
    """Would catch a marker repeated because its first character is half written."""
    markers = ThinkingMarkers.from_tokenizer(build_tokenizer(), "◁/think▷")
    tracker = PhaseTracker(markers, [])
    for size, token_id in enumerate(markers.closing[:-1], start=1):
        assert tracker.push(token_id) is CLOSING
        assert tracker.closing_progress == size
        assert tracker.remaining_closing() == markers.closing[size:]


@pytest.mark.parametrize(
    "merges",
    [
        [*MARKER_MERGES, (">", "A")],
        [*MARKER_MERGES, ("</", "think"), ("</think", ">")],
        [*MARKER_MERGES, ("</", "think"), ("</think", ">"), ("</think>", "A")],
    ],
    ids=["end_and_more", "all", "all_and_more"],
)
def test_c6_the_last_token_may_hold_more_than_a_piece(merges: list[tuple[str, str]]) -> None:
    """Would catch a filter that decodes only tokens which lie within the marker."""
    tokenizer = build_tokenizer(merges=merges)
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "</think>", start_of_thinking=[])
    tracker = PhaseTracker(markers, [])
    assert "".join(merges[-1]) in tokenizer.tokenize("b</think>A")
    push_all(tracker, ids_of(tokenizer, "b</think>A"))
    assert (tracker.phase, tracker.n_thinking) == (ANSWERING, 1)


def test_c6_one_token_may_end_one_marker_and_begin_the_next() -> None:
    """Would catch an empty block, `<think></think>`, whose `></` is one token."""
    tokenizer = build_tokenizer(merges=[*MARKER_MERGES, (">", "</")])
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "</think>", "<think>")
    tracker = PhaseTracker(markers, [])
    phases, counts = [], []
    for token_id in ids_of(tokenizer, "<think></think><think>think"):
        phases.append(tracker.push(token_id))
        counts.append(tracker.n_thinking)
    assert phases[:5] == [NONE, NONE, CLOSING, CLOSING, ANSWERING]
    assert set(counts[:5]) == {0}
    assert (tracker.phase, tracker.blocks, tracker.n_thinking) == (THINKING, 2, 1)


def test_c6_text_that_completes_a_marker_outweighs_ids_that_begin_one() -> None:
    """Would catch `.|end|` missed, because its last token alone could begin the marker."""
    merges = [("e", "n"), ("en", "d"), (".", "|")]
    tokenizer = build_tokenizer(merges=merges)
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "|end|")
    tracker = PhaseTracker(markers, [])
    assert push_all(tracker, ids_of(tokenizer, "a.|end|"))[-1] is ANSWERING


def test_a_marker_cannot_begin_inside_another_one() -> None:
    """Would catch an end marker that is half made of the start marker's tokens."""
    markers = ThinkingMarkers(start=((1, 2),), end=((2, 3),))
    tracker = PhaseTracker(markers, [])
    assert push_all(tracker, [1, 2, 3, 2, 3]) == [NONE, THINKING, THINKING, CLOSING, ANSWERING]
    # In an open block the same start marker is ordinary text.
    assert push_all(tracker, [1, 2, 1, 2, 3])[1:] == [THINKING, THINKING, CLOSING, ANSWERING]


def test_a_block_may_be_left_and_reopened_by_one_token() -> None:
    """Would catch a start marker overlooked because the same token breaks the end marker off."""
    markers = ThinkingMarkers(start=((7,),), end=((5, 6),), pause=frozenset({5}))
    tracker = PhaseTracker(markers, [7])
    assert push_all(tracker, [1, 5, 7, 2]) == [THINKING, CLOSING, THINKING, THINKING]
    assert (tracker.blocks, tracker.n_thinking) == (2, 1)


def naive_position(text: Sequence[int], marker: tuple[int, ...]) -> int | None:
    """Where `marker` first ends in `text`."""
    size = len(marker)
    ends = (at for at in range(size, len(text) + 1) if tuple(text[at - size : at]) == marker)
    return next(ends, None)


@pytest.mark.parametrize("marker", [(0, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1, 2), (2,)])
def test_c6_matching_by_ids_survives_overlaps(marker: tuple[int, ...]) -> None:
    """Would catch a matcher that drops `0 0 0 1` because it restarts after a failed `0 0`."""
    rng = random.Random(0)
    markers = ThinkingMarkers(start=(), end=(marker,))
    for _ in range(300):
        text = rng.choices(range(3), k=12)
        tracker = PhaseTracker(markers, [])
        phases = push_all(tracker, text)
        expected = naive_position(text, marker)
        found = phases.index(ANSWERING) + 1 if ANSWERING in phases else None
        assert found == expected, text
        if found is not None:
            assert tracker.n_thinking == found - len(marker)
            assert tracker.n_answer == len(text) - found


def test_c6_completing_a_partial_marker_always_ends() -> None:
    """Would catch forced tokens that lead from one partial match to another without an end."""
    markers = ThinkingMarkers(start=(), end=((0, 1, 0, 2), (1, 0, 0, 1, 2)))
    for text in itertools.product(range(3), repeat=5):
        tracker = PhaseTracker(markers, [])
        push_all(tracker, text)
        for _ in range(5):
            if tracker.is_open:
                tracker.push(tracker.remaining_closing()[0])
        assert tracker.phase is ANSWERING, text


def test_c6_only_what_may_be_a_marker_is_decoded() -> None:
    """Would catch a decode per token, which takes longer than a small model's forward."""
    tokenizer = plain_tokenizer()
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "</think>", "<think>")
    assert markers.codec is not None
    decode, sizes = markers.codec.decode, []

    def counted(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return decode(ids)

    markers.codec.decode = counted  # type: ignore[method-assign]
    tracker = PhaseTracker(markers, [])
    push_all(tracker, ids_of(tokenizer, "think, > and / think" * 50))
    assert max(sizes) == 1
    assert len(sizes) <= len(tokenizer)
    push_all(tracker, ids_of(tokenizer, "<think>.</think>\n"))
    assert tracker.phase is ANSWERING
    assert max(sizes) > 1


# Families with more than one way through a turn


def test_c9_gemma_an_empty_channel_is_a_closed_block() -> None:
    """gemma#727: the template writes an empty channel, then the model may still open another."""
    tracker = track("gemma4", "Q", "<|channel>thought\nab<channel|>A", enable_thinking=False)
    assert (tracker.phase, tracker.blocks, tracker.n_thinking) == (ANSWERING, 1, 3)


def test_c9_gemma_goes_on_after_a_tool_response_within_one_turn() -> None:
    """Would catch the closed channel before the tool call taken for the end of all thinking."""
    call = {**TOOL_CALL, "reasoning": "R"}
    messages = [TOOL_TURN[0], call, TOOL_TURN[2]]
    tracker = track("gemma4", messages, enable_thinking=True)
    assert tracker.phase is NONE
    push_all(tracker, ids_of(family_tokenizer("gemma4"), "<|channel>thought\n"))
    assert (tracker.phase, tracker.n_thinking) == (THINKING, 1)


def test_c9_gemma_a_prefilled_channel_is_open_and_closed_by_one_token() -> None:
    """dynamo PR#13061: templates that open the channel for the model."""
    tokenizer = family_tokenizer("gemma4")
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    ids = prompt_ids(tokenizer, "Q", enable_thinking=True)
    tracker = PhaseTracker(markers, ids + ids_of(tokenizer, "<|channel>thought\n"))
    assert tracker.phase is THINKING
    assert tokenizer.decode(tracker.remaining_closing()) == "<channel|>"
    other = PhaseTracker(markers, ids + ids_of(tokenizer, "<|channel>final\n"))
    assert other.phase is NONE


def test_c10_gpt_oss_ends_thinking_by_a_sequence() -> None:
    """openai/harmony#38: `<|end|>` alone taken for the beginning of the answer."""
    tokenizer = family_tokenizer("gpt_oss")
    tracker = track("gpt_oss", "Q", HARMONY_START + "abc")
    closing = ids_of(tokenizer, HARMONY_END)
    assert len(closing) >= 6
    phases = push_all(tracker, closing)
    assert phases == [CLOSING] * (len(closing) - 1) + [ANSWERING]
    assert (tracker.n_thinking, tracker.n_answer) == (3, 0)


def test_c10_gpt_oss_a_tool_call_between_two_analyses_is_not_the_answer() -> None:
    """vllm PR#26291: analysis, commentary, analysis again; only the final channel answers."""
    tokenizer = family_tokenizer("gpt_oss")
    tracker = track("gpt_oss", "Q", HARMONY_START + "abc<|end|><|start|>assistant")
    assert tracker.phase is CLOSING
    assert tracker.is_paused
    assert tracker.n_thinking == 3
    push_all(tracker, ids_of(tokenizer, "<|channel|>commentary to=functions.f<|message|>{}"))
    assert (tracker.phase, tracker.remaining_closing()) == (NONE, ())
    push_all(tracker, ids_of(tokenizer, "<|end|><|start|>assistant" + HARMONY_START + "de"))
    assert (tracker.phase, tracker.blocks, tracker.n_thinking) == (THINKING, 2, 2)
    push_all(tracker, ids_of(tokenizer, HARMONY_END + "A"))
    assert (tracker.phase, tracker.blocks, tracker.n_answer) == (ANSWERING, 2, 1)


def test_c10_gpt_oss_a_second_analysis_may_follow_at_once() -> None:
    """Would catch a second analysis message that is lost between the two markers."""
    again = "<|end|><|start|>assistant" + HARMONY_START
    tracker = track("gpt_oss", "Q", HARMONY_START + "abc" + again + "d")
    assert (tracker.phase, tracker.blocks, tracker.n_thinking) == (THINKING, 2, 1)


def test_c10_gpt_oss_an_answer_without_analysis() -> None:
    """Would catch an answer that is not recognised because no analysis came before it."""
    tracker = track("gpt_oss", "Q", "<|channel|>final<|message|>A")
    assert (tracker.phase, tracker.blocks, tracker.n_answer) == (ANSWERING, 0, 1)


def test_c10_gpt_oss_tool_result_in_the_prompt() -> None:
    """Would catch the analysis before a tool call, kept in the prompt, counted as open."""
    call = {**TOOL_CALL, "thinking": "R"}
    tracker = track("gpt_oss", [TOOL_TURN[0], call, TOOL_TURN[2]])
    assert (tracker.phase, tracker.blocks) == (NONE, 0)


def test_c15_tool_call_text_inside_thinking_does_not_end_it() -> None:
    """lmstudio#1592: a tool call quoted in the thoughts taken for a real one."""
    tracker = track("qwen3_5", "Q", "a<tool_call>{}</tool_call>b")
    assert (tracker.phase, tracker.n_thinking) == (THINKING, 6)


@pytest.mark.parametrize(("family", "phase"), [("qwen3", NONE), ("qwen3_5", THINKING)])
def test_c15_thinking_kept_before_a_tool_call_is_over(family: str, phase: Phase) -> None:
    """Would catch the block before a tool call, kept in the prompt, taken for the present one."""
    call = {**TOOL_CALL, "reasoning_content": "R"}
    assert track(family, [TOOL_TURN[0], call, TOOL_TURN[2]]).phase is phase


def test_c15_a_tool_call_may_be_an_alternative_end_marker() -> None:
    """vllm PR#56635: models that start a tool call without closing their thoughts."""
    tokenizer = family_tokenizer("qwen3_5")
    markers = ThinkingMarkers.from_tokenizer(tokenizer, ["</think>", "<tool_call>"])
    tracker = PhaseTracker(markers, prompt_ids(tokenizer, "Q"))
    push_all(tracker, ids_of(tokenizer, "ab<tool_call>{}"))
    assert (tracker.phase, tracker.n_thinking, tracker.n_answer) == (ANSWERING, 2, 2)
    assert tokenizer.decode(markers.closing) == "</think>"


@every_family
def test_c20_an_empty_block(family: str) -> None:
    """ktransformers#129: the model closes at once; counters must not go negative."""
    start, end = MARKER_TEXTS[family]
    tracker = track(family, "Q", start + end, enable_thinking=True)
    assert (tracker.phase, tracker.blocks, tracker.n_answer) == (ANSWERING, 1, 0)
    assert tracker.n_thinking <= len(start)


def test_thinking_may_be_opened_several_times() -> None:
    """Would catch interleaved thinking after the answer has begun."""
    tracker = track("qwen3", "Q", "<think>abc</think>A<think>de")
    assert (tracker.phase, tracker.blocks, tracker.n_thinking) == (THINKING, 2, 2)
    assert tracker.remaining_closing() == tracker.markers.closing
    push_all(tracker, ids_of(family_tokenizer("qwen3"), "</think>BC"))
    assert (tracker.phase, tracker.blocks, tracker.n_answer) == (ANSWERING, 2, 2)


def test_a_start_marker_inside_a_block_is_ordinary_thinking() -> None:
    """Would catch a model that restarts its budget by writing the start marker again."""
    tracker = track("qwen3_5", "Q", "ab<think>c")
    assert (tracker.blocks, tracker.n_thinking) == (1, 4)


def test_an_end_marker_in_the_answer_is_text() -> None:
    """Would catch the answer counted from the last time it mentions the marker."""
    tracker = track("qwen3_5", "Q", "ab</think>cd</think>e")
    assert (tracker.phase, tracker.n_answer, tracker.n_thinking) == (ANSWERING, 4, 2)


def test_a_copy_goes_its_own_way() -> None:
    """Would catch state shared between beams."""
    tokenizer = plain_tokenizer()
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "</think>")
    tracker = PhaseTracker(markers, [])
    push_all(tracker, ids_of(tokenizer, "a.</think"))
    twin, other = tracker.copy(), tracker.copy()
    push_all(twin, ids_of(tokenizer, "ing, thinking"))
    push_all(tracker, ids_of(tokenizer, ">\nA"))
    assert [each.phase for each in (tracker, twin, other)] == [ANSWERING, THINKING, CLOSING]
    assert (tracker.n_answer, twin.n_answer) == (1, 0)
