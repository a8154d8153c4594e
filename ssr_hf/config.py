"""The settings of self-speculation: one frozen, keyword-only object, validated when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, message

REUSE_MODES = ("prefix+suffix", "prefix", "suffix", "none")
LANES = ("auto", "lockstep", "stream", "sequential")
SUFFIX_SOURCES = ("draft", "prompt", "thinking", "answer", "history")
DEFAULT_DRAFT_BUDGET = 128
ACCEPTANCE_RULES = ("exact_match", "rejection_sampling")

Marker = str | Sequence[int] | None


def _require(condition: bool, what: str, accepted: str, next_step: str) -> None:
    if not condition:
        raise ConfigError(message(what, accepted, next_step))


def _require_int(name: str, value: object, *, minimum: int, hint: str) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    accepted = f"An integer of at least {minimum} is accepted"
    _require(valid, f"{name} is {value!r}", accepted, hint)


def _require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value in choices:
        return
    nearest = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"Did you mean {name}={nearest[0]!r}?" if nearest else f"Set {name}={choices[0]!r}"
    accepted = f"One of {', '.join(map(repr, choices))} is accepted"
    raise ConfigError(message(f"{name} is {value!r}", accepted, hint))


def _require_known_keys(cls: type, values: Mapping[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key in known:
            continue
        nearest = difflib.get_close_matches(str(key), known, n=1)
        hint = f"Did you mean {nearest[0]!r}?" if nearest else "Remove it"
        accepted = f"Known settings are {', '.join(known)}"
        raise ConfigError(message(f"{cls.__name__} has no setting {key!r}", accepted, hint))


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    """How spans are proposed from text that was seen before (SuffixDecoding, arXiv 2411.04975).

    Args:
        max_match (`int`, *optional*, defaults to 16):
            Longest context suffix, in tokens, that is matched.
        max_tokens (`int`, *optional*, defaults to 64):
            Most tokens proposed in one round.
        factor (`float`, *optional*, defaults to 8.0):
            A match of `n` tokens proposes at most `factor * n` tokens.
        min_probability (`float`, *optional*, defaults to 0.05):
            A span ends where the estimated probability that all of it is right falls below this.
        sources (`tuple[str, ...]`, *optional*, defaults to all):
            Where spans come from, out of `"draft"`, `"prompt"`, `"thinking"`, `"answer"` and
            `"history"` (what an enabled model wrote in its last calls). With `"prompt"`,
            `"thinking"` or `"history"` among them, spans are proposed while the model thinks, too.

    Raises:
        `ConfigError`: A value is out of range; the message names it.

    Example:

    ```python
    >>> from ssr_hf import SuffixConfig
    >>> SuffixConfig(max_match=4, max_tokens=16, factor=4.0, sources=("draft",)).max_match
    4

    ```
    """

    max_match: int = 16
    max_tokens: int = 64
    factor: float = 8.0
    min_probability: float = 0.05
    sources: tuple[str, ...] = SUFFIX_SOURCES

    def __post_init__(self) -> None:
        _require_int("suffix.max_match", self.max_match, minimum=1, hint="Set suffix.max_match=16")
        hint = "Set suffix.max_tokens=64"
        _require_int("suffix.max_tokens", self.max_tokens, minimum=1, hint=hint)
        number = isinstance(self.factor, (int, float)) and not isinstance(self.factor, bool)
        _require(
            number and self.factor > 0,
            f"suffix.factor is {self.factor!r}",
            "A number above 0 is accepted",
            "Set suffix.factor=8.0",
        )
        number = isinstance(self.min_probability, (int, float))
        number = number and not isinstance(self.min_probability, bool)
        _require(
            number and 0.0 <= self.min_probability <= 1.0,
            f"suffix.min_probability is {self.min_probability!r}",
            "A number from 0 to 1 is accepted",
            "Set suffix.min_probability=0.05",
        )
        if isinstance(self.sources, str):
            object.__setattr__(self, "sources", (self.sources,))
        _require(
            isinstance(self.sources, Sequence),
            f"suffix.sources is {self.sources!r}",
            f"Some of {', '.join(map(repr, SUFFIX_SOURCES))} are accepted",
            "Leave it out to use all of them",
        )
        object.__setattr__(self, "sources", tuple(self.sources))
        _require(
            len(self.sources) > 0,
            "suffix.sources is empty",
            f"At least one of {', '.join(map(repr, SUFFIX_SOURCES))} is accepted",
            'To propose no spans at all, set reuse="prefix"',
        )
        for source in self.sources:
            _require_choice("suffix.sources", source, SUFFIX_SOURCES)

    @property
    def speculates_while_thinking(self) -> bool:
        """Whether spans are proposed inside the chain of thought."""
        return not {"prompt", "thinking", "history"}.isdisjoint(self.sources)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfSpeculationConfig:
    """Settings of one self-speculative generation (SSR).

    Args:
        end_of_thinking (`str` or `Sequence[int]`, *optional*):
            The marker that ends thinking, as text or token ids. Found from the tokenizer when None.
        start_of_thinking (`str` or `Sequence[int]`, *optional*):
            The marker that starts thinking. Found from the tokenizer when None.
        draft_budget (`int` or `Sequence[int]`, *optional*):
            Thinking tokens after which an answer is drafted; several increasing budgets draft
            several times. When None, 128, or half of a `thinking_budget` below 256, or earlier
            where past calls left too little thinking after it for a whole draft.
        draft_interval (`int`, *optional*):
            After the last budget, draft again every so many thinking tokens.
        max_draft_tokens (`int`, *optional*, defaults to 500):
            Longest draft, in tokens.
        thinking_budget (`int`, *optional*):
            Thinking tokens after which the end-of-thinking marker is forced. None never forces it.
        reuse (`str`, *optional*, defaults to `"prefix+suffix"`):
            What is done with a draft: its prefix is verified at the start of the answer
            (`"prefix"`), it serves as a source of spans (`"suffix"`), both, or nothing (`"none"`:
            no drafts, no spans, plain decoding).
        lane (`str`, *optional*, defaults to `"auto"`):
            How drafts run: `"lockstep"` (a second row of the same forward), `"stream"` (a second
            CUDA stream and thread), `"sequential"` (in the foreground) or `"auto"`.
        suffix (`SuffixConfig`, *optional*):
            How spans are proposed.
        acceptance (`str`, *optional*, defaults to `"exact_match"`):
            `"exact_match"` gives the text of plain `generate` for the same seed;
            `"rejection_sampling"` gives the same distribution (arXiv 2211.17192), not that text.
        adaptive (`bool`, *optional*, defaults to `True`):
            Whether the number of candidates, and whether, where and in which lane to draft, follow
            what was measured, and spans may come from the history. `False` makes every choice a
            function of the settings and the tokens alone.

    Raises:
        `ConfigError`: A value is out of range or contradicts another; the message names it.

    Example:

    ```python
    >>> from ssr_hf import SelfSpeculationConfig
    >>> SelfSpeculationConfig(draft_budget=500, max_draft_tokens=500).drafts
    True

    ```
    """

    end_of_thinking: Marker = None
    start_of_thinking: Marker = None
    draft_budget: int | tuple[int, ...] | None = None
    draft_interval: int | None = None
    max_draft_tokens: int = 500
    thinking_budget: int | None = None
    reuse: str = "prefix+suffix"
    lane: str = "auto"
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    acceptance: str = "exact_match"
    adaptive: bool = True

    def __post_init__(self) -> None:
        self._normalise()
        for budget in self.draft_budgets:
            _require_int("draft_budget", budget, minimum=1, hint="Set draft_budget=128")
        _require(
            len(self.draft_budgets) > 0
            and list(self.draft_budgets) == sorted(set(self.draft_budgets)),
            f"draft_budget is {self.draft_budget!r}",
            "One integer or strictly increasing integers are accepted",
            "Set draft_budget=(128, 256)",
        )
        if self.draft_interval is not None:
            _require_int("draft_interval", self.draft_interval, minimum=1, hint="Set it to None")
        _require_int("max_draft_tokens", self.max_draft_tokens, minimum=2, hint="Set it to 500")
        if self.thinking_budget is not None:
            _require_int("thinking_budget", self.thinking_budget, minimum=0, hint="Set it to None")
        _require_choice("reuse", self.reuse, REUSE_MODES)
        _require_choice("lane", self.lane, LANES)
        _require_choice("acceptance", self.acceptance, ACCEPTANCE_RULES)
        _require(
            isinstance(self.adaptive, bool),
            f"adaptive is {self.adaptive!r}",
            "True or False is accepted",
            "Set adaptive=True",
        )
        self._check_budgets_agree()
        _require(
            self.acceptance == "exact_match" or self.verifies_prefix or self.reuse == "none",
            f"acceptance is {self.acceptance!r} and reuse is {self.reuse!r}",
            "Rejection sampling judges whole drafts, which 'prefix' and 'prefix+suffix' verify",
            'Set reuse="prefix+suffix"',
        )

    def _normalise(self) -> None:
        if isinstance(self.suffix, Mapping):
            _require_known_keys(SuffixConfig, self.suffix)
            object.__setattr__(self, "suffix", SuffixConfig(**self.suffix))
        _require(
            isinstance(self.suffix, SuffixConfig),
            f"suffix is {self.suffix!r}",
            "A SuffixConfig or a dict of its settings is accepted",
            "Leave it out to use the default",
        )
        if isinstance(self.draft_budget, (list, tuple)):
            object.__setattr__(self, "draft_budget", tuple(self.draft_budget))
        for name in ("end_of_thinking", "start_of_thinking"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                _require(
                    isinstance(value, Sequence) and len(value) > 0,
                    f"{name} is {value!r}",
                    "Text or a non-empty list of token ids is accepted",
                    f"Set {name}=None to find it from the tokenizer",
                )
                object.__setattr__(self, name, tuple(value))
            _require(
                value != "",
                f"{name} is empty",
                "Text or a non-empty list of token ids is accepted",
                f"Set {name}=None to find it from the tokenizer",
            )

    def _check_budgets_agree(self) -> None:
        if self.thinking_budget is None or self.draft_budget is None or not self.drafts:
            return
        _require(
            self.draft_budgets[-1] < self.thinking_budget,
            f"draft_budget is {self.draft_budget} and thinking_budget is {self.thinking_budget}",
            "Drafts have to branch before thinking is ended",
            f"Set draft_budget below {self.thinking_budget}, or leave it out",
        )

    @property
    def draft_budgets(self) -> tuple[int, ...]:
        """The branch points that `draft_budget` names, in thinking tokens."""
        if isinstance(self.draft_budget, tuple):
            return self.draft_budget
        if self.draft_budget is not None:
            return (self.draft_budget,)
        if self.thinking_budget is None:
            return (DEFAULT_DRAFT_BUDGET,)
        return (max(1, min(DEFAULT_DRAFT_BUDGET, self.thinking_budget // 2)),)

    @property
    def drafts(self) -> bool:
        """Whether answers are drafted at all."""
        return self.reuse != "none" and (self.verifies_prefix or "draft" in self.suffix.sources)

    @property
    def verifies_prefix(self) -> bool:
        """Whether a draft is verified as a whole at the start of the answer."""
        return self.reuse in ("prefix+suffix", "prefix")

    @property
    def proposes_spans(self) -> bool:
        """Whether the suffix index proposes spans."""
        return self.reuse in ("prefix+suffix", "suffix")

    @classmethod
    def reference(cls) -> SelfSpeculationConfig:
        """The published setting of SSR.

        Draft after 500 thinking tokens, drafts of 500 tokens, thinking capped at 2000; spans of up
        to 16 tokens from the draft only, matched at depth 4, factor 4.

        Returns:
            `SelfSpeculationConfig`: The setting.
        """
        suffix = SuffixConfig(
            max_match=4, max_tokens=16, factor=4.0, min_probability=0.0, sources=("draft",)
        )
        return cls(
            draft_budget=500,
            max_draft_tokens=500,
            thinking_budget=2000,
            suffix=suffix,
            adaptive=False,
        )

    @classmethod
    def coerce(cls, value: object) -> SelfSpeculationConfig | None:
        """Makes a config of what `generate(self_speculation=...)` was given.

        Args:
            value (`bool`, `dict`, `SelfSpeculationConfig` or `None`): What the user passed.

        Returns:
            `SelfSpeculationConfig` or `None`: The config; None where it is absent or `False`.

        Raises:
            `ConfigError`: The type is another one, or the dict has an unknown setting.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            _require_known_keys(cls, value)
            return cls(**value)
        raise ConfigError(
            message(
                f"self_speculation is {value!r}",
                "True, False, a dict of settings or a SelfSpeculationConfig is accepted",
                "Pass self_speculation=True for the defaults",
            )
        )

    def without_history(self) -> SelfSpeculationConfig:
        """The settings without spans of earlier calls.

        For measuring, where a prompt that is run again would be replayed, and for people who share
        a model and must not learn from the time of an answer what others asked.

        Returns:
            `SelfSpeculationConfig`: The same with `"history"` left out of `suffix.sources`, and
            without spans if that was the only source.

        Example:

        ```python
        >>> from ssr_hf import SelfSpeculationConfig
        >>> SelfSpeculationConfig().without_history().suffix.sources
        ('draft', 'prompt', 'thinking', 'answer')

        ```
        """
        sources = tuple(source for source in self.suffix.sources if source != "history")
        if not sources:
            return dataclasses.replace(self, reuse="prefix" if self.verifies_prefix else "none")
        return dataclasses.replace(self, suffix=dataclasses.replace(self.suffix, sources=sources))

    def to_json(self) -> str:
        """The settings as a JSON object; `from_json` gives an equal config back."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> SelfSpeculationConfig:
        """Reads what `to_json` wrote.

        Args:
            text (`str`): A JSON object of settings.

        Returns:
            `SelfSpeculationConfig`: The config.

        Raises:
            `ConfigError`: The text is no JSON object, or a setting is unknown or out of range.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            accepted = "A JSON object of settings is accepted"
            raise ConfigError(
                message(f"The text is not JSON ({error})", accepted, "Use to_json() to write it")
            ) from error
        if not isinstance(values, dict):
            accepted = "A JSON object of settings is accepted"
            raise ConfigError(message(f"The JSON is {text!r}", accepted, "Use to_json()"))
        config = cls.coerce(values)
        assert config is not None, "a dict is always coerced to a config"
        return config
