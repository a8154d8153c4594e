"""The parts of step speculation alone: settings, refusals, scoring, step ends, text hand-over."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
import transformers
from helpers import enabled
from stories import END, PROMPT, SCORE_PROMPT, Story, foreign_tokenizer, models, tell
from tiny_tokenizers import FAMILIES, LINE_BREAK, build_tokenizer, family_tokenizer, plain_tokenizer

import ssr_hf
from ssr_hf import ConfigError, ProposedStep, StepSpeculationConfig, UnsupportedError
from ssr_hf.errors import SelfSpeculationError
from ssr_hf.markers import PhaseTracker, ThinkingMarkers, TokenCodec
from ssr_hf.specreason import reader
from ssr_hf.specreason.guessing import FIRST_PAUSE, GuessLength
from ssr_hf.specreason.prompts import LEAD, REQUEST, score_prompt
from ssr_hf.specreason.scoring import ExpectedDigit, MostLikelyDigit, mean_log_probability
from ssr_hf.specreason.text import StepEnd
from ssr_hf.specreason.translation import SharedIds, TextHandOver

STORY = Story(small={"": "s0."}, base={"s0.": "b1."})
QWEN = family_tokenizer("qwen3")


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"threshold": -1}, "threshold is -1 for scorer 'digit'"),
        ({"threshold": 11}, "A number from 0 to 10"),
        ({"threshold": math.nan}, "threshold is nan"),
        ({"threshold": "7"}, "threshold is '7'"),
        ({"threshold": True}, "threshold is True"),
        ({"scorer": "logprob"}, "A number from -inf to 0"),
        ({"scorer": "digits"}, "Did you mean scorer='digit'"),
        ({"delimiter": ""}, "delimiter is ''"),
        ({"delimiter": []}, "delimiter is []"),
        ({"delimiter": [7]}, "delimiter is [7]"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0"),
        ({"first_base_steps": -1}, "first_base_steps is -1"),
        ({"max_repeats": 1}, "max_repeats is 1"),
        (
            {"scorer": "logprob", "threshold": -1, "score_prompt": "How good?"},
            "score_prompt is set",
        ),
        ({"candidate_tokens": -1}, "candidate_tokens is -1"),
        ({"score_prompt": ""}, "score_prompt is ''"),
        ({"assistant_prompt": ()}, "assistant_prompt is ()"),
        ({"assistant_prompt": 5}, "assistant_prompt is 5"),
        ({"assistant_prompt": ["Hi"]}, "assistant_prompt is ['Hi']"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], text: str) -> None:
    """A setting that is silently clipped or ignored gives another trade-off than was asked for."""
    with pytest.raises(ConfigError, match=re.escape(text)):
        StepSpeculationConfig(**settings)


def test_coerce() -> None:
    """`generate` takes True, a dict or a config; a misspelt setting must not be dropped."""
    assert StepSpeculationConfig.coerce(None) is None
    assert StepSpeculationConfig.coerce(False) is None
    assert StepSpeculationConfig.coerce(True) == StepSpeculationConfig()
    assert StepSpeculationConfig.coerce({"threshold": 5}).threshold == 5
    with pytest.raises(ConfigError, match="Did you mean 'threshold'"):
        StepSpeculationConfig.coerce({"treshold": 5})
    with pytest.raises(ConfigError, match="step_speculation is 7"):
        StepSpeculationConfig.coerce(7)


def test_defaults() -> None:
    """The defaults are those of the paper, and run."""
    config = StepSpeculationConfig()
    assert (config.threshold, config.scorer, config.delimiters) == (7.0, "digit", ("\n\n",))
    assert (config.max_step_tokens, config.first_base_steps, config.max_repeats) == (512, 0, 2)
    base, small = models(STORY, "full", "same")
    ids = torch.tensor([base.tokenizer.encode(PROMPT)])
    with enabled(base):
        arguments = {"assistant_model": small, "tokenizer": base.tokenizer}
        output = base.generate(ids, step_speculation=True, max_new_tokens=30, **arguments)
    assert base.tokenizer.decode(output[0]).startswith(PROMPT)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"assistant_model": None}, ConfigError, "set without assistant_model"),
        ({"assistant_model": "gpt2"}, ConfigError, "assistant_model is 'gpt2'"),
        ({"assistant_model": torch.nn.Linear(1, 1)}, ConfigError, "assistant_model is a Linear"),
        ({"tokenizer": None}, ConfigError, "set without tokenizer"),
        ({"num_beams": 2}, UnsupportedError, "beam"),
        ({"output_hidden_states": True}, UnsupportedError, "output_hidden_states is set"),
        ({"use_cache": False}, UnsupportedError, "use_cache"),
    ],
)
def test_refused_calls(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """What cannot work must be said before anything runs."""
    with pytest.raises(error, match=text):
        tell(STORY, arguments=arguments)


def test_refuses_batches() -> None:
    """Steps of several prompts do not end together."""
    ids = torch.tensor([QWEN.encode(PROMPT)] * 2)
    base, small = models(STORY, "full", "same")
    with enabled(base), pytest.raises(UnsupportedError, match="The batch has 2 prompts"):
        base.generate(ids, step_speculation=True, assistant_model=small, tokenizer=QWEN)


def test_refuses_other_vocabulary_without_its_tokenizer() -> None:
    """Ids of one vocabulary would be read as ids of the other."""
    with pytest.raises(ConfigError, match="set without assistant_tokenizer"):
        tell(STORY, case="different", arguments={"assistant_tokenizer": None})


def test_refuses_candidates_of_another_vocabulary() -> None:
    """The small model's ids mean nothing to the base model."""
    with pytest.raises(ConfigError, match="candidate_tokens is 4 and the tokenizers differ"):
        tell(STORY, case="different", candidate_tokens=4)


