"""Check on your own prompts that self-speculation changes nothing: plain against self-speculative.

    python scripts/check_lossless.py Qwen/Qwen3-0.6B --prompt "How many primes are below 60?"
    python scripts/check_lossless.py ./my-model --prompts prompts.jsonl --tokens 512 --json
    python scripts/check_lossless.py model.Q4_K_M.gguf --dtype bfloat16

Every prompt is generated greedily and sampled, by plain `generate` and with each of the `settings`,
from the same seed; lanes that the model cannot use are left out and named. A prompt of a file is a
line of text, or, in a `.jsonl` file, an object with `"prompt"` or `"messages"`.

Where two texts part, the script measures what rounding can explain. The token is selected once more
by plain `generate`, after a forward over one token and after one over the whole text: `margin` is
the lead of plain `generate`'s token over the other one, in logits (where tokens are sampled, after
the same random draw), `rounding` the largest difference between the two forwards, and at least the
last digit of a logit in the model's type. A margin of at most twice the rounding is a tie: the
token depends on how many tokens and rows a forward reads. In 32 bit ties are very rare.

Exit code 0: every text is the same, or parts at a tie (with `--strict`, only if the same). Exit
code 1: some text differs. Exit code 2: the model or the prompts cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import ssr_hf
from ssr_hf.cache.support import Unsupported
from ssr_hf.cli.console import EXIT_NEGATIVE, InputError, out_console, write_json
from ssr_hf.cli.loading import Session, open_session
from ssr_hf.cli.options import ModelOptions, PlacementOptions
from ssr_hf.cli.prompts import Messages, Request, built_in_prompts, make_request
from ssr_hf.cli.records import read_items
from ssr_hf.cli.spreading import spread
from ssr_hf.lanes import LANE_TYPES

Settings = dict[str, ssr_hf.SelfSpeculationConfig]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

N_BUILT_IN = 2
# Without top-k and top-p, at whose edge rounding removes a token at once.
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": None}
GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}


def settings(
    n_tokens: int, markers: ssr_hf.SelfSpeculationConfig, lanes: Iterable[str]
) -> Settings:
    """What is checked, by name; where thinking is capped, an answer is reached in any case.

    Args:
        n_tokens (`int`): Length of each generation.
        markers (`SelfSpeculationConfig`): The defaults, with the markers that were given.
        lanes (`Iterable[str]`): Those that the model can use.
    """
    early = max(1, n_tokens // 16)
    fixed = replace(
        markers, draft_budget=early, max_draft_tokens=max(2, n_tokens // 4), adaptive=False
    )
    capped = replace(fixed, thinking_budget=max(2, n_tokens // 4))
    return {
        "default": markers,
        "spans only": replace(fixed, reuse="suffix"),
        "capped, drafts repeated": replace(
            capped, draft_interval=early, max_draft_tokens=max(2, n_tokens // 8)
        ),
        **{f"capped, {lane} lane": replace(capped, lane=lane) for lane in lanes},
    }


def left_out_lanes(model: Any) -> dict[str, str]:
    """Lanes that the model cannot use, with the reason."""
    found = {name: lane.support(model) for name, lane in LANE_TYPES.items()}
    return {name: s.reason for name, s in found.items() if isinstance(s, Unsupported)}


@dataclass(frozen=True)
class Divergence:
    """Where two texts part.

    Args:
        position (`int`): New tokens that are the same.
        plain, speculative (`str`): The next token of each text, or that it has ended.
        margin (`float`, *optional*): Lead of the plain token, in logits; None where the other token
            is impossible or one text has ended.
        rounding (`float`, *optional*): What rounding can change, in logits.
    """

    position: int
    plain: str
    speculative: str
    margin: float | None = None
    rounding: float | None = None

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the difference."""
        if self.margin is None or self.rounding is None:
            return False
        return self.margin <= 2 * self.rounding


@dataclass(frozen=True)
class Result:
    """One prompt, one way to select tokens, one setting."""

    prompt: int
    selection: str
    setting: str
    n_tokens: int
    n_forwards: int
    divergence: Divergence | None
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """`"same"`, `"tie"` or `"different"`."""
        if self.divergence is None:
            return "same"
        return "tie" if self.divergence.is_tie else "different"


