"""Values to YAML text that is read back as the same values, here and by YAML 1.1 readers."""

from __future__ import annotations

from typing import Any

import yaml

from rlctl.config.yaml_source import IMPLICIT, TAG


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or this module's reader would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.Node:
        # Outside of double quotes the emitter writes these as they are, and a reader takes them for line ends.
        style = '"' if any(char in data for char in "\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar(TAG + "str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _name, _pattern, _first in IMPLICIT:
    _Dumper.add_implicit_resolver(TAG + _name, _pattern, _first)


def dump(value: Any) -> str:
    """YAML text that both :func:`rlctl.config.yaml_source.parse` and a YAML 1.1 reader take back as the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=110)


def dump_inline(value: Any) -> str:
    """A value on one line, as it would be typed after ``KEY=``."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...").strip()