def test_refuses_a_prompt_that_nobody_would_read() -> None:
    """With one vocabulary the small model reads the base model's own prompt."""
    with pytest.raises(ConfigError, match="assistant_prompt is set and the tokenizers do not"):
        tell(STORY, assistant_prompt="Hi")


def test_refuses_an_encoder_decoder_model() -> None:
    """It has no text of its own to continue."""
    config = transformers.T5Config(
        vocab_size=len(QWEN), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2
    )
    small = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        tell(STORY, arguments={"assistant_model": small})


@pytest.mark.parametrize("given", [None, math.nan])
def test_refuses_a_threshold_without_a_number(given: object) -> None:
    """The same for a threshold."""
    with pytest.raises(ConfigError, match=f"The threshold function gave {given} for step 0"):
        tell(STORY, threshold=lambda index, tokens: given)


def test_a_threshold_may_be_any_number() -> None:
    """A number of numpy or torch that is taken for none in the middle of a generation."""
    tell(STORY, threshold=lambda index, tokens: torch.tensor(5.0))


def test_a_function_reads_the_answer_to_a_score_prompt() -> None:
    """A scorer of the user's own that is never given an answer, whatever it asks."""
    answers = []

    def judge(step: ssr_hf.ProposedStep) -> float:
        answers.append(step.answer_logits)
        return 9.0

    tell(STORY, scorer=judge)
    assert answers and all(answer is None for answer in answers)
    answers.clear()
    tell(STORY, scorer=judge, score_prompt=SCORE_PROMPT)
    assert answers and all(answer.dim() == 1 for answer in answers)


@pytest.mark.parametrize("n_positions", [3, 24, 30])
def test_a_text_that_does_not_fit_the_small_model_says_so(n_positions: int) -> None:
    """The base model alone at the price of both, and no word."""
    base, small = models(STORY, "full", "same")
    small.config.max_position_embeddings = n_positions
    ids = torch.tensor([base.tokenizer.encode(PROMPT)])
    arguments = {"assistant_model": small, "tokenizer": base.tokenizer, "max_new_tokens": 80}
    with enabled(base):
        output = base.generate(
            ids, step_speculation=True, return_dict_in_generate=True, **arguments
        )
    assert output.sequences.shape[1] > n_positions
    assert "does not fit the small model" in output.step_speculation.notes[0]


def test_a_prompt_of_one_token_is_short_and_not_full() -> None:
    """A small model that is switched off for good because it could not begin."""
    story = Story(small={"": "s0.", "b0.": "s1."}, base={"": "b0."})
    told = tell(story, prompt="<think>")
    assert told.authors == ["base", "assistant", "assistant"]
    assert told.output.step_speculation.notes == ()


def test_refuses_a_scorer_without_a_number() -> None:
    """Comparisons with NaN are false: every step would be rejected without a word."""
    with pytest.raises(ConfigError, match="The scorer gave nan for step 0, 's0"):
        tell(STORY, scorer=lambda step: math.nan)


def test_assistant_model_alone_stays_refused() -> None:
    """Without step speculation the host would choose assisted decoding."""
    base, small = models(STORY, "full", "same")
    ids = torch.tensor([QWEN.encode(PROMPT)])
    with enabled(base), pytest.raises(UnsupportedError, match="assistant_model and self_spec"):
        base.generate(ids, self_speculation=True, assistant_model=small)