@dataclass(frozen=True)
class Checker:
    """Generates one request every way, from `seed`, with the arguments `selection`."""

    session: Session
    request: Request
    selection: dict[str, Any]
    seed: int

    def plain(self, config: ssr_hf.SelfSpeculationConfig, **arguments: Any) -> tuple[int, ...]:
        """The oracle: tokens of plain `generate` with the thinking budget of `config`."""
        torch.manual_seed(self.seed)
        output = self._generate(self.request.input_ids, **self._budget(config), **arguments)
        return self._new_tokens(output)

    def speculative(
        self, config: ssr_hf.SelfSpeculationConfig
    ) -> tuple[tuple[int, ...], ssr_hf.SpeculationStats]:
        """The tokens with self-speculation, and what it did."""
        torch.manual_seed(self.seed)
        output = self._generate(
            self.request.input_ids, self_speculation=config, tokenizer=self.session.tokenizer
        )
        return self._new_tokens(output), output.speculation

    def compare(
        self,
        plain_ids: tuple[int, ...],
        speculative_ids: tuple[int, ...],
        config: ssr_hf.SelfSpeculationConfig,
    ) -> Divergence | None:
        """Where the texts part, and by how much; None where they are the same."""
        if plain_ids == speculative_ids:
            return None
        pairs = enumerate(zip(plain_ids, speculative_ids, strict=False))
        shortest = min(len(plain_ids), len(speculative_ids))
        at = next((i for i, (one, other) in pairs if one != other), shortest)
        ours, theirs = plain_ids[at : at + 1], speculative_ids[at : at + 1]
        found = Divergence(at, self._show(ours), self._show(theirs))
        if not (ours and theirs):
            return found
        margin, rounding = self._measure(plain_ids[:at], ours[0], theirs[0], config)
        return replace(found, margin=margin, rounding=rounding)

    def _measure(
        self,
        written: tuple[int, ...],
        token_id: int,
        other_id: int,
        config: ssr_hf.SelfSpeculationConfig,
    ) -> tuple[float | None, float]:
        """Margin and rounding of the token after `written`, selected once more in two ways."""
        prompt = self.request.input_ids
        text = torch.cat([prompt, prompt.new_tensor([written])], dim=1)
        with torch.no_grad():
            cache = self.session.model(text[:, :-1], use_cache=True).cache
        narrow = self._scores(text, config, cache=cache)
        wide = self._scores(text, config)
        last_digit = torch.finfo(self.session.model.dtype).eps * narrow[[token_id, other_id]].abs()
        difference = (narrow - wide)[narrow.isfinite() & wide.isfinite()].abs().max()
        rounding = torch.maximum(difference, last_digit[last_digit.isfinite()].max())
        if self.selection["do_sample"]:
            torch.manual_seed(self.seed)
            if written:
                self.plain(config, max_new_tokens=len(written))
            # The next draw of `torch.multinomial`: the largest probability over noise wins.
            narrow = narrow.log_softmax(dim=-1) - torch.empty_like(narrow).exponential_().log()
        margin = (narrow[token_id] - narrow[other_id]).item()
        return margin if 0 <= margin < float("inf") else None, rounding.item()

    def _show(self, ids: tuple[int, ...]) -> str:
        return f"{ids[0]} {self.session.tokenizer.decode(list(ids))!r}" if ids else "the end"

    def _scores(
        self, text: torch.Tensor, config: ssr_hf.SelfSpeculationConfig, **cache: Any
    ) -> torch.Tensor:
        """Processed scores `[V]` of the token after `text`."""
        arguments = {**self._budget(config), "max_new_tokens": 1, "output_scores": True}
        return self._generate(text, **arguments, **cache).scores[0][0].float()

    def _budget(self, config: ssr_hf.SelfSpeculationConfig) -> dict[str, Any]:
        if config.thinking_budget is None:
            return {}
        arguments = self.session.markers, config.thinking_budget, self.request.input_ids.shape[1]
        return {"logits_processor": [ssr_hf.ThinkingBudgetLogitsProcessor(*arguments)]}

    def _generate(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        return self.session.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            return_dict_in_generate=True,
            **{"max_new_tokens": self.request.max_new_tokens, **self.selection, **arguments},
        )

    def _new_tokens(self, output: Any) -> tuple[int, ...]:
        return tuple(output.sequences[0, self.request.input_ids.shape[1] :].tolist())


