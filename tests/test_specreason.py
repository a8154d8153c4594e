"""Step speculation with scripted models: which steps are accepted, rewritten and forced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import RecordingStreamer
from scripted import LAYERS, SURE
from stories import END, EOS, INTERLUDE, PROMPT, Story, models, plain, tell
from tiny_tokenizers import family_tokenizer
from transformers import LogitsProcessorList

from ssr_hf import ThinkingBudgetLogitsProcessor, ThinkingMarkers
from ssr_hf.specreason.writer import FEW_UNREAD

CASES = ("same", "padded", "different")
everywhere = pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind in LAYERS for case in CASES]
)

# The second of three steps is rejected; `b1` is the base model's own.
REDO = Story(
    small={"": "s0.", "s0.": "s1.", "b1.": "s2."},
    base={"": "b0.", "s0.": "b1."},
    scores={"s1.": 3},
)
# Nothing of what the models write agrees.
APART = Story(small={"": "s0.", "s0.": "s1."}, base={"": "b0.", "b0.": "b1."})


@everywhere
def test_accepts_and_rewrites(kind: str, case: str) -> None:
    """A rejected step that stays in one of the two caches would change what is written next."""
    told = tell(REDO, kind, case)
    assert told.thinking == "s0.\n\nb1.\n\ns2.\n\n"
    assert told.answer == REDO.answer
    assert told.authors == ["assistant", "base", "assistant", "assistant"]
    assert [step.score for step in told.steps] == [9, 3, 9, 9]


@everywhere
def test_threshold_above_nine_is_plain_generate(kind: str, case: str) -> None:
    """A proposal that leaves a trace, or a base step that ends too late, would change the text."""
    told = tell(APART, kind, case, threshold=10)
    assert told.output.sequences.tolist() == plain(told.base).tolist()
    assert set(told.authors) == {"base"}
    assert len(told.output.step_speculation.scores) == 3


@everywhere
def test_threshold_zero_is_the_small_model(kind: str, case: str) -> None:
    """Committing anything of the base model inside thinking would show here."""
    told = tell(APART, kind, case, threshold=0)
    alone = told.small.tokenizer.decode(plain(told.small)[0])
    assert told.thinking == alone.partition("<think>\n")[2].partition(END)[0]
    assert told.thinking == "s0.\n\ns1.\n\n"
    assert set(told.authors) == {"assistant"}
    assert told.answer == APART.answer


@everywhere
def test_an_accepted_step_costs_one_forward(kind: str, case: str) -> None:
    """A second forward per step (to score, to roll back, to read again) is half of the gain."""
    told = tell(APART, kind, case, threshold=0)
    n_answer = len(told.base.tokenizer.encode(APART.answer, add_special_tokens=False))
    # The prompt, three steps (the last is the marker), and one per token of the answer.
    assert told.base.n_forwards == 1 + 3 + n_answer
    rounds = told.output.speculation.rounds
    assert [r.source for r in rounds[1:4]] == ["step"] * 3
    assert sum(r.n_committed for r in rounds) == told.output.speculation.new_tokens


@everywhere
def test_the_small_model_reads_nothing_twice(kind: str, case: str) -> None:
    """Dropping its state after an accepted step costs a forward over what it wrote itself."""
    story = Story(small={"": "a first step of some length."})
    told = tell(story, kind, case, threshold=0)
    n_written = len(told.small.tokenizer.encode(told.thinking + END, add_special_tokens=False))
    assert n_written > FEW_UNREAD
    assert told.small.n_forwards == 1 + n_written


@everywhere
def test_the_small_model_catches_up_in_one_forward(kind: str, case: str) -> None:
    """What the base model wrote must not be read token by token."""
    story = Story(small={"b1.": "s2."}, base={"": "a first step of some length.", "length.": "b1."})
    told = tell(story, kind, case, first_base_steps=1)
    n_written = len(told.small.tokenizer.encode(END, add_special_tokens=False))
    assert told.authors == ["base", "assistant"]
    # The prompt with the base model's step, and one per token of the marker.
    assert told.small.n_forwards == 1 + n_written


@everywhere
def test_rejected_steps_do_not_pile_up(kind: str, case: str) -> None:
    """The small model must not read all that the base model wrote again for every step."""
    steps = [f"step {name} of the base model." for name in "abcdef"]
    chain = dict(zip(["", *steps], steps, strict=False))
    told = tell(Story(small=dict.fromkeys(chain, "s0."), base=chain), kind, case, threshold=10)
    assert told.authors == ["base"] * 7
    longest = len(f"{steps[0]}\n\n")
    assert max(told.small.fed[1:]) <= longest + FEW_UNREAD


@everywhere
def test_a_rejected_step_costs_no_forward_of_its_own(kind: str, case: str) -> None:
    """The forward that read the step also selects the base model's tokens where they agree."""
    # The base model writes `s1` as well, and differs behind it.
    story = Story(
        small={"": "s0.", "s0.": "s1 small."}, base={"s0.": "s1 base."}, scores={"s1 small.": 1}
    )
    told = tell(story, kind, case)
    assert told.thinking == "s0.\n\ns1 base.\n\n"
    step = told.steps[1]
    assert (step.author, step.n_reused) == ("base", len("s1 "))
    n_base = len("s1 base.\n\n")
    n_answer = len(told.base.tokenizer.encode(story.answer, add_special_tokens=False))
    # The forward of the rejected step gives its first four tokens.
    assert told.base.n_forwards == 1 + 1 + (n_base - 3) + 1 + n_answer