def test_warns_of_a_bigger_small_model(caplog: pytest.LogCaptureFixture) -> None:
    """Swapped models cost more than they save, and nothing else would tell."""
    base, small = models(STORY, "full", "same")
    ids = torch.tensor([QWEN.encode(PROMPT)])
    with enabled(small), caplog.at_level(logging.WARNING):
        arguments = {"assistant_model": base, "tokenizer": QWEN, "max_new_tokens": 5}
        small.generate(ids, step_speculation=True, **arguments)
    assert "Swap the two models" in caplog.text


def test_every_refusal_is_an_error_of_this_package() -> None:
    """Callers catch one type."""
    assert issubclass(ConfigError, SelfSpeculationError)
    assert issubclass(UnsupportedError, SelfSpeculationError)


# -- scoring -------------------------------------------------------------------------------------


def proposed(answer: torch.Tensor | None, **changes: Any) -> ProposedStep:
    """A step whose answer to the score prompt has these logits."""
    values = {"index": 0, "thinking_tokens": 0, "text": "", "token_ids": (), "step_logits": None}
    return ProposedStep(**{**values, **changes}, answer_logits=answer)


def digit_logits(codec: TokenCodec, weights: dict[str, float]) -> torch.Tensor:
    """Logits that are 0 except for some texts."""
    logits = torch.zeros(len(codec))
    for text, weight in weights.items():
        logits[codec.encode(text)[0]] = weight
    return logits


def test_digit_scorer() -> None:
    """The best digit counts even if another token is likelier, but not if no digit is likely."""
    codec = TokenCodec(QWEN)
    scorer = MostLikelyDigit(codec)
    assert scorer(proposed(digit_logits(codec, {"7": 5, "3": 4, "a": 9}))) == 7
    letters = dict.fromkeys("abcdefghijklm", 9.0)
    assert scorer(proposed(digit_logits(codec, {"7": 5, **letters}))) == 0


def test_digit_scorer_knows_digits_after_a_space() -> None:
    """Many vocabularies write ` 7` with one token of its own."""
    codec = TokenCodec(build_tokenizer(merges=(("Ġ", "8"),)))
    scorer = MostLikelyDigit(codec)
    assert len(codec.encode(" 8")) == 1
    assert scorer(proposed(digit_logits(codec, {" 8": 5, "3": 4}))) == 8


def test_expected_scorer() -> None:
    """It is defined however unlikely the digits are, and weighs them among themselves."""
    codec = TokenCodec(QWEN)
    scorer = ExpectedDigit(codec)
    assert scorer(proposed(torch.zeros(len(codec)))) == pytest.approx(4.5)
    unlikely = torch.full((len(codec),), 500.0)
    for digit, weight in (("2", -300.0), ("4", -300.0)):
        unlikely[codec.encode(digit)[0]] = weight
    for digit in "01356789":
        unlikely[codec.encode(digit)[0]] = -900.0
    assert scorer(proposed(unlikely)) == pytest.approx(3.0)


def test_digit_scorers_need_digits() -> None:
    """Half a digit is no score."""
    codec = TokenCodec(QWEN)
    codec.encode = lambda text: (1, 2)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"writes 0, 1, .* with several tokens"):
        MostLikelyDigit(codec)


def test_mean_log_probability() -> None:
    """Row `i` judges token `i`; the mean is over tokens."""
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    expected = logits.log_softmax(1)[range(3), (4, 0, 10)].mean()
    step = proposed(None, token_ids=(4, 0, 10), step_logits=logits)
    assert mean_log_probability(step) == pytest.approx(float(expected), abs=1e-5)


def test_a_function_scores() -> None:
    """A function sees the step, its place and what the base model thinks of every token."""
    seen: list[ProposedStep] = []

    def scorer(step: ProposedStep) -> float:
        seen.append(step)
        return 1.0 if step.text == "s0.\n\n" else -1.0

    told = tell(STORY, scorer=scorer, threshold=0.5)
    assert told.authors == ["assistant", "base", "base"]
    assert [step.text for step in seen] == ["s0.\n\n", END, END]
    assert [(step.index, step.thinking_tokens) for step in seen] == [(0, 0), (1, 5), (2, 10)]
    assert all(step.answer_logits is None for step in seen)


def test_expected_scorer_in_a_run() -> None:
    """The answer is read at the last position, behind the whole prompt."""
    told = tell(Story(small={"": "s0."}, scores={"s0.": 4, END: 8}), scorer="expected", threshold=3)
    assert [step.score for step in told.steps] == pytest.approx([4, 8], abs=1e-3)


