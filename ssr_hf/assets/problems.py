"""Problems of the tiny reasoning model: messy notes to filter, sort and write out as rows.

A problem lists a few numbered notes and asks for those that satisfy a condition, sorted by
quantity, as JSON, Python dataclass or YAML rows. Its chain of thought examines one note a line and
keeps a running order, so a chain of thought that is cut short still implies most of the answer.
That is what drafts taken from a partial chain of thought rely on.

The generator is plain Python and depends on its seed alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NAMES = (
    "Sara", "Omar", "Lena", "Hugo", "Mina", "Ivan", "Nora", "Paul", "Rita", "Tomas", "Uma",
    "Viktor", "Wendy", "Xavier", "Yara", "Zane", "Alice", "Bruno", "Clara", "David", "Elena",
    "Felix", "Greta", "Henry", "Irene", "Jonas", "Karin", "Leo", "Maya", "Nils", "Olga", "Peter",
)  # fmt: skip
COLOURS = (
    "purple", "red", "blue", "green", "yellow", "orange", "black", "white", "grey", "brown",
    "pink", "silver",
)  # fmt: skip
ITEMS = (
    "wagons", "lamps", "chairs", "boats", "kites", "books", "drums", "clocks", "bells", "ropes",
    "tents", "bikes", "cups", "plates", "rugs", "pens", "coins", "boxes", "masks", "vases",
    "spoons", "ladders", "shirts", "hats",
)  # fmt: skip
CITIES = (
    "Kyoto", "Oslo", "Lima", "Cairo", "Paris", "Quito", "Delhi", "Rome", "Berlin", "Madrid",
    "Dublin", "Athens", "Lagos", "Havana", "Seoul", "Hanoi", "Vienna", "Prague", "Tunis",
    "Warsaw", "Boston", "Sydney", "Geneva", "Porto",
)  # fmt: skip

OUTPUT_FORMATS = ("JSON", "dataclass", "YAML")
DIRECTIONS = ("highest", "lowest")

# Every quantity and threshold has two digits, so each is one token and none looks like a note
# number.
_MIN_QUANTITY, _MAX_QUANTITY = 10, 99
_MAX_NOTES = 9


@dataclass(frozen=True)
class Note:
    """One note of a problem.

    Attributes:
        number (`int`): Its place in the list, from 1.
        name (`str`): Who the note is about.
        quantity (`int`): How many items they have, 10 to 99, unique within a problem.
        colour (`str`): Colour of the items.
        item (`str`): The items, in the plural.
        city (`str`): Where the person lives.
    """

    number: int
    name: str
    quantity: int
    colour: str
    item: str
    city: str


@dataclass(frozen=True)
class Condition:
    """What a note has to satisfy to be kept.

    Attributes:
        attribute (`str`): Field of the note it looks at.
        relation (`str`): `"over"` or `"under"` for the quantity, `"not"` for the other fields.
        value (`int` or `str`): What the field is compared with.
    """

    attribute: str
    relation: str
    value: int | str

    def holds(self, note: Note) -> bool:
        """Whether `note` is kept."""
        if self.relation == "not":
            return bool(getattr(note, self.attribute) != self.value)
        bound = int(self.value)
        return note.quantity > bound if self.relation == "over" else note.quantity < bound

    def describe(self) -> str:
        """The condition as the user words it."""
        if self.relation == "not":
            return f"any {self.attribute} but {self.value}"
        return f"a quantity {self.relation} {self.value}"


@dataclass(frozen=True)
class TinyReasonerProblem:
    """A problem with its reference chain of thought and answer.

    Attributes:
        notes (`tuple[Note, ...]`): The notes in the order in which the user lists them.
        condition (`Condition`): Which notes to keep.
        direction (`str`): `"highest"` or `"lowest"`: the quantity that comes first.
        output_format (`str`): `"JSON"`, `"dataclass"` or `"YAML"`.
        prompt (`str`): The user's text, without any chat markup.
        cot_lines (`tuple[str, ...]`):
            The reference chain of thought: a plan, one line per note and a closing line.
        answer (`str`): The reference answer.
    """

    notes: tuple[Note, ...]
    condition: Condition
    direction: str
    output_format: str
    prompt: str
    cot_lines: tuple[str, ...] = field(repr=False)
    answer: str = field(repr=False)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation to give to `apply_chat_template`."""
        return [{"role": "user", "content": self.prompt}]

    @property
    def cot(self) -> str:
        """The reference chain of thought, as it stands between `<think>\\n` and `</think>`."""
        return "".join(f"{line}\n" for line in self.cot_lines)

    @property
    def completion(self) -> str:
        """What the model is expected to write after the generation prompt, bar the end token."""
        return f"{self.cot}</think>\n{self.answer}"

    def draft_answer(self, num_lines: int) -> str:
        """The best answer that the first `num_lines` complete lines of reasoning allow.

        The kept notes examined so far are in order; those still to be examined follow as the user
        listed them, because placing them is the work that the missing lines would have done.

        Args:
            num_lines (`int`): Complete lines of the chain of thought, the plan included.

        Returns:
            `str`: An answer in the problem's format.
        """
        examined = min(max(num_lines - 1, 0), len(self.notes))
        done = _select(self.notes[:examined], self.condition, self.direction)
        rest = [note for note in self.notes[examined:] if self.condition.holds(note)]
        return render_rows([*done, *rest], self.output_format)