@pytest.mark.parametrize("kind", LAYERS)
def test_logprob_reads_no_prompt(kind: str) -> None:
    """Without a score prompt nothing may be rolled back, not even on recurrent caches."""
    told = tell(APART, kind, scorer="logprob", threshold=-1000.0)
    assert told.thinking == "s0.\n\ns1.\n\n"
    assert all(step.score < -1 for step in told.steps[:2])
    fed = [r.n_fed for r in told.output.speculation.rounds[1:4]]
    # The last token of a step is fed with the next one.
    assert fed == [len("s0.\n\n") - 1, len("s1.\n\n"), 1]


@pytest.mark.parametrize("kind", LAYERS)
def test_logprob_of_one_first_token(kind: str) -> None:
    """The prompt alone judges a single token, and no token is left to be fed."""
    told = tell(Story(small={}), kind, scorer="logprob", threshold=-1000.0)
    assert told.text == f"{END}{APART.answer}"
    assert told.authors == ["assistant"]


def test_padding_of_the_small_vocabulary_is_never_written() -> None:
    """Rows of the larger matrix that mean nothing to the base model may have any logit."""
    _, small = models(APART, "full", "padded")
    forward = small.forward

    def favouring(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits[..., -1] = 2 * SURE
        return output

    small.forward = favouring
    told = tell(APART, threshold=0, arguments={"assistant_model": small}, candidate_tokens=3)
    assert told.thinking == "s0.\n\ns1.\n\n"
    assert told.answer == APART.answer


def test_logprob_of_an_agreeing_step_is_near_zero() -> None:
    """A row that is off by one would judge every token by its neighbour."""
    story = Story(small={"": "s0."}, base={"": "s0."})
    told = tell(story, scorer="logprob", threshold=-1e-3)
    assert told.authors[0] == "assistant"
    assert told.steps[0].score == pytest.approx(0.0, abs=1e-6)


@everywhere
def test_rejected_marker(kind: str, case: str) -> None:
    """A small model's end marker is a step like others: rejected, thinking goes on."""
    story = Story(small={"": "s0."}, base={"s0.": "b1.", "b1.": "b2."}, scores={END: 2})
    told = tell(story, kind, case)
    assert told.thinking == "s0.\n\nb1.\n\nb2.\n\n"
    assert told.authors == ["assistant", "base", "base", "base"]
    assert told.answer == story.answer


@everywhere
def test_marker_by_the_base_model(kind: str, case: str) -> None:
    """When the base model closes thinking in a step of its own, nothing more is proposed."""
    story = Story(small={"": "s0.", "s0.": "s1."}, scores={"s1.": 0})
    told = tell(story, kind, case)
    assert told.thinking == "s0.\n\n"
    assert told.authors == ["assistant", "base"]
    assert told.answer == story.answer


def test_stray_marker() -> None:
    """Text behind a marker inside a step would be read as the beginning of the answer."""
    story = Story(small={"": f"s0{END}and more."})
    # With other markers, the small model does not know what it writes.
    for case in (*CASES, "marked"):
        told = tell(story, case=case)
        assert told.text == f"s0{END}{story.answer}"
        assert [(step.author, step.n_tokens) for step in told.steps] == [("assistant", 3)]


@pytest.mark.parametrize("case", ["different", "marked"])
def test_end_of_sequence_of_the_base_model_as_text(case: str) -> None:
    """Text of the small model that the base model's tokenizer reads as EOS would end everything."""
    story = Story(small={"": f"s0{EOS}"}, base={"": "s0b."})
    told = tell(story, case=case)
    assert told.thinking == "s0b.\n\n"
    assert told.authors[:2] == ["assistant", "base"]
    assert told.answer == story.answer


def test_blank_steps_are_left_to_the_base_model() -> None:
    """White space up to the longest step says nothing that could be scored."""
    story = Story(small={"": "       x."}, base={"": "b0."})
    told = tell(story, max_step_tokens=5)
    assert told.thinking == "b0.\n\n"
    assert told.authors == ["base", "assistant"]
    assert told.steps[0].score is None


@everywhere
@pytest.mark.parametrize("budget", [3, 7, 8])
def test_thinking_budget(kind: str, case: str, budget: int) -> None:
    """A step must not run over the budget, and the marker is forced right at it."""
    told = tell(APART, kind, case, ssr={"thinking_budget": budget}, threshold=0)
    assert told.thinking == "s0.\n\ns1.\n\n"[:budget]
    assert told.answer == APART.answer
    assert told.steps[-1].author == "base"


@everywhere
def test_thinking_budget_of_the_user(kind: str, case: str) -> None:
    """The user's own processor that starts anew behind every accepted step, or is overrun."""
    markers = ThinkingMarkers.from_tokenizer(family_tokenizer("qwen3"))
    processors = LogitsProcessorList([ThinkingBudgetLogitsProcessor(markers, 7)])
    told = tell(APART, kind, case, threshold=0, arguments={"logits_processor": processors})
    assert told.thinking == "s0.\n\ns1.\n\n"[:7]
    assert told.answer == APART.answer


@everywhere
@pytest.mark.parametrize("n_new", [1, 3, 5, 7, 9, 12])
def test_max_new_tokens(kind: str, case: str, n_new: int) -> None:
    """Inside an accepted step, at its end, and inside a rewritten one, the length is exact."""
    story = replace(REDO, scores=dict.fromkeys(("s1", "s1.", "s1.\n"), 3))
    told = tell(story, kind, case, arguments={"max_new_tokens": n_new})
    assert told.text == "s0.\n\nb1.\n\ns2.\n\n"[:n_new]
    assert sum(step.n_tokens for step in told.steps) == n_new


@everywhere
def test_loop_hands_over(kind: str, case: str) -> None:
    """A small model that repeats itself for ever would never let the base model write."""
    story = Story(small={"": "s0.", "s0.": "s0.", "b1.": "s2."}, base={"s0.": "b1."})
    told = tell(story, kind, case)
    assert told.thinking == "s0.\n\ns0.\n\nb1.\n\ns2.\n\n"
    assert told.authors == ["assistant", "assistant", "base", "assistant", "assistant"]
    assert told.steps[2].score is None


@everywhere
def test_loop_of_both_is_closed(kind: str, case: str) -> None:
    """If the base model repeats the step as well, only the marker ends it."""
    story = Story(small={"": "s0.", "s0.": "s0."}, base={"s0.": "s0."})
    told = tell(story, kind, case)
    assert told.thinking == "s0.\n\n" * 3
    assert told.authors == ["assistant", "assistant", "base", "forced"]
    assert told.answer == story.answer
    told = tell(story, kind, case, max_repeats=3)
    assert told.thinking == "s0.\n\n" * 4


def test_base_model_alone_may_repeat_itself() -> None:
    """Closing a loop in which no step was accepted would differ from plain generate."""
    story = Story(small={"": "s0."}, base={"": "b0.", "b0.": "b0."})
    told = tell(story, threshold=10, arguments={"max_new_tokens": 50})
    assert told.text == ("b0.\n\n" * 10)
    assert set(told.authors) == {"base"}


@everywhere
def test_end_of_sequence_of_the_small_model(kind: str, case: str) -> None:
    """The small model's EOS must not end the generation: the answer is the base model's."""
    eos = EOS if case != "different" else "</s>"
    story = Story(small={"": "s0.", "s0.": f"s1{eos}", "s1": END}, base={"s1": "b2."})
    told = tell(story, kind, case)
    # A step ends in front of it; the next one begins with it, and is left to the base model.
    assert told.thinking.startswith("s0.\n\ns1")
    assert told.authors[:3] == ["assistant", "assistant", "base"]
    assert told.answer == story.answer


@everywhere
def test_longest_step(kind: str, case: str) -> None:
    """A step without delimiter must end, be scored, and be continued by the next one."""
    story = Story(small={"": "abcdefghijkl."})
    told = tell(story, kind, case, max_step_tokens=5)
    assert told.thinking == "abcdefghijkl.\n\n"
    assert [step.n_tokens for step in told.steps[:3]] == [5, 5, 5]


@everywhere
def test_longest_step_of_the_base_model(kind: str, case: str) -> None:
    """The base model's steps are cut at the same length; the small model goes on behind it."""
    story = Story(small={"": "s" * 12 + "."}, base={"": "b" * 12 + "."})
    told = tell(story, kind, case, max_step_tokens=4, first_base_steps=2)
    assert told.thinking.startswith("b" * 8)
    assert told.authors[:2] == ["base", "base"]
    assert [step.n_tokens for step in told.steps[:2]] == [4, 4]


@everywhere
def test_first_steps_of_the_base_model(kind: str, case: str) -> None:
    """Forced base steps are not proposed for, and the small model reads them afterwards."""
    story = Story(small={"b1.": "s2."}, base={"": "b0.", "b0.": "b1."})
    told = tell(story, kind, case, first_base_steps=2)
    assert told.thinking == "b0.\n\nb1.\n\ns2.\n\n"
    assert told.authors == ["base", "base", "assistant", "assistant"]
    assert [step.score for step in told.steps[:2]] == [None, None]


@everywhere
@pytest.mark.parametrize("n_tokens", [3, 12])
def test_base_steps_end_inside_accepted_candidates(kind: str, case: str, n_tokens: int) -> None:
    """Candidates that run over the end of a base step would be written without being scored."""
    if case == "different":
        pytest.skip("the small model's tokens are candidates where the vocabulary is the same")
    chain = {"": "b0.", "b0.": "b1.", "b1.": "s2."}
    told = tell(
        Story(small=chain, base=chain), kind, case, first_base_steps=2, candidate_tokens=n_tokens
    )
    assert told.thinking == "b0.\n\nb1.\n\ns2.\n\n"
    assert told.authors == ["base", "base", "assistant", "assistant"]
    assert [step.n_tokens for step in told.steps] == [5, 5, 5, 1]
    accepted = [r.n_accepted for r in told.output.speculation.rounds if r.source == "assistant"]
    assert sum(accepted) >= 4


@pytest.mark.parametrize(("threshold", "author"), [(3, "assistant"), (3.5, "base")])
def test_a_score_at_the_threshold_is_accepted(threshold: float, author: str) -> None:
    """The boundary belongs to the accepted side, as in the paper."""
    assert tell(REDO, threshold=threshold).authors[1] == author


def test_threshold_function() -> None:
    """It is asked with the index of the step and the thinking tokens before it."""
    asked = []

    def threshold(index: int, tokens: int) -> float:
        asked.append((index, tokens))
        return 10 if index == 1 else 0

    told = tell(REDO, threshold=threshold)
    assert told.thinking == "s0.\n\nb1.\n\ns2.\n\n"
    assert asked == [(0, 0), (1, 5), (2, 10), (3, 15)]


def test_streams_whole_accepted_steps() -> None:
    """Text of a rejected step, or half of an accepted one, must not reach the streamer."""
    streamer = RecordingStreamer()
    told = tell(REDO, arguments={"streamer": streamer})
    decode = told.base.tokenizer.decode
    # The host streams the prompt.
    texts = [decode(event[2]) for event in streamer.events if event[0] == "put"][1:]
    assert "".join(texts) == told.text
    assert texts[0] == "s0.\n\n"
    assert texts[1:6] == list("b1.\n\n")
    assert texts[6:8] == ["s2.\n\n", END]
    assert streamer.n_ends == 1


def test_stop_string_inside_an_accepted_step() -> None:
    """A criterion that holds inside a step ends the text there, with the right cache."""
    told = tell(APART, threshold=0, arguments={"stop_strings": ["s1"]})
    assert told.text == "s0.\n\ns1"


def test_scores_are_recorded_for_every_token() -> None:
    """One entry per emitted token, and where the base model wrote the entry selects the token."""
    told = tell(REDO, arguments={"output_scores": True, "output_logits": True})
    new_ids = told.output.sequences[0, -len(told.output.scores) :].tolist()
    assert len(told.output.logits) == len(new_ids) == told.output.speculation.new_tokens
    selected = [int(scores.argmax()) for scores in told.output.scores]
    by_base = slice(5, 10)
    assert selected[by_base] == new_ids[by_base]
    assert selected[:3] != new_ids[:3]


@everywhere
def test_thinking_that_the_base_model_opens(kind: str, case: str) -> None:
    """Before the opening marker nothing is proposed; both models read it."""
    told = tell(APART, kind, case, prompt=PROMPT.removesuffix("<think>\n"), threshold=0)
    assert told.thinking == "<think>\ns0.\n\ns1.\n\n"
    assert told.answer == APART.answer


def test_text_without_thinking_says_so() -> None:
    """A prompt that does not open thinking runs at the base model's speed: the user must learn."""
    told = tell(APART, prompt=PROMPT.removesuffix("<think>\n"), arguments={"max_new_tokens": 1})
    assert told.output.step_speculation.notes == ("no step was proposed: the text has no thinking",)
    assert tell(APART).output.step_speculation.notes == ()


@everywhere
def test_second_block_of_thinking(kind: str, case: str) -> None:
    """Steps are proposed again, after both models have read the text in between; repeats of steps
    in another block are no loop."""
    told = tell(Story(small={"": "s0."}, blocks=2), kind, case)
    block = f"s0.\n\n{END}"
    assert told.text == f"{block}{INTERLUDE}{block}{APART.answer}"
    assert told.authors == ["assistant"] * 4
    # A block that the base model closes leaves nothing behind for the next one.
    told = tell(Story(small={"": "s0."}, scores={END: 0}, blocks=2), kind, case)
    assert told.text == f"{block}{INTERLUDE}{block}{APART.answer}"
    assert told.authors == ["assistant", "base"] * 2


@pytest.mark.parametrize("kind", LAYERS)
def test_drafts_ride_while_the_base_model_writes(kind: str) -> None:
    """A draft that is put aside for a step, and not taken up again, is too short to be of use."""
    story = Story(
        small={"": "s0.", "s0.": "s1.", "b1.": "s2.", "s2.": "s3."},
        base={"s0.": "b1.", "s2.": "b3."},
        scores={"s1.": 0, "s3.": 0},
    )
    settings = {"draft_budget": 3, "max_draft_tokens": 20, "lane": "lockstep", "adaptive": False}
    told = tell(story, kind, ssr={**settings, "reuse": "prefix"})
    assert told.thinking == "s0.\n\nb1.\n\ns2.\n\nb3.\n\n"
    assert told.answer == story.answer
    first, second = told.output.speculation.drafts
    assert (first.status, second.status) == ("cut", "cut")
    assert 0 < first.n_tokens == second.n_inherited < second.n_tokens
    assert second.accepted_prefix == second.n_tokens
    # No step was read while the draft rode along.
    assert all(r.rows == 1 for r in told.output.speculation.rounds if r.source == "step")


def test_statistics() -> None:
    """The figures are those of the scripted run, and add up."""
    told = tell(REDO)
    stats = told.output.step_speculation
    assert (stats.count("assistant"), stats.count("base"), stats.count("forced")) == (3, 1, 0)
    assert stats.tokens("assistant") == len("s0.\n\ns2.\n\n") + 1
    assert stats.tokens("base") == len("b1.\n\n")
    assert stats.acceptance_rate == 0.75
    assert set(stats.seconds) == {"proposing", "scoring", "base_steps", "answer"}
    assert all(seconds > 0 for seconds in stats.seconds.values())
    assert stats.to_dict()["steps"] == {"assistant": 3, "base": 1, "forced": 0}
    thinking = stats.tokens("assistant") + stats.tokens("base")
    assert told.output.speculation.thinking_tokens == thinking
    assert stats.assistant_forwards == told.small.n_forwards


def test_foreign_tokenizer_reads_no_second_bos() -> None:
    """A BOS token in the middle of the small model's text resets what many models do."""
    seen: list[str] = []
    _, small = models(REDO, "full", "different")
    script = small.script

    def listen(text: str) -> str:
        seen.append(text)
        return script(text)

    small.script = listen
    told = tell(REDO, case="different", arguments={"assistant_model": small})
    assert told.thinking == "s0.\n\nb1.\n\ns2.\n\n"
    seen = [text for text in seen if "think" in text]
    assert seen
    assert all(text.startswith("<s>") and text.count("<s>") == 1 for text in seen)
