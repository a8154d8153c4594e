"""Train the tiny reasoning model that ships with the package, from scratch, on a CPU.

    python scripts/train_tiny_reasoner.py train --output ssr_hf/assets/tiny_reasoner
    python scripts/train_tiny_reasoner.py train --preset small --output tiny_reasoner_small \\
        --tokenizer ssr_hf/assets/tiny_reasoner
    python scripts/train_tiny_reasoner.py evaluate --model ssr_hf/assets/tiny_reasoner

`train` draws its data, trains the tokenizer and the model, evaluates what it saved and writes the
model card. `--minutes` bounds the wall-clock time and shortens the schedule to fit; with `--steps`
alone a run is reproducible.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

# Two processes that spin on their thread pools on a shared machine slow each other down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import typer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ssr_hf.assets.problems import TinyReasonerProblem, generate_problem, tiny_reasoner_prompts

USER, ASSISTANT, EOS = "<|user|>", "<|assistant|>", "<|endoftext|>"
THINK, CLOSE = "<think>", "</think>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    f"{{{{- '{ASSISTANT}' + message.content + '{EOS}' }}}}"
    "{%- else %}"
    f"{{{{- '{USER}' + message.content }}}}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    f"{{{{- '{ASSISTANT}{THINK}\\n' }}}}"
    "{%- endif %}"
)
# Words, two-digit numbers and line breaks never merge with what surrounds them: a value is the same
# token in a note, in the reasoning and in every answer format, so copying it is all there is to
# learn.
PRE_TOKEN = r"\n|[A-Za-z]+|[0-9]{1,2}|[^A-Za-z0-9\n]+"
VOCAB_SIZE = 1000
MIN_NOTES, MAX_NOTES = 5, 8
# Layers, width, heads, key-value heads, size of a head, and width of the feed-forward layers. The
# base has many thin layers, so that a forward is more kernel launches than arithmetic, as that of a
# large model on a GPU is, and no grouped heads, which a CPU copies out anew in each forward of
# several tokens.
PRESETS = {"base": (8, 192, 3, 3, 32, 192), "small": (2, 192, 6, 3, 32, 576)}
MAX_POSITIONS = 2048
# Tokens of a suffix, and of a proposal, when the evaluation replays an answer against a draft.
SUFFIX_LENGTH, MAX_PROPOSAL = 4, 16
IGNORED = -100
STAGES_FILE = "training.json"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# --- Tokenizer and model ---------------------------------------------------------------------


def train_tokenizer(seed: int, num_problems: int = 4000) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer on generated problems.

    Args:
        seed (`int`): Seed of the problems.
        num_problems (`int`, *optional*, defaults to 4000): Number of problems to train on.

    Returns:
        `PreTrainedTokenizerFast`: the tokenizer with its chat template. As in other reasoning
        models, the thinking markers are ordinary added tokens, so that decoding without special
        tokens keeps them.
    """
    rng = random.Random(f"tokenizer-{seed}")
    problems = [generate_problem(rng, rng.randint(2, MAX_NOTES)) for _ in range(num_problems)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"{problem.prompt}\n{problem.cot}\n{problem.answer}" for problem in problems)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in (THINK, CLOSE)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Load a trained tokenizer such that saving it again writes the same files."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Qwen3ForCausalLM:
    """Build an untrained model for the tokenizer's vocabulary."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def shape_of(config: Qwen3Config) -> list[int]:
    """The shape of a model, in the order of `PRESETS`."""
    return [
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
    ]


# --- Data ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """Token ids of one training text, and the ids to predict (`IGNORED` where there is no loss)."""

    input_ids: list[int]
    labels: list[int]


class ExampleBuilder:
    """Turns problems into training examples.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer.
        cut_fraction (`float`):
            Share of the examples whose chain of thought ends at a random token, so that an answer
            asked for in mid-reasoning is no surprise to the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, cut_fraction: float) -> None:
        self.tokenizer = tokenizer
        self.cut_fraction = cut_fraction
        self.close_id = tokenizer.convert_tokens_to_ids(CLOSE)
        self.newline_id = self.encode("\n")[0]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.backend_tokenizer.encode(text).ids

    def encode_prompt(self, problem: TinyReasonerProblem) -> list[int]:
        return self.encode(
            self.tokenizer.apply_chat_template(
                problem.messages, add_generation_prompt=True, tokenize=False
            )
        )

    def build(self, problem: TinyReasonerProblem, rng: random.Random) -> Example:
        """Build the example of a problem, with its chain of thought whole or cut short."""
        prompt, cot = self.encode_prompt(problem), self.encode(problem.cot)
        answer, close_label = problem.answer, self.close_id
        if rng.random() < self.cut_fraction:
            cot = cot[: rng.randrange(len(cot))]
            answer = problem.draft_answer(cot.count(self.newline_id))
            # A marker forced from outside is not for the model to predict.
            close_label = IGNORED
        rest = [*self.encode(f"\n{answer}"), self.tokenizer.eos_token_id]
        return Example(
            input_ids=[*prompt, *cot, self.close_id, *rest],
            labels=[*[IGNORED] * len(prompt), *cot, close_label, *rest],
        )


