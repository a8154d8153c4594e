"""Tests of the thinking budget in plain `generate`; docstrings name the bug they would catch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from tiny_tokenizers import family_tokenizer, ids_of, plain_tokenizer, prompt_ids
from transformers import LogitsProcessor, Qwen3Config, Qwen3ForCausalLM

from ssr_hf.budget import ThinkingBudgetLogitsProcessor
from ssr_hf.errors import ConfigError, MarkerError
from ssr_hf.markers import Phase, PhaseTracker, ThinkingMarkers

VOCABULARY = 300
START, END_A, END_B, PAD = 290, 291, 292, 293
ONE_TOKEN = ThinkingMarkers(start=((START,),), end=((END_A,),))
TWO_TOKENS = ThinkingMarkers(start=((START,),), end=((END_A, END_B),))
THREE_TOKENS = ThinkingMarkers(start=((START,),), end=((END_A, END_B, END_A),))
ALL_MARKERS = [ONE_TOKEN, TWO_TOKENS, THREE_TOKENS]
OPENED = [5, 6, 7, START]
NOT_OPENED = [START, 7, END_A, END_B, END_A, 5, 6, 8, 9, 10]

every_marker = pytest.mark.parametrize("markers", ALL_MARKERS, ids=["one", "two", "three"])


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Threads cost more than they save on matrices this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def generate(
    rows: list[list[int]], processors: Iterable[LogitsProcessor] = (), seed: int = 0, **kwargs: Any
) -> list[list[int]]:
    """New tokens of left-padded rows, greedy unless told otherwise."""
    width = max(map(len, rows))
    input_ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    torch.manual_seed(seed)
    kwargs = {"max_new_tokens": 16, "do_sample": False, **kwargs}
    sequences = tiny_model().generate(
        input_ids, attention_mask=mask, logits_processor=list(processors), **kwargs
    )
    return sequences[:, width:].tolist()


def row_of(*ids: int) -> torch.Tensor:
    return torch.tensor([ids])


def scores_for(rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, VOCABULARY, generator=generator)


def forced_token(budget: ThinkingBudgetLogitsProcessor, ids: Iterable[int]) -> int | None:
    """The token that `budget` forces after `ids`, None if it leaves the scores alone."""
    scores = scores_for()
    result = budget(row_of(*ids), scores)
    if result is scores:
        return None
    assert torch.isfinite(result).sum() == 1
    return int(result.argmax())


def write(
    budget: ThinkingBudgetLogitsProcessor, prompt: list[int], wanted: Iterable[int]
) -> list[int]:
    """Writes `wanted` step by step, except where the budget forces another token."""
    ids = list(prompt)
    for token_id in wanted:
        forced = forced_token(budget, ids)
        ids.append(token_id if forced is None else forced)
    return ids[len(prompt) :]


@every_marker
@pytest.mark.parametrize("thinking_budget", [0, 1, 7])
def test_greedy_thinking_is_closed_after_exactly_the_budget(
    markers: ThinkingMarkers, thinking_budget: int
) -> None:
    """vllm#39573: a budget overshot or undershot by one, or a marker that is cut or doubled."""
    plain = generate([OPENED])[0]
    tokens = generate([OPENED], [ThinkingBudgetLogitsProcessor(markers, thinking_budget)])[0]
    head = plain[:thinking_budget] + list(markers.closing)
    assert tokens[: len(head)] == head
    # The forced marker went through the model: what follows is what it would write after it.
    rest = generate([OPENED + head], max_new_tokens=16 - len(head))[0]
    assert tokens[len(head) :] == rest


@every_marker
def test_sampled_thinking_is_closed_after_exactly_the_budget(markers: ThinkingMarkers) -> None:
    """Would catch a draw that the forced steps skip, which shifts all later draws."""
    sampling: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 3}
    plain = generate([OPENED], **sampling)[0]
    processors = [ThinkingBudgetLogitsProcessor(markers, 6)]
    tokens = generate([OPENED], processors, **sampling)[0]
    assert tokens[:6] == plain[:6]
    assert tokens[6 : 6 + len(markers.closing)] == list(markers.closing)
    assert tokens == generate([OPENED], processors, **sampling)[0]


@every_marker
@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_of_a_left_padded_batch_are_independent(
    markers: ThinkingMarkers, do_sample: bool
) -> None:
    """Would catch the state of one row applied to another, or padding counted as thinking."""
    rows = [OPENED, NOT_OPENED]
    budget = ThinkingBudgetLogitsProcessor(markers, 5)
    opened, other = generate(rows, [budget], do_sample=do_sample)
    closing = list(markers.closing)
    assert opened[5 : 5 + len(closing)] == closing
    free = generate(rows, do_sample=do_sample)
    assert opened[:5] == free[0][:5]
    if not do_sample:
        assert opened == generate([OPENED], [budget])[0]
        assert other == free[1]