def check(
    session: Session, requests: list[Request], configs: Settings, seed: int
) -> Iterator[Result]:
    """Checks every prompt with every selection and setting."""
    for number, request in enumerate(requests):
        for selection, arguments in (("greedy", GREEDY), ("sampled", SAMPLED)):
            checker = Checker(session, request, arguments, seed)
            plain: dict[int | None, tuple[int, ...]] = {}
            for name, config in configs.items():
                budget = config.thinking_budget
                if budget not in plain:
                    plain[budget] = checker.plain(config)
                token_ids, stats = checker.speculative(config)
                found = checker.compare(plain[budget], token_ids, config)
                counts = len(token_ids), stats.forwards
                yield Result(number, selection, name, *counts, found, stats.notes)


def read_prompts(prompts: list[str] | None, file: Path | None) -> list[str | Messages]:
    """The prompts of the command line: given ones and those of a file, or built-in ones."""
    asked: list[str | Messages] = list(prompts or [])
    if file is not None and file.suffix == ".jsonl":
        items, bad = read_items(file)
        if bad:
            raise InputError(f"Line {bad[0].line} of {file} cannot be used: {bad[0].reason}.")
        asked += [item.asked for item in items]
    elif file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--prompts {file} cannot be read: {error}") from error
        asked += [line for line in lines if line.strip()]
    if not asked and file is not None:
        raise InputError(f"--prompts {file} holds no prompt. One line of text each is accepted.")
    return asked or list(built_in_prompts(N_BUILT_IN, seed=0))


def _line(result: Result) -> str:
    """One result for people."""
    name = f"prompt {result.prompt}, {result.selection}, {result.setting}"
    text = f"{name:<48} {result.verdict:<9} {result.n_tokens} tokens, {result.n_forwards} forwards"
    found = result.divergence
    if found is not None:
        text += f"; token {found.position} is {found.speculative} instead of {found.plain}"
        if found.margin is not None:
            text += f" (margin {found.margin:.2g}, rounding {found.rounding:.2g})"
    return "; ".join([text, *result.notes])


@app.command()
@spread
def main(
    placement: PlacementOptions,
    model: Annotated[str, typer.Argument(help="Hub id, local directory or GGUF file.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; may be given several times.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt per line, or .jsonl.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=16, help="Length of each generation.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Use no chat template.")] = False,
    end_of_thinking: Annotated[str | None, typer.Option(help="Marker, where not found.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A tie is a failure, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Compare plain and self-speculative generation on your own prompts."""
    markers = ssr_hf.SelfSpeculationConfig(end_of_thinking=end_of_thinking)
    session = open_session(ModelOptions(model=model, **asdict(placement)), markers)
    requests = [
        make_request(session, asked, raw, tokens) for asked in read_prompts(prompt, prompts)
    ]
    left_out = left_out_lanes(session.model)
    if not as_json:
        for lane, reason in left_out.items():
            out_console().print(f"lane {lane} is left out: {reason}", soft_wrap=True)
    configs = settings(tokens, markers, [lane for lane in LANE_TYPES if lane not in left_out])
    found = []
    for result in check(session, requests, configs, seed):
        found.append(result)
        if not as_json:
            out_console().print(_line(result), soft_wrap=True)
    accepted = {"same"} if strict else {"same", "tie"}
    passed = all(result.verdict in accepted for result in found)
    if as_json:
        listed = [{**asdict(result), "verdict": result.verdict} for result in found]
        report = {"lossless": passed, "left_out": left_out, "results": listed}
        write_json({**session.facts(), **report})
    else:
        out_console().print(session.describe(), "lossless" if passed else "NOT lossless", sep="\n")
    if not passed:
        raise typer.Exit(EXIT_NEGATIVE)


if __name__ == "__main__":
    app()