def training_batches(
    builder: ExampleBuilder, rng: random.Random, num_notes: tuple[int, int], batch_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of examples of similar length, forever.

    Args:
        builder (`ExampleBuilder`): Builds the examples.
        rng (`random.Random`): Source of the problems and of the order of the batches.
        num_notes (`tuple[int, int]`): Fewest and most notes in a problem.
        batch_tokens (`int`): Tokens in a batch, padding included.
    """
    while True:
        problems = [generate_problem(rng, rng.randint(*num_notes)) for _ in range(256)]
        examples = [builder.build(problem, rng) for problem in problems]
        examples.sort(key=lambda example: len(example.input_ids), reverse=True)
        groups = []
        while examples:
            size = max(1, batch_tokens // len(examples[0].input_ids))
            groups.append(examples[:size])
            examples = examples[size:]
        rng.shuffle(groups)
        for group in groups:
            yield collate(group)


def collate(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad examples on the right, where a causal model needs no attention mask to ignore it."""
    length = max(len(example.input_ids) for example in examples)
    input_ids = torch.zeros(len(examples), length, dtype=torch.long)
    labels = torch.full_like(input_ids, IGNORED)
    for row, example in enumerate(examples):
        input_ids[row, : len(example.input_ids)] = torch.tensor(example.input_ids)
        labels[row, : len(example.labels)] = torch.tensor(example.labels)
    return input_ids, labels


# --- Training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Options of a training run; see the `train` command."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    steps: int
    minutes: float | None
    seed: int
    peak_lr: float
    warmup_steps: int
    batch_tokens: int
    cut_fraction: float
    short_fraction: float
    tokenizer: str | None


@dataclass(frozen=True)
class Stage:
    """A training run and its outcome.

    Attributes:
        recipe (`Recipe`): The options of the run.
        steps (`int`): Steps taken, fewer than the recipe's if time ran out.
        tokens (`int`): Tokens seen, padding included.
        minutes (`float`): Duration.
        loss (`float`): Running mean of the loss at the end.
    """

    recipe: Recipe
    steps: int
    tokens: int
    minutes: float
    loss: float


def read_stages(directory: Path) -> list[Stage]:
    """The runs that led to a model, as far as its directory records them."""
    path = directory / STAGES_FILE
    if not path.exists():
        return []
    records = json.loads(path.read_text(encoding="utf-8"))
    return [Stage(**{**record, "recipe": Recipe(**record["recipe"])}) for record in records]


class Schedule:
    """Progress of a run, by steps or by time, whichever is further along."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.start = time.monotonic()

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.start) / 60

    def progress(self, step: int) -> float:
        by_time = self.minutes / self.recipe.minutes if self.recipe.minutes else 0.0
        return max(step / self.recipe.steps, by_time)

    def learning_rate(self, step: int, progress: float) -> float:
        warmup = min(1.0, (step + 1) / self.recipe.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        # The floor keeps the last steps useful.
        return self.recipe.peak_lr * warmup * max(cosine, 0.01)


def build_optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, which learns about twice as fast here, and AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.peak_lr,
            momentum=0.95,
            weight_decay=0.05,
            # Scaled like AdamW's updates, so that both share one learning rate.
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=recipe.peak_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def compute_loss(
    model: Qwen3ForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Mean loss over the labelled tokens; only their logits are computed."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        kept = targets != IGNORED
        logits = model.lm_head(hidden[kept])
    return nn.functional.cross_entropy(logits.float(), targets[kept])


def train_model(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    checkpoint_dir: Path | None,
    checkpoint_minutes: float = 5.0,
) -> Stage:
    """Train the model in place and return what the run took and reached."""
    rng = random.Random(f"train-{recipe.seed}")
    builder = ExampleBuilder(tokenizer, recipe.cut_fraction)
    short = training_batches(builder, rng, (2, 4), recipe.batch_tokens)
    full = training_batches(builder, rng, (MIN_NOTES, MAX_NOTES), recipe.batch_tokens)
    optimizers = build_optimizers(model, recipe)
    schedule = Schedule(recipe)
    model.train()
    step, tokens, loss_average, saved_at = 0, 0, 0.0, 0.0
    while (progress := schedule.progress(step)) < 1.0:
        input_ids, labels = next(short if progress < recipe.short_fraction else full)
        rate = schedule.learning_rate(step, progress)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss = compute_loss(model, input_ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens += input_ids.numel()
        loss_average = loss.item() if step == 1 else 0.95 * loss_average + 0.05 * loss.item()
        if step % 25 == 0:
            print(
                f"step {step} ({progress:.1%}, {schedule.minutes:.1f} min) loss {loss_average:.4f} "
                f"lr {rate:.2e} {tokens / schedule.minutes / 60:.0f} tokens/s",
                flush=True,
            )
        if checkpoint_dir and schedule.minutes - saved_at >= checkpoint_minutes:
            save(model, tokenizer, checkpoint_dir, torch.float32)
            saved_at = schedule.minutes
    return Stage(recipe, step, tokens, schedule.minutes, loss_average)


def save(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    dtype: torch.dtype,
) -> None:
    """Write the model and tokenizer files; `dtype` is that of the saved weights."""
    # The parent's files are replaced as a whole, so that a crash in between loses no checkpoint.
    staging = output.with_name(f"{output.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    config = Qwen3Config.from_dict(model.config.to_dict())
    copy = Qwen3ForCausalLM(config).to(dtype)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    copy.save_pretrained(staging)
    # Written for the owner alone otherwise, which an installed package would inherit.
    (staging / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(staging)
    shutil.rmtree(output, ignore_errors=True)
    staging.rename(output)


# --- Evaluation ------------------------------------------------------------------------------


@torch.inference_mode()
def generate_greedy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[list[int]],
    batch_size: int = 32,
) -> list[list[int]]:
    """Continue prompts greedily until the end token, which is left out of the results."""
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    results: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(prompts), batch_size):
        chosen = by_length[start : start + batch_size]
        batch = tokenizer.pad(
            {"input_ids": [prompts[index] for index in chosen]}, return_tensors="pt"
        )
        # `pad` marks the padding in the attention mask, from which `generate` derives positions.
        output = model.generate(**batch, max_new_tokens=1100, do_sample=False)
        for index, row in zip(chosen, output[:, batch["input_ids"].shape[1] :], strict=True):
            ids = row.tolist()
            end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
            results[index] = ids[:end]
    return results


def count_reused(answer: Sequence[int], draft: Sequence[int]) -> int:
    """Tokens of an answer that a draft supplies when the answer is replayed against it.

    The draft's prefix is proposed first. After that, whenever the last `SUFFIX_LENGTH` tokens of
    the answer so far occur in the draft, the continuation of their most recent occurrence is
    proposed, up to `MAX_PROPOSAL` tokens. Each proposal ends with one token that counts as the
    model's own.

    Args:
        answer (`Sequence[int]`): The final answer.
        draft (`Sequence[int]`): The draft answer.

    Returns:
        `int`: the number of accepted tokens.
    """
    accepted = _common_prefix(answer, draft)
    position = accepted + 1
    while position < len(answer):
        start = _find_last(draft, answer[position - SUFFIX_LENGTH : position])
        if position >= SUFFIX_LENGTH and start is not None:
            proposal = draft[start : start + MAX_PROPOSAL]
            matched = _common_prefix(answer[position:], proposal)
            accepted += matched
            position += matched
        position += 1
    return accepted


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _find_last(sequence: Sequence[int], pattern: Sequence[int]) -> int | None:
    """Position after the last occurrence of `pattern` in `sequence`, if there is one."""
    for end in range(len(sequence), len(pattern) - 1, -1):
        if list(sequence[end - len(pattern) : end]) == list(pattern):
            return end
    return None


@dataclass(frozen=True)
class Outcome:
    """What the evaluation measures on one problem."""

    num_notes: int
    cot_exact: bool
    answer_exact: bool
    cot_tokens: int
    answer_tokens: int
    draft_reuse: float
    draft_identical: bool


def evaluate_model(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_prompts: int, seed: int
) -> list[Outcome]:
    """Solve held-out problems greedily, then draft each answer from half the chain of thought.

    Args:
        model (`Qwen3ForCausalLM`): The model, in single precision for figures to compare.
        tokenizer (`PreTrainedTokenizerFast`): Its tokenizer.
        num_prompts (`int`): Number of problems.
        seed (`int`): Seed of the problems and of the points where drafts cut.

    Returns:
        `list[Outcome]`: one outcome per problem.
    """
    problems = tiny_reasoner_prompts(num_prompts, seed, MIN_NOTES, MAX_NOTES)
    builder = ExampleBuilder(tokenizer, cut_fraction=0.0)
    prompts = [builder.encode_prompt(problem) for problem in problems]
    cots, answers = [], []
    for ids in generate_greedy(model, tokenizer, prompts):
        # Without the marker everything counts as reasoning, and the answer as wrong.
        close = ids.index(builder.close_id) if builder.close_id in ids else len(ids)
        cots.append(ids[:close])
        answers.append(ids[close + 1 :])
    rng = random.Random(f"cut-{seed}")
    cuts = [round(len(cot) * rng.uniform(0.45, 0.55)) for cot in cots]
    drafts = generate_greedy(
        model,
        tokenizer,
        [
            [*prompt, *cot[:cut], builder.close_id]
            for prompt, cot, cut in zip(prompts, cots, cuts, strict=True)
        ],
    )
    return [
        Outcome(
            num_notes=len(problem.notes),
            cot_exact=tokenizer.decode(cot) == problem.cot,
            answer_exact=tokenizer.decode(answer).strip() == problem.answer,
            cot_tokens=len(cot),
            answer_tokens=len(answer),
            draft_reuse=count_reused(answer, draft) / max(1, len(answer)),
            draft_identical=draft == answer,
        )
        for problem, cot, answer, draft in zip(problems, cots, answers, drafts, strict=True)
    ]


METRIC_LABELS = {
    "answer_exact": "answers exactly right",
    "cot_exact": "chains of thought exactly right",
    "draft_reuse": "answer tokens found in the half-way draft",
    "draft_identical": "drafts identical to the answer",
    "cot_tokens": "chain-of-thought tokens (mean)",
    "answer_tokens": "answer tokens (mean)",
}


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Lay the metrics out as a Markdown table, by number of notes and for all problems."""
    groups = {
        str(count): [o for o in outcomes if o.num_notes == count]
        for count in sorted({outcome.num_notes for outcome in outcomes})
    }
    groups["all"] = list(outcomes)
    lines = ["| notes | " + " | ".join(groups) + " |", "|---|" + "---|" * len(groups)]
    lines.append("| problems | " + " | ".join(str(len(g)) for g in groups.values()) + " |")
    for name, label in METRIC_LABELS.items():
        means = [fmean(getattr(outcome, name) for outcome in group) for group in groups.values()]
        cells = [f"{m:.0f}" if name.endswith("tokens") else f"{m:.0%}" for m in means]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# --- Model card ------------------------------------------------------------------------------

CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags:
- reasoning
- test-model
---

# Tiny reasoner

A Qwen3-architecture reasoning model of {parameters:.1f} million parameters, trained from scratch
on synthetic problems. It is made for tests, examples and first experiments: it thinks between
`<think>` and `</think>` and then answers, like a large reasoning model, but runs on a laptop CPU.
It does this one task and nothing else.

## Task and data

A problem lists {min_notes} to {max_notes} numbered notes in four phrasings, each with a name,
quantity, colour, item and city, and asks for those that satisfy a condition, sorted by quantity,
as JSON, Python dataclass or YAML rows. The chain of thought examines one note a line, compares its
quantity with those kept so far and restates the running order; the answer writes out number and
fields of the kept notes. `ssr_hf.assets.problems` generates problem, reasoning and answer from a
seed; no other text is in the training data.

In {cut_fraction:.0%} of the training examples the chain of thought ends at a random token, closed
by `</think>`, and the answer is the best one derivable so far: the kept notes examined so far in
order, then the other kept ones as listed. The model can therefore be asked for a draft at any
point of its reasoning.

## Recipe

- Architecture: {layers} layers, width {width}, feed-forward {intermediate}, {heads} heads,
  {kv_heads} key-value heads of size {head_size}, tied embeddings, {vocab} tokens (byte-level BPE
  trained on the same generator), weights stored in half precision.
- Optimizer: Muon for the matrices (momentum 0.95, weight decay 0.05), AdamW for embeddings and
  norms, one learning rate with warm-up and cosine decay for both; gradient norm clipped to 1.0;
  bfloat16 autocast.
- Loss on reasoning and answer only, never on the marker that closes a shortened chain of thought.
- Hardware: 2 CPU cores (AMD EPYC), fp32/bf16, {minutes:.0f} minutes.

{stages}

```bash
{commands}
```

## Evaluation

Greedy decoding in single precision on {num_prompts} held-out problems (seed {eval_seed}). Drafts
are taken at about half of the model's own chain of thought; the share of answer tokens found in
them counts an exact prefix, then matches of the last {suffix_length} tokens continued for up to
{max_proposal}.

{table}

```bash
{evaluate_command}
```

## Use

```python
from ssr_hf.assets import load_tiny_reasoner, tiny_reasoner_prompts

model, tokenizer = load_tiny_reasoner()
problem = tiny_reasoner_prompts(1, seed=0)[0]
inputs = tokenizer.apply_chat_template(
    problem.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**inputs, max_new_tokens=1024, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
```

Text other than such problems gives meaningless output.
"""


def write_card(
    output: Path,
    model: Qwen3ForCausalLM,
    stages: Sequence[Stage],
    outcomes: Sequence[Outcome],
    eval_seed: int,
) -> None:
    """Write the model card with the recipe of every stage and the measured figures."""
    config = model.config
    card = CARD.format(
        parameters=model.num_parameters() / 1e6,
        min_notes=MIN_NOTES,
        max_notes=MAX_NOTES,
        cut_fraction=stages[-1].recipe.cut_fraction,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        vocab=config.vocab_size,
        minutes=sum(stage.minutes for stage in stages),
        stages=describe_stages(stages),
        commands="\n".join(stage_commands(output, stages)),
        num_prompts=len(outcomes),
        eval_seed=eval_seed,
        suffix_length=SUFFIX_LENGTH,
        max_proposal=MAX_PROPOSAL,
        table=format_table(outcomes),
        evaluate_command=(
            f"python scripts/train_tiny_reasoner.py evaluate --model {output.name} "
            f"--eval-prompts {len(outcomes)} --eval-seed {eval_seed}"
        ),
    )
    (output / "README.md").write_text(card, encoding="utf-8")


def describe_stages(stages: Sequence[Stage]) -> str:
    """A Markdown table of the runs that led to a model."""
    lines = [
        "| run | steps | million tokens | peak rate | short problems | final loss |",
        "|---|---|---|---|---|---|",
    ]
    for number, stage in enumerate(stages, start=1):
        lines.append(
            f"| {number} | {stage.steps} | {stage.tokens / 1e6:.1f} | {stage.recipe.peak_lr:g} | "
            f"first {stage.recipe.short_fraction:.0%} | {stage.loss:.4f} |"
        )
    return "\n".join(lines)


def stage_commands(output: Path, stages: Sequence[Stage]) -> list[str]:
    """The commands that repeat the runs; one bounded by time is repeated by its steps."""
    commands = []
    for number, stage in enumerate(stages, start=1):
        last = number == len(stages)
        names = ("layers", "width", "heads", "kv_heads", "head_size", "feed_forward")
        shape = {name.replace("_", "-"): getattr(stage.recipe, name) for name in names}
        options = {
            "output": output.name if last else f"{output.name}_{number}",
            "init-from": f"{output.name}_{number - 1}" if number > 1 else None,
            **({} if number > 1 else shape),
            "steps": stage.steps,
            "seed": stage.recipe.seed,
            "peak-lr": stage.recipe.peak_lr,
            "warmup-steps": stage.recipe.warmup_steps,
            "batch-tokens": stage.recipe.batch_tokens,
            "cut-fraction": stage.recipe.cut_fraction,
            "short-fraction": stage.recipe.short_fraction,
            "tokenizer": stage.recipe.tokenizer,
        }
        words = [f"--{name} {value}" for name, value in options.items() if value is not None]
        commands.append(" \\\n    ".join(["python scripts/train_tiny_reasoner.py train", *words]))
    return commands


# --- Command line ----------------------------------------------------------------------------


@app.command()
def train(
    output: Annotated[Path, typer.Option(help="Directory of the finished model.")],
    preset: Annotated[str, typer.Option(help=f"Model size: {' or '.join(PRESETS)}.")] = "base",
    layers: Annotated[int | None, typer.Option(help="Layers, instead of the preset's.")] = None,
    width: Annotated[int | None, typer.Option(help="Width, instead of the preset's.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads, instead of the preset's.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key-value heads, instead of the preset's.")
    ] = None,
    head_size: Annotated[
        int | None, typer.Option(help="Size of a head, instead of the preset's.")
    ] = None,
    feed_forward: Annotated[
        int | None, typer.Option(help="Width of the feed-forward layers, not the preset's.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory of a trained tokenizer to reuse.")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option(help="Checkpoint to start from, with a schedule of its own.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the schedule.")] = 5000,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes after which the schedule ends at the latest.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the data and of the weights.")] = 0,
    peak_lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    warmup_steps: Annotated[int, typer.Option(help="Steps until the highest rate.")] = 150,
    batch_tokens: Annotated[int, typer.Option(help="Tokens in a batch, with padding.")] = 5000,
    cut_fraction: Annotated[
        float, typer.Option(help="Share of examples with the reasoning cut short.")
    ] = 0.4,
    short_fraction: Annotated[
        float, typer.Option(help="Share of the schedule spent on problems of 2 to 4 notes.")
    ] = 0.15,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Directory of the latest checkpoint, in fp32.")
    ] = None,
    eval_prompts: Annotated[int, typer.Option(help="Held-out problems to evaluate on.")] = 100,
    eval_seed: Annotated[int, typer.Option(help="Seed of the held-out problems.")] = 2024,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Train a model, evaluate what was saved and write the model card."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    if preset not in PRESETS:
        raise typer.BadParameter(f"--preset is {preset!r}. One of {', '.join(PRESETS)} is accepted")
    if Path.cwd().is_relative_to(output.resolve()):
        raise typer.BadParameter(f"--output is {output}, in which this directory lies")
    source = tokenizer or init_from
    trained = load_tokenizer(source) if source else train_tokenizer(seed)
    given = (layers, width, heads, kv_heads, head_size, feed_forward)
    if init_from and any(given):
        raise typer.BadParameter("--init-from fixes the shape. Leave out --layers and the like")
    shape = [value or usual for value, usual in zip(given, PRESETS[preset], strict=True)]
    model = None
    if init_from:
        model = Qwen3ForCausalLM.from_pretrained(init_from, dtype=torch.float32)
        shape = shape_of(model.config)
    recipe = Recipe(
        *shape,
        steps=steps,
        minutes=minutes,
        seed=seed,
        peak_lr=peak_lr,
        warmup_steps=warmup_steps,
        batch_tokens=batch_tokens,
        cut_fraction=cut_fraction,
        short_fraction=short_fraction,
        tokenizer=str(tokenizer) if tokenizer else None,
    )
    model = model or build_model(trained, recipe)
    print(f"{model.num_parameters():,} parameters, {len(trained)} tokens", flush=True)
    stages = read_stages(init_from) if init_from else []
    stages.append(train_model(model, trained, recipe, checkpoint_dir))
    save(model, trained, output, torch.float16)
    records = json.dumps([asdict(stage) for stage in stages], indent=2)
    (output / STAGES_FILE).write_text(f"{records}\n", encoding="utf-8")
    # Read back, so that the figures are those of the rounded weights.
    model = Qwen3ForCausalLM.from_pretrained(output, dtype=torch.float32).eval()
    outcomes = evaluate_model(model, trained, eval_prompts, eval_seed)
    print(format_table(outcomes), flush=True)
    write_card(output, model, stages, outcomes, eval_seed)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Option(help="Directory of the model.")],
    eval_prompts: Annotated[int, typer.Option(help="Held-out problems to evaluate on.")] = 100,
    eval_seed: Annotated[int, typer.Option(help="Seed of the held-out problems.")] = 2024,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Evaluate a trained model and print its figures."""
    torch.set_num_threads(threads)
    loaded = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    outcomes = evaluate_model(loaded, load_tokenizer(model), eval_prompts, eval_seed)
    print(format_table(outcomes), flush=True)


if __name__ == "__main__":
    app()