@pytest.mark.parametrize("switches", [{"num_beams": 3}, {"num_beams": 3, "do_sample": True}])
def test_beams_that_change_places_keep_their_count(switches: dict[str, Any]) -> None:
    """Would catch counts kept by row although beams move between rows."""
    switches = {**switches, "num_return_sequences": 3, "top_k": 20}
    budget = ThinkingBudgetLogitsProcessor(TWO_TOKENS, 6)
    beams = generate([OPENED], [budget], **switches)
    for beam in beams:
        ends = [at for at in range(len(beam)) if beam[at : at + 2] == [END_A, END_B]]
        assert ends[0] <= 6
    assert beams == generate([OPENED], [_Stateless(TWO_TOKENS, 6, len(OPENED))], **switches)


class _Stateless(LogitsProcessor):
    """The oracle: reads every row anew at every step."""

    def __init__(self, markers: ThinkingMarkers, thinking_budget: int, prompt_length: int) -> None:
        self.settings = (markers, thinking_budget, prompt_length)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        return ThinkingBudgetLogitsProcessor(*self.settings)(input_ids, scores)


def test_one_processor_serves_several_generations() -> None:
    """Would catch a count or a prompt length left over from the generation before."""
    shared = ThinkingBudgetLogitsProcessor(TWO_TOKENS, 4)
    prompts = [OPENED, NOT_OPENED, OPENED, [1, *OPENED, 2], OPENED[2:]]
    for prompt in prompts:
        fresh = ThinkingBudgetLogitsProcessor(TWO_TOKENS, 4)
        assert generate([prompt], [shared]) == generate([prompt], [fresh])
    one_longer = OPENED + generate([OPENED], [shared], max_new_tokens=3)[0][:2] + [START, 5]
    assert generate([one_longer], [shared]) == generate(
        [one_longer], [ThinkingBudgetLogitsProcessor(TWO_TOKENS, 4)]
    )


def test_the_next_turn_is_a_new_prompt() -> None:
    """Would catch the second turn of a chat read as more output of the first."""
    tokenizer = family_tokenizer("qwen3_5")
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    budget = ThinkingBudgetLogitsProcessor(markers, 3)
    turn = [{"role": "user", "content": "Q"}]
    first = prompt_ids(tokenizer, turn)
    written = write(budget, first, ids_of(tokenizer, "abcdefgh"))
    assert tokenizer.decode(written) == "abc</think>efgh"
    again = [*turn, {"role": "assistant", "content": "A"}, {"role": "user", "content": "Q"}]
    for second in (prompt_ids(tokenizer, again), first + written + first):
        assert tokenizer.decode(write(budget, second, ids_of(tokenizer, "abcdef"))) == (
            "abc</think>ef"
        )


def test_prompt_length_tells_what_was_generated() -> None:
    """Would catch a processor that joins late and takes thinking for prompt."""
    ids = [*OPENED, 1, 2, 3]
    assert forced_token(ThinkingBudgetLogitsProcessor(ONE_TOKEN, 3), ids) is None
    assert forced_token(ThinkingBudgetLogitsProcessor(ONE_TOKEN, 3, len(OPENED)), ids) == END_A
    late = ThinkingBudgetLogitsProcessor(ONE_TOKEN, 3, prompt_length=100)
    assert forced_token(late, ids) is None


@pytest.mark.parametrize("step_back", [1, 2, 3])
def test_going_back_in_the_text_forgets_what_was_rejected(step_back: int) -> None:
    """vllm#54906: rejected candidates that count towards the budget."""
    budget = ThinkingBudgetLogitsProcessor(ONE_TOKEN, 4)
    ids = [*OPENED, 1, 2, 3]
    for size in range(len(OPENED), len(ids) + 1):
        assert forced_token(budget, ids[:size]) is None
    ids = ids[:-step_back]
    while len(ids) < len(OPENED) + 4:
        ids.append(9)
        assert forced_token(budget, ids) == (END_A if len(ids) == len(OPENED) + 4 else None)


def test_c11_prompt_lookup_of_the_host_stays_within_the_budget() -> None:
    """vllm-ascend PR#13146: the budget checked once per speculated block."""
    prompt = [1, 2, 3, 1, 2, 3, START]
    budget = ThinkingBudgetLogitsProcessor(TWO_TOKENS, 5)
    tokens = generate([prompt], [budget], prompt_lookup_num_tokens=4)
    assert tokens == generate([prompt], [budget])


