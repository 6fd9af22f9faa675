"""Do two tokenizers say the same with every id? A teacher that reads other tokens than the student wrote is silently wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL = ("bos_token", "eos_token", "unk_token")
"""Not the padding token: batches are packed, so no model sees one."""
_SHOWN = 5
_PROBE = (
    "The quick brown fox, 1234567890 + 42 = ?",
    "  two  spaces\n\tand a tab\n\n",
    "def f(x):\n    return x ** 2  # caf\u00e9 \u4e2d\u6587 \U0001f600",
)
"""Texts whose tokens are compared: equal tables may still be cut differently (spaces, digits, normal forms)."""


def token_differences(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, roles: tuple[str, str] = ("student", "teacher")
) -> list[str]:
    """What differs, one line each, the lowest ids first; empty where every id means the same.

    Compared are the tables of ids (added tokens with them), the special tokens, and how some texts are cut.

    Args:
        roles: what the lines call the two.
    """
    here, there = roles
    mine, other = student.get_vocab(), teacher.get_vocab()
    lines: list[str] = []
    if mine != other:
        by_id, other_by_id = ({i: t for t, i in table.items()} for table in (mine, other))
        different = sorted(i for i in {*by_id, *other_by_id} if by_id.get(i) != other_by_id.get(i))
        lines += [
            f"id {i}: {here} {_shown(by_id.get(i))}, {there} {_shown(other_by_id.get(i))}" for i in different[:_SHOWN]
        ]
        if len(different) > _SHOWN:
            lines.append(f"and {len(different) - _SHOWN} more ids of {len({*by_id, *other_by_id})}")
    for name in SPECIAL:
        a, b = getattr(student, name, None), getattr(teacher, name, None)
        if a != b:
            lines.append(f"{name}: {here} {_shown(a)}, {there} {_shown(b)}")
    if not lines:
        for text in _PROBE:
            a, b = (t(text, add_special_tokens=False)["input_ids"] for t in (student, teacher))
            if a != b:
                lines.append(f"{text[:24]!r} is {a[:8]} to the {here}, {b[:8]} to the {there}")
                break
    return lines


def require_same_tokens(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, name: str = "") -> None:
    """Refuse a teacher whose tokens are not the student's.

    Args:
        name: the teacher's, where there are several.

    Raises:
        DataError: they differ; its details are the first differences.
    """
    lines = token_differences(student, teacher)
    if lines:
        raise DataError(
            f"student and teacher{f' {name!r}' if name else ''} have different tokens: log-probs of one id would be of two words",
            found=f"vocabularies of {len(student)} and {len(teacher)} tokens",
            wanted="one tokenizer for both",
            next="take a teacher of the student's family; teacher.model.tokenizer says which tokenizer it has",
            details=lines,
        )


def require_tokens_of_actor(actor: PreTrainedTokenizerBase, critic: PreTrainedTokenizerBase) -> None:
    """Refuse a critic that reads other tokens than the actor writes.

    Raises:
        DataError: they differ; its details are the first differences.
    """
    if lines := token_differences(actor, critic, ("actor", "critic")):
        raise DataError(
            "actor and critic have different tokens: the critic would read other words than the actor wrote",
            found=f"vocabularies of {len(actor)} and {len(critic)} tokens",
            wanted="one tokenizer for both",
            next="take a critic of the actor's family; critic.model.tokenizer says which tokenizer it has",
            details=lines,
        )


def _shown(token: object) -> str:
    return "nothing" if token is None else repr(str(token))
