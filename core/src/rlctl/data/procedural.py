"""Tasks whose rows are made from a seed: no files, no network, the same rows in every process.

``data.task.name`` is one of :data:`TASKS`, or ``reasoning_gym:NAME`` (extra ``reasoning-gym``). Validation rows are made
first, from a stream of their own, and are all different; training rows leave them out. So the validation set stays the
same when ``train_size`` changes, and the two never share a prompt.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from rlctl.data.columns import Message, Pair, Row
from rlctl.data.faults import listing, nearest
from rlctl.data.readers import Split
from rlctl.errors import DataError

if TYPE_CHECKING:
    from rlctl.config.schema import TaskConfig

REASONING_GYM = "reasoning_gym:"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (
    *("apple", "bird", "boat", "book", "bread", "cat", "chair", "cloud", "cup", "dog", "door", "fish", "flower"),
    *("forest", "garden", "glass", "grass", "hand", "hat", "hill", "horse", "house", "ice", "island", "key", "lamp"),
    *("leaf", "light", "map", "milk", "moon", "mouse", "night", "ocean", "paper", "pencil", "plant", "rain", "ring"),
    *("river", "road", "rock", "salt", "sand", "ship", "shoe", "snow", "spoon", "star", "stone", "storm", "street"),
    *("sugar", "summer", "sun", "table", "tiger", "train", "tree", "valley", "water", "wave", "wind", "window"),
)

Maker = Callable[..., tuple[str, str]]


@dataclass(frozen=True)
class ProceduralTask:
    """One built-in task. ``make(rng, **args)`` returns (prompt, answer).

    Args:
        demonstrate: from (row's index, prompt, answer) to a whole conversation, for SFT; RL begins at its first message.
    """

    name: str
    make: Maker
    summary: str
    demonstrate: Callable[[int, str, str], tuple[Message, ...]] | None = None


def make_rows(task: TaskConfig, split: Split) -> list[Row]:
    """The rows of a split of a procedural task.

    Raises:
        DataError: the task or an argument is unknown, or it has too few different prompts.
    """
    if task.name.startswith(REASONING_GYM):
        from rlctl.data.reasoning_gym import make_reasoning_rows

        return make_reasoning_rows(task, split)
    draw = _drawer(task)
    val = _distinct(task, draw, random.Random(f"{task.name}/{task.seed}/val"))
    if split == "val":
        pairs = list(val.items())
    else:
        pairs = _others(task, draw, random.Random(f"{task.name}/{task.seed}/train"), val)
    demonstrate = TASKS[task.name].demonstrate
    rows: list[Row] = []
    for index, (prompt, answer) in enumerate(pairs):
        source = f"{task.name} {split} row {index}"
        if demonstrate is None:
            rows.append(Row(index, source, prompt, answer, None, task.name, {}, answer))
            continue
        chat = demonstrate(index, prompt, answer)
        response = str(chat[-1]["content"])
        rows.append(Row(index, source, chat[:-1], answer, response, task.name, {}, answer, chat))
    return rows


def with_pair(row: Row, seed: int) -> Row:
    """The row with its own answer as the chosen response, and with two of the answer's characters exchanged as the rejected one.

    Raises:
        DataError: the row has no answer.
    """
    if not row.answer:
        raise DataError(f"{row.source} has no answer to make a pair of", next="data.task.name=sort_digits")
    rng = random.Random(f"{row.data_source}/{seed}/pair/{row.source}")
    characters = list(row.answer)
    unlike = [(a, b) for a, b in combinations(range(len(characters)), 2) if characters[a] != characters[b]]
    if unlike:
        a, b = rng.choice(unlike)
        characters[a], characters[b] = characters[b], characters[a]
    else:
        # Nothing to exchange: another character.
        characters[rng.randrange(len(characters))] = rng.choice([c for c in "0123456789" if c != characters[0]])
    return replace(row, pair=Pair(row.answer, "".join(characters)))


def _drawer(task: TaskConfig) -> Callable[[random.Random], tuple[str, str]]:
    known = TASKS.get(task.name)
    if known is None:
        near = nearest(task.name, TASKS)
        raise DataError(
            f"there is no procedural task {task.name!r}",
            found=f"did you mean {near!r}?" if near else None,
            wanted=f"{listing(TASKS)}, or reasoning_gym:NAME",
            next=f"data.task.name={near or 'sort_digits'}",
        )
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(known.make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for name, value in task.args.items():
        _check_argument(task.name, name, value, defaults)
    args = {**defaults, **task.args}
    return lambda rng: known.make(rng, **args)


def _check_argument(task: str, name: str, value: object, defaults: Mapping[str, Any]) -> None:
    place = f"data.task.args.{name}"
    if name not in defaults:
        near = nearest(name, defaults)
        raise DataError(
            f"the task {task} has no argument {name!r}",
            wanted=listing(f"{known} (default {default})" for known, default in defaults.items()),
            next=f"rename {place} to data.task.args.{near}" if near else f"remove {place}",
        )
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 100_000:
        raise DataError(f"{place} is not usable", found=repr(value), wanted="an integer from 1 to 100000",
                        next=f"{place}={defaults[name]}")  # fmt: skip


def _distinct(task: TaskConfig, draw: Callable[[random.Random], tuple[str, str]], rng: random.Random) -> dict[str, str]:
    """``val_size`` different prompts with their answers."""
    made: dict[str, str] = {}
    for _ in range(100 * task.val_size + 1000):
        prompt, answer = draw(rng)
        made.setdefault(prompt, answer)
        if len(made) == task.val_size:
            return made
    _too_few(task, len(made))
    raise AssertionError


def _others(
    task: TaskConfig, draw: Callable[[random.Random], tuple[str, str]], rng: random.Random, val: Mapping[str, str]
) -> list[tuple[str, str]]:
    """``train_size`` prompts that are not in ``val``; a prompt may come again, as it does in any large draw."""
    made: list[tuple[str, str]] = []
    for _ in range(100 * task.train_size + 1000):
        pair = draw(rng)
        if pair[0] not in val:
            made.append(pair)
        if len(made) == task.train_size:
            return made
    _too_few(task, len(val))
    raise AssertionError


def _too_few(task: TaskConfig, found: int) -> None:
    raise DataError(
        f"the task {task.name} has too few different prompts for a validation set apart from training",
        found=f"about {found} different prompts with these arguments",
        wanted=f"data.task.val_size={task.val_size} of them and others for training",
        next=f"data.task.val_size={max(1, found // 4)}, or larger data.task.args",
    )


# ---- the tasks ----------------------------------------------------------------------------------------------------
def _sort_digits(rng: random.Random, *, length: int = 8) -> tuple[str, str]:
    digits = "".join(rng.choice("0123456789") for _ in range(length))
    return f"s:{digits}=", "".join(sorted(digits))


def _reverse_letters(rng: random.Random, *, length: int = 8) -> tuple[str, str]:
    letters = "".join(rng.choice(LETTERS) for _ in range(length))
    return f"r:{letters}=", letters[::-1]


def _add_numbers(rng: random.Random, *, digits: int = 3) -> tuple[str, str]:
    """Fixed width, so that a character-level model sees each place at the same position."""
    x, y = (rng.randrange(10**digits) for _ in range(2))
    return f"{x:0{digits}d}+{y:0{digits}d}=", f"{x + y:0{digits + 1}d}"


def _chat_sum(rng: random.Random, *, max: int = 20) -> tuple[str, str]:
    x, y = rng.randint(1, max), rng.randint(1, max)
    return f"What is {x} + {y}? Reply with the number only.", str(x + y)


def _chat_max(rng: random.Random, *, max: int = 99) -> tuple[str, str]:
    a, b, c = (rng.randint(1, max) for _ in range(3))
    largest = sorted((a, b, c))[-1]
    return f"Which number is the largest: {a}, {b} or {c}? Reply with the number only.", str(largest)


def _chat_sort(rng: random.Random, *, count: int = 3, max: int = 99) -> tuple[str, str]:
    numbers = [rng.randint(1, max) for _ in range(count)]
    shown = ", ".join(map(str, numbers))
    answer = ", ".join(map(str, sorted(numbers)))
    return f"Sort these numbers from smallest to largest: {shown}. Reply with the sorted list only.", answer


def _chat_reverse(rng: random.Random, *, words: int = 3) -> tuple[str, str]:
    chosen = [rng.choice(WORDS) for _ in range(words)]
    return f"Write these words in reverse order: {' '.join(chosen)}. Reply with the words only.", " ".join(chosen[::-1])


def _calculate(rng: random.Random, *, digits: int = 2) -> tuple[str, str]:
    """A product and a sum, which a small model does not learn to compute."""
    a, b, c = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(3))
    sign = rng.choice("+-")
    return f"{a}*{b}{sign}{c}", str(a * b + c if sign == "+" else a * b - c)


def _with_calculator(index: int, prompt: str, answer: str) -> tuple[Message, ...]:
    """One conversation in four calls the tool; the others answer at once."""
    asked, said = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
    if index % 4:
        return asked, said
    called = {"role": "assistant", "content": f"calc[{prompt}]"}
    return asked, called, {"role": "tool", "content": answer}, said


TASKS: Mapping[str, ProceduralTask] = {
    task.name: task
    for task in (
        ProceduralTask("sort_digits", _sort_digits, "s:40718235= -> 01234578 (args: length)"),
        ProceduralTask("reverse_letters", _reverse_letters, "r:abcd= -> dcba (args: length)"),
        ProceduralTask("add_numbers", _add_numbers, "012+345= -> 0357 (args: digits)"),
        ProceduralTask(
            "calculate",
            _calculate,
            "47*36+8, with conversations that call a tool in every fourth row (args: digits)",
            _with_calculator,
        ),
        ProceduralTask("chat_sum", _chat_sum, "What is 3 + 4? Reply with the number only. (args: max)"),
        ProceduralTask("chat_max", _chat_max, "Which number is the largest: 3, 9 or 4? (args: max)"),
        ProceduralTask("chat_sort", _chat_sort, "Sort these numbers: 9, 4, 7. (args: count, max)"),
        ProceduralTask("chat_reverse", _chat_reverse, "Write these words in reverse order. (args: words)"),
    )
}