# -- score prompt --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_score_prompt_of_every_template(family: str) -> None:
    """It must end the assistant's turn, hold the request in a user turn, and open an answer."""
    tokenizer = family_tokenizer(family)
    text = score_prompt(tokenizer)
    assert text.endswith(LEAD)
    assert text.count(REQUEST) == 1
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "ANSWER"},
        {"role": "user", "content": REQUEST},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert whole.endswith("ANSWER" + text.removesuffix(LEAD))


def test_score_prompt_without_template() -> None:
    """Base models without a template are asked in plain text."""
    assert score_prompt(build_tokenizer()) == f"\n\n{REQUEST}\n{LEAD}"


def test_score_prompt_of_an_unusable_template() -> None:
    """A template that drops or refuses the turns must be named, not give a prompt without them."""
    dropping = build_tokenizer(chat_template="{{ messages[-1]['content'] }}")
    refusing = build_tokenizer(chat_template="{{ raise_exception('one turn only') }}")
    with pytest.raises(ConfigError, match="it drops the assistant's turn"):
        score_prompt(dropping)
    with pytest.raises(ConfigError, match="one turn only"):
        score_prompt(refusing)


# -- step ends -----------------------------------------------------------------------------------


def ends(tokenizer: Any, text: str, *delimiters: str) -> int | None:
    """Index of the token that ends the step which `text` begins with."""
    codec = TokenCodec(tokenizer)
    return StepEnd(codec, delimiters or ("\n\n",)).first_in((), codec.encode(text))


def test_delimiter_inside_merged_tokens() -> None:
    """`.` and a blank line are one token in most vocabularies: ids alone would miss it."""
    merged = foreign_tokenizer()
    assert merged.tokenize("a.\n\n") == ["a", "." + 2 * LINE_BREAK]
    assert ends(merged, "a.\n\nb") == 1
    assert ends(merged, "a\n\nb") == 1
    assert ends(QWEN, "a.\n\nb") == 3


def test_leading_blank_lines_do_not_end_a_step() -> None:
    """A template that ends with a line break would make every first step empty."""
    assert ends(QWEN, "\n\n\n") is None
    assert ends(QWEN, "\n\nab\n\n") == 5


def test_several_delimiters() -> None:
    """The first one counts, and one that is split over tokens as well."""
    assert ends(QWEN, "abc;def.", ".", ";") == 3
    assert ends(QWEN, "ab。cd", "。") == 4
    assert ends(QWEN, "abcd", "。") is None


# -- hand-over -----------------------------------------------------------------------------------


def hand_over(prompt: Any = None) -> TextHandOver:
    """From the tokenizer of Qwen 3 to one without its markers and tags."""
    markers = ThinkingMarkers.from_tokenizer(QWEN)
    return TextHandOver(QWEN, markers, foreign_tokenizer(), prompt)


@pytest.mark.parametrize("text", ["s0 and. \n\n", " lead", "\n\nx", "naïve → 東京 🙂.\n\n", "  "])
def test_text_survives_both_ways(text: str) -> None:
    """A lost space, or a byte that became another one, lets the two models drift apart."""
    translation, codec = hand_over(), TokenCodec(QWEN)
    base_ids = codec.encode(text)
    small_ids = translation.to_assistant(base_ids)
    assert translation.codec.decode(small_ids) == text
    assert translation.to_base(small_ids) == base_ids
    assert translation.is_same(base_ids, small_ids)


def test_markers_are_exchanged() -> None:
    """Each model has to see its own end marker, and the base model gets its special token."""
    deepseek, plain = family_tokenizer("magistral"), plain_tokenizer()
    markers = ThinkingMarkers.from_tokenizer(deepseek)
    translation = TextHandOver(deepseek, markers, QWEN, None)
    base = TokenCodec(deepseek)
    swapped = translation.to_assistant(base.encode("a[/THINK]b"))
    assert QWEN.decode(swapped) == "a</think>b"
    back = translation.to_base(TokenCodec(QWEN).encode("a</think>b"))
    assert base.decode(back) == "a[/THINK]"
    # A small model without markers writes those of the base model as plain text.
    translation = TextHandOver(deepseek, markers, plain, None)
    written = TokenCodec(plain).encode("a[/THINK]")
    watcher = translation.watcher()
    assert [watcher.push(token_id).value for token_id in written][-1] == "answering"
    assert translation.to_base(written)[-1:] == markers.closing


