"""The table of keys in the documentation, made from the schema: ``python -m rlctl.config.reference docs/configuration.md``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from rlctl.config.document import dotted
from rlctl.config.schema import RunConfig
from rlctl.config.schema_paths import item_of, model_of, walk, wanted
from rlctl.config.yaml_dump import dump_inline

BEGIN = "<!-- keys: made by python -m rlctl.config.reference; do not edit by hand -->"
END = "<!-- end of keys -->"


def key_tables() -> str:
    """One Markdown table for each top-level section: key, what it takes, default, meaning."""
    lines: list[str] = []
    shown: dict[int, str] = {}
    for section, info in RunConfig.model_fields.items():
        model = model_of(info.annotation)
        assert model is not None, section
        doc = " ".join((model.__doc__ or "").split("\n\n")[0].split())
        lines += [f"### {section}", "", doc, "", "| key | takes | default | meaning |", "|---|---|---|---|"]
        skip: tuple[Any, ...] | None = None
        for loc, field in walk(model, (section,)):
            if skip is not None and loc[: len(skip)] == skip:
                continue
            nested = model_of(field.annotation)
            if nested is not None and nested.__name__ in ("ParallelConfig", "OptimConfig"):
                # One section that stands in several places is spelt out once.
                first = shown.setdefault(id(nested), dotted(loc))
                if first != dotted(loc):
                    lines.append(f"| `{dotted(loc)}` | a section | as `{first}` | {field.description or ''} |")
                    skip = loc
                    continue
            if nested is None and not _has_sections(field):
                lines.append(_row(dotted(loc), field))
            elif field.is_required() or field.default is None:
                lines.append(f"| `{dotted(loc)}` | a section | {_default(field)} | {field.description or ''} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _has_sections(field: FieldInfo) -> bool:
    item = item_of(field.annotation)
    return item is not None and model_of(item) is not None


def _row(path: str, field: FieldInfo) -> str:
    takes = wanted(field).replace("|", "\\|")
    return f"| `{path}` | {takes} | {_default(field)} | {(field.description or '').replace('|', chr(92) + '|')} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        value = list(value)
    return f"`{dump_inline(getattr(value, 'value', value))}`" if value != "" else "empty"


def update(text: str) -> str:
    """``text`` with the part between the markers made anew."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin, "the page has lost its first marker"
    assert end, "the page has lost its last marker"
    return f"{head}{BEGIN}\n\n{key_tables()}\n{END}{tail}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")