def tiny_reasoner_prompts(
    n: int, seed: int, min_notes: int = 5, max_notes: int = 8
) -> list[TinyReasonerProblem]:
    """Generate problems that the tiny reasoning model is trained for.

    Args:
        n (`int`): Number of problems.
        seed (`int`):
            Seed of the generator. The same arguments give the same problems on every platform,
            and a longer list starts with the shorter one. Training draws from seeds written as
            text, so that no integer seed repeats its problems.
        min_notes (`int`, *optional*, defaults to 5): Fewest notes in a problem.
        max_notes (`int`, *optional*, defaults to 8):
            Most notes in a problem.

    Returns:
        `list[TinyReasonerProblem]`: the problems.

    Example:

    ```python
    >>> from ssr_hf import tiny_reasoner_prompts
    >>> problem = tiny_reasoner_prompts(1, seed=0)[0]
    >>> len(problem.notes) >= 5, problem.output_format in ("JSON", "dataclass", "YAML")
    (True, True)

    ```
    """
    rng = random.Random(seed)
    return [generate_problem(rng, rng.randint(min_notes, max_notes)) for _ in range(n)]


def generate_problem(rng: random.Random, num_notes: int) -> TinyReasonerProblem:
    """Draw one problem.

    Args:
        rng (`random.Random`): Source of all the choices.
        num_notes (`int`): Number of notes, 2 to 9 (a note number stays one digit).

    Returns:
        `TinyReasonerProblem`: the problem. At least one note is kept.
    """
    if not 2 <= num_notes <= _MAX_NOTES:
        raise ValueError(f"num_notes must be between 2 and {_MAX_NOTES}, got {num_notes}.")
    notes = _draw_notes(rng, num_notes)
    condition = _draw_condition(rng, notes)
    direction = rng.choice(DIRECTIONS)
    output_format = rng.choice(OUTPUT_FORMATS)
    kept = _select(notes, condition, direction)
    return TinyReasonerProblem(
        notes=notes,
        condition=condition,
        direction=direction,
        output_format=output_format,
        prompt=_render_prompt(rng, notes, condition, direction, output_format),
        cot_lines=tuple(_reason(notes, condition, direction, output_format)),
        answer=render_rows(kept, output_format),
    )


def render_rows(notes: Sequence[Note], output_format: str) -> str:
    """Write notes out as rows.

    Args:
        notes (`Sequence[Note]`): The rows, in order; at least one.
        output_format (`str`): `"JSON"`, `"dataclass"` or `"YAML"`.

    Returns:
        `str`: the rows, without a final line break.
    """
    rows = [
        {
            "note": note.number,
            "name": note.name,
            "quantity": note.quantity,
            "colour": note.colour,
            "item": note.item,
            "city": note.city,
        }
        for note in notes
    ]
    if output_format == "JSON":
        return json.dumps(rows, indent=2)
    if output_format == "dataclass":
        fields = "".join(f"    {key}: {type(rows[0][key]).__name__}\n" for key in rows[0])
        calls = (
            ", ".join(f"{key}={json.dumps(value)}" for key, value in row.items()) for row in rows
        )
        listing = "".join(f"    Row({call}),\n" for call in calls)
        return f"@dataclass\nclass Row:\n{fields}\nrows = [\n{listing}]"
    if output_format == "YAML":
        blocks = ("\n  ".join(f"{key}: {value}" for key, value in row.items()) for row in rows)
        return "\n".join(f"- {block}" for block in blocks)
    raise ValueError(f"output_format must be one of {OUTPUT_FORMATS}, got {output_format!r}.")


def _select(notes: Sequence[Note], condition: Condition, direction: str) -> list[Note]:
    kept = [note for note in notes if condition.holds(note)]
    return sorted(kept, key=lambda note: note.quantity, reverse=direction == "highest")


def _draw_notes(rng: random.Random, num_notes: int) -> tuple[Note, ...]:
    names = rng.sample(NAMES, num_notes)
    quantities = rng.sample(range(_MIN_QUANTITY, _MAX_QUANTITY + 1), num_notes)
    # A palette as large as the problem repeats some values, so a condition on one of them drops
    # more than one note at times, yet leaves most of the notes.
    palettes = [rng.sample(pool, num_notes) for pool in (COLOURS, ITEMS, CITIES)]
    return tuple(
        Note(number, name, quantity, *(rng.choice(palette) for palette in palettes))
        for number, (name, quantity) in enumerate(zip(names, quantities, strict=True), start=1)
    )