@pytest.mark.parametrize("first", [3, 4])
def test_ids_changed_in_place_are_noticed(first: int) -> None:
    """Would catch a reference to the caller's buffer in place of what was seen."""
    budget = ThinkingBudgetLogitsProcessor(ONE_TOKEN, 2, prompt_length=2)
    buffer = row_of(5, START, 1, END_A, 2)
    scores = scores_for()
    for length in range(first, 5):
        assert budget(buffer[:, :length], scores) is scores
    buffer[0, 3] = 1
    assert budget(buffer, scores).argmax().item() == END_A


def test_a_model_that_closes_in_time_is_left_alone() -> None:
    """Would catch a second marker in the answer once the budget is reached there."""
    budget = ThinkingBudgetLogitsProcessor(TWO_TOKENS, 3)
    wanted = [1, 2, END_A, END_B, 1, 2, 3, 4, 5, 6]
    assert write(budget, OPENED, wanted) == wanted


@pytest.mark.parametrize("begun", [[END_A], [END_A, END_B]])
def test_a_marker_that_the_model_began_is_completed(begun: list[int]) -> None:
    """omlx#2455: a doubled marker, when the budget runs out in the middle of the model's own."""
    for size in range(len(begun), 5):
        budget = ThinkingBudgetLogitsProcessor(THREE_TOKENS, size)
        text = [1] * (size - len(begun)) + begun
        written = write(budget, OPENED, [*text, 9, 9, 9])
        closed = [1] * (size - len(begun)) + list(THREE_TOKENS.closing)
        assert written == closed + [9] * (size + 3 - len(closed))


def test_a_marker_that_breaks_off_counts_as_thinking() -> None:
    """Would catch an endless budget for a model that keeps beginning the marker."""
    budget = ThinkingBudgetLogitsProcessor(THREE_TOKENS, 5)
    wanted = [END_A, END_B, END_B, END_A, 7, 7, 7, 7, 7]
    expected = [END_A, END_B, END_B, END_A, 7, *THREE_TOKENS.closing, 7]
    assert write(budget, OPENED, wanted) == expected


def test_every_block_has_the_whole_budget() -> None:
    """Would catch a second block closed at once, or never."""
    budget = ThinkingBudgetLogitsProcessor(ONE_TOKEN, 2)
    written = write(budget, [5], [1, 2, 3, START, 1, 2, 3, 9, START, 4, END_A, 5, 6, 7])
    assert written == [1, 2, 3, START, 1, 2, END_A, 9, START, 4, END_A, 5, 6, 7]


def test_thinking_opened_by_the_model_is_counted_from_its_marker() -> None:
    """Would catch a budget spent on the text before thinking."""
    budget = ThinkingBudgetLogitsProcessor(ONE_TOKEN, 0)
    assert write(budget, [5], [1, 2, START, 3, 4]) == [1, 2, START, END_A, 4]


def test_c2_closed_prompts_are_never_forced() -> None:
    """Would catch a marker forced into an answer without thinking."""
    budget = ThinkingBudgetLogitsProcessor(ONE_TOKEN, 0)
    assert write(budget, [5, START, END_A], [1, 2, 3]) == [1, 2, 3]


@pytest.mark.parametrize("after", ["", "\n", "\n\n"])
@pytest.mark.parametrize("before", ["ab", "ab."])
def test_c6_a_closing_merged_with_its_neighbours_is_a_closing(before: str, after: str) -> None:
    """Would catch a second marker after one whose last token is `>` and a line break."""
    tokenizer = plain_tokenizer()
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "</think>", "<think>")
    budget = ThinkingBudgetLogitsProcessor(markers, 6)
    prompt = ids_of(tokenizer, "<|im_start|>assistant\n<think>\n")
    wanted = ids_of(tokenizer, f"{before}</think>{after}cdefghijk")
    assert write(budget, prompt, wanted) == wanted


@pytest.mark.parametrize("begun", ["", ".", ".</", ".</think"])
def test_c6_a_merged_beginning_is_completed(begun: str) -> None:
    """Would catch `.</</think>`: the beginning is hidden in a merged token."""
    tokenizer = plain_tokenizer()
    markers = ThinkingMarkers.from_tokenizer(tokenizer, "</think>")
    text = ids_of(tokenizer, "ab" + begun)
    budget = ThinkingBudgetLogitsProcessor(markers, len(text))
    wanted = text + ids_of(tokenizer, "xxxxxxxx")
    written = tokenizer.decode(write(budget, ids_of(tokenizer, "Q"), wanted))
    assert written.startswith("ab" + ("." if begun else "") + "</think>x")
    assert written.count("</") == 1