def test_prompt_of_the_small_model() -> None:
    """One BOS of its own, no tags that it does not know, and tags that it does."""
    ids = QWEN.encode("<|endoftext|>" + PROMPT)
    text = foreign_tokenizer().decode(hand_over().prompt(ids))
    assert text == "<s>user\nq\nassistant\n<think>\n"
    assert foreign_tokenizer().decode(hand_over("<s>given").prompt(ids)) == "<s>given"
    assert foreign_tokenizer().decode(hand_over("given").prompt(ids)) == "<s>given"
    assert hand_over((5, 6)).prompt(ids) == (5, 6)
    related = build_tokenizer(
        special=("<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"), merges=(("q", "u"),)
    )
    markers = ThinkingMarkers.from_tokenizer(QWEN)
    translation = TextHandOver(QWEN, markers, related, None)
    assert related.decode(translation.prompt(QWEN.encode(PROMPT))) == PROMPT


def test_half_a_character_is_not_handed_over() -> None:
    """A step that is cut by its length inside a character would become another text."""
    translation = hand_over()
    small_ids = translation.codec.encode("né")
    assert TokenCodec(QWEN).decode(translation.to_base(small_ids[:2])) == "n"
    assert translation.splits_character(TokenCodec(QWEN).encode("né")[:2])
    assert not translation.splits_character(TokenCodec(QWEN).encode("né"))


@pytest.mark.parametrize("case", ["same", "different"])
@pytest.mark.parametrize(("threshold", "n_base"), [(0, 0), (10, 0), (0, 1)])
def test_characters_stay_whole_at_the_longest_step(case: str, threshold: int, n_base: int) -> None:
    """Both models go on behind a whole character, whoever wrote it."""
    story = Story(small={"": "né→東."}, base={"": "né→東."})
    limits = {"max_step_tokens": 4, "first_base_steps": n_base}
    told = tell(story, case=case, threshold=threshold, **limits)
    assert told.thinking == "né→東.\n\n"


def test_padding_ids_are_not_handed_over() -> None:
    """Ids that only the larger embedding matrix has are no text and would be out of range."""
    markers = ThinkingMarkers.from_tokenizer(QWEN)
    translation = SharedIds(TokenCodec(QWEN), PhaseTracker(markers, ()), vocab_size=5)
    assert translation.to_assistant((1, 9, 4, 5)) == (1, 4)


def test_left_padding_is_not_part_of_the_prompt() -> None:
    """Padding that the base model masks would be read as text by the small model."""
    padded = torch.tensor([[QWEN.pad_token_id or 0] * 3 + QWEN.encode(PROMPT)])
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    seen: list[str] = []
    _, small = models(STORY, "full", "same")
    script = small.script

    def listen(text: str) -> str:
        seen.append(text)
        return script(text)

    small.script = listen
    base, _ = models(STORY, "full", "same")
    with enabled(base):
        arguments = {"assistant_model": small, "tokenizer": QWEN, "max_new_tokens": 8}
        base.generate(padded, attention_mask=mask, step_speculation={"threshold": 0}, **arguments)
    texts = [text for text in seen if "think" in text]
    assert texts
    assert all(text.startswith(PROMPT[:12]) for text in texts)


# -- small pieces --------------------------------------------------------------------------------


def test_guess_length_backs_off() -> None:
    """A small model that is never right must stop costing forwards."""
    length = GuessLength(3)
    offered = []
    for _ in range(200):
        n_tokens = length.next()
        offered.append(n_tokens)
        if n_tokens:
            length.observe(n_tokens, 0)
    assert offered[:3] == [3, 2, 1]
    assert offered[3 : 3 + FIRST_PAUSE] == [0] * FIRST_PAUSE
    assert sum(offered) < 12
    length.observe(1, 1)
    assert length.next() == 3 or length.next() == 0
    assert GuessLength(0).next() == 0


def test_recurrent_caches_do_not_collect_pending_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit every step would read all steps before it again."""
    small = {"": "s0.", **{f"s{i}.": f"s{i + 1}." for i in range(8)}}
    monkeypatch.setattr(reader, "MOST_PENDING", 12)
    told = tell(Story(small=small), "recurrent", threshold=0)
    assert told.thinking == "".join(f"s{i}.\n\n" for i in range(9))
    n_prompt = len(told.base.tokenizer.encode("?SCORE "))
    fed = [r.n_fed for r in told.output.speculation.rounds if r.source == "step"]
    assert max(fed) <= 12 + 5 + n_prompt + 5


def test_output_without_steps_has_no_step_statistics() -> None:
    """The field is None unless step speculation was asked for."""
    base, _ = models(STORY, "full", "same")
    ids = torch.tensor([QWEN.encode(PROMPT)])
    with enabled(base):
        arguments = {"return_dict_in_generate": True, "max_new_tokens": 4, "tokenizer": QWEN}
        output = base.generate(ids, self_speculation=True, **arguments)
    assert isinstance(output, ssr_hf.SelfSpeculativeOutput)
    assert output.step_speculation is None