def _draw_condition(rng: random.Random, notes: Sequence[Note]) -> Condition:
    attribute = rng.choice(("quantity", "quantity", "colour", "item", "city"))
    if attribute != "quantity":
        value = getattr(rng.choice(notes), attribute)
        condition = Condition(attribute, "not", value)
        if any(condition.holds(note) for note in notes):
            return condition
        # Every note shares that value; a condition on the quantity always keeps one.
    # Dropping at most about 40 % of the notes keeps answers long enough to be worth a draft.
    dropped = rng.randint(0, max(1, 2 * len(notes) // 5))
    quantities = sorted(note.quantity for note in notes)
    if rng.random() < 0.5:
        low = quantities[dropped - 1] if dropped else _MIN_QUANTITY - 1
        return Condition("quantity", "over", rng.randint(low, quantities[dropped] - 1))
    high = quantities[-dropped] if dropped else _MAX_QUANTITY + 1
    return Condition("quantity", "under", rng.randint(quantities[-dropped - 1] + 1, high))


_NOTE_PHRASINGS: tuple[Callable[[Note], str], ...] = (
    lambda n: f"In {n.city}, {n.name} has {n.quantity} {n.item} ({n.colour}).",
    lambda n: f"{n.name} from {n.city}: {n.quantity} {n.colour} {n.item}.",
    lambda n: f"{n.quantity} {n.colour} {n.item} belong to {n.name}, who lives in {n.city}.",
    lambda n: f"{n.item}, {n.colour} - {n.quantity} of them, says {n.name} ({n.city}).",
)

_INSTRUCTION_PHRASINGS: tuple[Callable[[str, str, str], str], ...] = (
    lambda what, first, form: (
        f"Keep the notes with {what}, sort them by quantity, {first} first, and answer as {form}."
    ),
    lambda what, first, form: (
        f"Which notes have {what}? Give them as {form}, with the {first} quantity first."
    ),
    lambda what, first, form: (
        f"I need {form} for every note with {what}, starting from the {first} quantity."
    ),
)

_FORMAT_NAMES = {"JSON": "JSON rows", "dataclass": "Python dataclass rows", "YAML": "YAML"}


def _render_prompt(
    rng: random.Random,
    notes: Sequence[Note],
    condition: Condition,
    direction: str,
    output_format: str,
) -> str:
    lines = [f"{note.number}. {rng.choice(_NOTE_PHRASINGS)(note)}" for note in notes]
    instruct = rng.choice(_INSTRUCTION_PHRASINGS)
    lines.append(instruct(condition.describe(), direction, _FORMAT_NAMES[output_format]))
    return "\n".join(lines)


def _reason(
    notes: Sequence[Note], condition: Condition, direction: str, output_format: str
) -> list[str]:
    sign = _SIGNS[condition.relation]
    lines = [
        f"Plan: {condition.attribute} {sign} {condition.value}, {direction} first, {output_format}."
    ]
    order: list[Note] = []
    for note in notes:
        tested = _compare(getattr(note, condition.attribute), condition.value)
        fields = f"{note.name}, {note.quantity}, {note.colour}, {note.item}, {note.city}"
        line = f"{note.number}: {fields}. "
        if condition.holds(note):
            comparisons = _insert(order, note, direction)
            lines.append(f"{line}{tested}, keep. {comparisons}Order: {_show_order(order)}.")
        else:
            lines.append(f"{line}{tested}, skip.")
    lines.append(f"Done: {_show_order(order)}.")
    return lines


_SIGNS = {"over": ">", "under": "<", "not": "!="}


def _compare(first: int | str, second: int | str) -> str:
    if isinstance(first, str) or isinstance(second, str):
        sign = "=" if first == second else "!="
    else:
        sign = "=" if first == second else "<" if first < second else ">"
    return f"{first} {sign} {second}"


def _insert(order: list[Note], note: Note, direction: str) -> str:
    """Insert a note into the running order and return the comparisons that found its place.

    They are spelled out because a small model copies well but does not place a number among
    several in one step.
    """
    comparisons = []
    position = len(order)
    for index, other in enumerate(order):
        comparisons.append(f"{_compare(note.quantity, other.quantity)}. ")
        if (note.quantity > other.quantity) == (direction == "highest"):
            position = index
            break
    order.insert(position, note)
    return "".join(comparisons)


def _show_order(order: Sequence[Note]) -> str:
    # Numbers, as in the prompt, the reasoning and the answer: what the model learns for restating
    # note 3 in its reasoning, it uses again for writing row 3 of the answer.
    return ", ".join(f"{note.number}={note.quantity}" for note in order)