def test_c10_gpt_oss_is_closed_by_the_whole_sequence() -> None:
    """Would catch `<|end|>` alone forced: the model would open another analysis."""
    tokenizer = family_tokenizer("gpt_oss")
    markers = ThinkingMarkers.from_tokenizer(tokenizer)
    budget = ThinkingBudgetLogitsProcessor(markers, 4)
    opening = "<|channel|>analysis<|message|>"
    closing = "<|end|><|start|>assistant<|channel|>final<|message|>"
    wanted = ids_of(tokenizer, opening + "abcdef") + [1] * 40
    written = tokenizer.decode(write(budget, prompt_ids(tokenizer, "Q"), wanted))
    assert written.startswith(opening + "abcd" + closing)
    assert written.count("<|end|>") == 1


@pytest.mark.parametrize("thinking_budget", [3, 4, 5, 20])
def test_c10_gpt_oss_a_tool_call_is_not_turned_into_an_answer(thinking_budget: int) -> None:
    """Would catch a budget that runs out in the tool call after the analysis."""
    tokenizer = family_tokenizer("gpt_oss")
    budget = ThinkingBudgetLogitsProcessor(
        ThinkingMarkers.from_tokenizer(tokenizer), thinking_budget
    )
    analysis = "<|channel|>analysis<|message|>ab<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    wanted = ids_of(tokenizer, analysis + call)
    prompt = prompt_ids(tokenizer, "Q")
    assert write(budget, prompt, wanted) == wanted
    tracker = PhaseTracker(budget.markers, prompt)
    for token_id in ids_of(tokenizer, analysis):
        tracker.push(token_id)
    assert tracker.phase is Phase.CLOSING


def test_c14_a_row_is_never_masked_completely() -> None:
    """openvino.genai PR#4139: grammar masks the marker, the budget the rest; NaN is sampled."""
    scores = scores_for(2)
    scores[:, END_A] = -torch.inf
    budget = ThinkingBudgetLogitsProcessor(ONE_TOKEN, 0)
    before = scores.clone()
    result = budget(torch.tensor([OPENED, [1, 2, 3, 4]]), scores)
    assert torch.equal(scores, before)
    assert torch.isfinite(result[0]).nonzero().tolist() == [[END_A]]
    assert result.softmax(dim=-1)[0, END_A] == 1
    assert torch.equal(result[1], before[1])


def test_c17_thinking_that_never_ends_is_closed() -> None:
    """DeepSeek-V3#1587: a cycle of thoughts up to the length limit."""
    budget = ThinkingBudgetLogitsProcessor(ONE_TOKEN, 20)
    tokens = generate([OPENED], [budget], max_new_tokens=40)[0]
    assert tokens[20] == END_A
    assert len(tokens) == 40


def test_c4_a_generation_cut_before_the_budget_has_no_marker() -> None:
    """Would catch a marker squeezed in at the length limit."""
    budget = ThinkingBudgetLogitsProcessor(ONE_TOKEN, 10)
    assert generate([OPENED], [budget], max_new_tokens=10) == generate([OPENED], max_new_tokens=10)


def test_one_transfer_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch the whole text fetched from the device at every step."""
    budget = ThinkingBudgetLogitsProcessor(ONE_TOKEN, 50)
    ids = torch.tensor([OPENED, NOT_OPENED[:4]])
    scores = scores_for(2)
    budget(ids, scores)
    fetched: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: fetched.append(tensor.numel()) or tolist(tensor)
    )
    for token_id in range(10):
        ids = torch.cat((ids, torch.full((2, 1), token_id)), dim=1)
        budget(ids, scores)
    assert fetched == [4] * 10


def test_a_marker_outside_the_vocabulary_is_refused() -> None:
    """Would catch an index error, or a wrong row, deep inside a step."""
    budget = ThinkingBudgetLogitsProcessor(ThinkingMarkers((), end=((VOCABULARY,),)), 0)
    with pytest.raises(MarkerError, match=str(VOCABULARY)):
        budget(row_of(1, 2), scores_for())


@pytest.mark.parametrize("value", [-1, 1.5, "7", None, True])
def test_impossible_budgets_are_refused(value: object) -> None:
    """Would catch a budget that silently never applies."""
    with pytest.raises(ConfigError, match="thinking_budget"):
        ThinkingBudgetLogitsProcessor(ONE_TOKEN, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, 1.5])
def test_impossible_prompt_lengths_are_refused(value: object) -> None:
    """Would catch a slice from the end of the text."""
    with pytest.raises(ConfigError, match="prompt_length"):
        ThinkingBudgetLogitsProcessor(ONE_TOKEN, 1, prompt_length=value)  # type: ignore[arg-type]
