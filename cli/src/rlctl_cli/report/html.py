"""HTML that cannot be broken by what a model wrote: every string is escaped unless it is marked as markup."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TypeAlias


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = "str | Markup | Sequence[Child] | None"

_VOID = {"meta", "br", "hr", "img"}


def tag(name: str, /, *children: Child, **attributes: str | bool | None) -> Markup:
    """One element. ``class_`` stands for ``class``, other underscores for hyphens; None and False leave one out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Child) -> Markup:
    """Children one after the other, escaped."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(escape(children))
    return Markup("".join(join(child) for child in children))
