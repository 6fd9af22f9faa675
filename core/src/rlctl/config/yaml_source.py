"""Safe YAML with line numbers.

Scalars follow the YAML 1.2 core schema, so that ``1e-6`` is a number and ``no`` is a word. Python tags, several documents,
duplicate keys, and aliases that blow up or contain themselves are refused with the line. Nothing is ever constructed but
dicts, lists, strings, numbers, booleans and None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
import yaml.composer
import yaml.parser
import yaml.reader
import yaml.resolver
import yaml.scanner

from rlctl.config.document import Document, Loc, Origin, dotted
from rlctl.config.problems import Problem
from rlctl.errors import ConfigError

MAX_BYTES = 512 * 1024
MAX_DEPTH = 50
MAX_NODES = 50_000
TAG = "tag:yaml.org,2002:"

IMPLICIT = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    ),
    ("merge", re.compile(r"^<<$"), ["<"]),
)


class _CoreResolver(yaml.resolver.BaseResolver):
    """Which plain scalars are not text."""


class _TooDeepError(yaml.MarkedYAMLError):
    pass


class _Loader(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer, _CoreResolver):
    """Up to the node graph; values are made by :class:`_Builder`."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        _CoreResolver.__init__(self)
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        # The composer calls itself once a level: without a limit a few kB of brackets end in a RecursionError.
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _TooDeepError(
                problem=f"more than {MAX_DEPTH} levels of nesting", problem_mark=self.peek_event().start_mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _name, _pattern, _first in IMPLICIT:
    _CoreResolver.add_implicit_resolver(TAG + _name, _pattern, _first)


def read(path: Path, label: str) -> str:
    """The text of a YAML file.

    Raises:
        ConfigError: no such file, a directory, not readable, too large, or not UTF-8 (with the line).
    """
    try:
        if path.is_dir():
            inside = sorted(p.name for p in path.iterdir() if p.suffix in (".yaml", ".yml"))
            raise ConfigError(
                f"{label} is a directory",
                found=f"a directory with {', '.join(inside[:5])}" if inside else "a directory without YAML files",
                wanted="a YAML file",
                next=f"name the file, for example {Path(label) / (inside[0] if inside else 'run.yaml')}",
            )
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no configuration file {label}", found="no such file", wanted="a YAML file", next="rlctl recipes"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{label} cannot be read",
            found=getattr(error, "strerror", None) or error,
            wanted="a readable YAML file",
            next=f"ls -l {label}",
        ) from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{label} is too large for a configuration",
            found=f"more than {MAX_BYTES // 1024} KiB",
            wanted="a YAML file of a few kB",
            next="give the path of the YAML file; data files belong under data.train_files",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{label}:{line}: the file is not UTF-8 text",
            found=f"byte 0x{raw[error.start]:02x} at offset {error.start}",
            wanted="UTF-8",
            next=f"iconv -f latin1 -t utf-8 {label} > fixed.yaml, or save it as UTF-8 in your editor",
        ) from error


def parse(text: str, label: str) -> tuple[Document, list[Problem]]:
    """Turn YAML text into a document. Problems that leave the rest readable are returned, not raised.

    Raises:
        ConfigError: the text is no YAML, is empty, holds several documents, or is not a mapping.
    """
    try:
        loader = _Loader(text)
        if loader.check_node():
            node = loader.get_node()
            if loader.check_node():
                line = loader.peek_event().start_mark.line + 1
                raise ConfigError(
                    f"{label}:{line}: a second YAML document starts here",
                    found="more than one document",
                    wanted="one run in one file",
                    next="remove the line '---' and what follows it, or split the file",
                )
        else:
            node = None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{label}:{line}: a control character is not allowed in YAML",
            found=f"character U+{ord(error.character) if isinstance(error.character, str) else error.character:04X}",
            wanted="printable text",
            next=f"remove the character from line {line}",
        ) from error
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, label) from error
    except (ValueError, OverflowError) as error:
        # A \x or \U escape outside of Unicode: the scanner hands chr() the number without a check.
        raise ConfigError(
            f"{label}: an escape in double quotes is no character",
            found=str(error),
            wanted="an escape up to \\U0010FFFF",
            next="write the character itself, or use single quotes",
        ) from error
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == TAG + "null"):
        raise ConfigError(
            f"{label}: the file is empty",
            found="no keys",
            wanted="at least the sections model and data",
            next="start from a recipe: rlctl recipes quickstart --copy run.yaml",
        )
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"{label}:{node.start_mark.line + 1}: the file does not hold a configuration",
            found="a list" if isinstance(node, yaml.SequenceNode) else "a single value",
            wanted="a mapping with sections such as model: and data:",
            next="start from a recipe: rlctl recipes quickstart --copy run.yaml",
        )
    builder = _Builder(label)
    data = builder.build(node, ())
    assert isinstance(data, dict)
    return Document(data, builder.origins), builder.problems


def parse_value(text: str) -> Any:
    """One value as it would stand in a file, for overrides.

    Raises:
        ConfigError: it is no YAML value.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        problem = getattr(error, "problem", None) or "no YAML value"
        raise ConfigError("the value cannot be read", found=problem, wanted="a YAML value") from error
    if node is None:
        return None
    builder = _Builder("override")
    value = builder.build(node, ())
    if builder.problems:
        raise ConfigError("the value cannot be read", found=builder.problems[0].what, wanted="a YAML value")
    return value


def _syntax_error(error: yaml.MarkedYAMLError, text: str, label: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    number = mark.line + 1 if mark else 1
    lines = text.splitlines()
    line = lines[number - 1] if number <= len(lines) else ""
    next_step = f"mend line {number}; rlctl config show {label} reads it again"
    problem = error.problem or error.context or "the text is no YAML"
    if "\t" in line and ("\\t" in problem or "token" in problem or "tab" in problem.lower()):
        problem, next_step = "a tab stands where YAML wants spaces", f"indent line {number} with spaces"
    elif "could not find expected ':'" in problem:
        next_step = f"write KEY: VALUE, with a colon and a space, on line {number} or the line before it"
    elif "mapping values are not allowed" in problem:
        next_step = f"put text that holds a colon in quotes on line {number}, or mend the indentation"
    elif "undefined alias" in problem:
        next_step = f"define the anchor before line {number} uses it, or put the text in quotes"
    return ConfigError(
        f"{label}:{number}: {problem}", found=repr(line.strip()[:80]), wanted="valid YAML", next=next_step
    )


class _Builder:
    """Nodes to values and origins. Aliases are written out, with a limit on how much that may become."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.origins: dict[Loc, Origin] = {}
        self.problems: list[Problem] = []
        self.count = 0
        self.open: list[yaml.Node] = []

    def build(self, node: yaml.Node, loc: Loc) -> Any:
        line = node.start_mark.line + 1
        self.count += 1
        if self.count > MAX_NODES:
            raise ConfigError(
                f"{self.label}:{line}: the aliases of this file expand to more than {MAX_NODES} values",
                found="nested aliases",
                wanted="a configuration of a few hundred values",
                next="write the values out instead of repeating them with *aliases",
            )
        if any(node is outer for outer in self.open):
            raise ConfigError(
                f"{self.label}:{line}: {dotted(loc)} contains itself through an alias",
                found="an alias to a section around it",
                wanted="values without a circle",
                next="replace the *alias with the values themselves",
            )
        self.origins[loc] = Origin("file", self.label, line)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, loc)
        self.open.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                self._check_tag(node, "seq", loc)
                return [self.build(item, (*loc, index)) for index, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            self._check_tag(node, "map", loc)
            return self._mapping(node, loc)
        finally:
            self.open.pop()

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        out: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merges: list[tuple[yaml.Node, yaml.Node]] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(loc, line, "a key is a list or a mapping", "keys of plain text")
                continue
            if key_node.tag == TAG + "merge":
                merges.append((key_node, value_node))
                continue
            key = key_node.value
            place = (*loc, key)
            if key in lines:
                self._problem(
                    place,
                    line,
                    f"the key {key!r} is there twice, on lines {lines[key]} and {line}",
                    hint=f"keep one of the two and remove the other from {self.label}",
                )
                continue
            lines[key] = line
            if not _clean(key):
                self._problem(loc, line, "a key holds half of a surrogate pair", "plain text")
                continue
            out[key] = self.build(value_node, place)
            self.origins[place] = Origin("file", self.label, line)
        for key_node, value_node in merges:
            sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for source in sources:
                if not isinstance(source, yaml.MappingNode):
                    self._problem(
                        loc, key_node.start_mark.line + 1, "<< does not name a section", "<<: *anchor of a mapping"
                    )
                    continue
                if any(source is outer for outer in self.open):
                    self._problem(
                        loc, key_node.start_mark.line + 1, "<< names a section around it", "values without a circle"
                    )
                    continue
                # Built aside: keys of this mapping win over merged ones, and so do their origins.
                aside = _Builder(self.label)
                aside.open, aside.count = self.open, self.count
                merged = aside.build(source, loc)
                self.count = aside.count
                self.problems += [problem for problem in aside.problems if problem not in self.problems]
                for key in [key for key in merged if key not in out]:
                    out[key] = merged[key]
                    start = (*loc, key)
                    self.origins |= {k: v for k, v in aside.origins.items() if k[: len(start)] == start}
        return out

    def _scalar(self, node: yaml.ScalarNode, loc: Loc) -> Any:
        kind = node.tag.removeprefix(TAG)
        line = node.start_mark.line + 1
        if kind not in _SCALARS:
            self._problem(loc, line, f"the tag {node.tag.replace(TAG, '!!')} is not taken", "plain YAML without tags")
            return None
        try:
            value = _SCALARS[kind](node.value)
        except (ValueError, OverflowError, KeyError):
            self._problem(loc, line, f"{node.value[:40]!r} is no {kind}", "a value that can be read")
            return None
        if isinstance(value, str) and not _clean(value):
            self._problem(loc, line, "the text holds half of a surrogate pair", "plain text")
            return None
        return value

    def _check_tag(self, node: yaml.Node, kind: str, loc: Loc) -> None:
        if node.tag != TAG + kind:
            tag = node.tag.replace(TAG, "!!")
            self._problem(loc, node.start_mark.line + 1, f"the tag {tag} is not taken", "plain YAML without tags")

    def _problem(self, loc: Loc, line: int, what: str, wanted: str = "", hint: str = "") -> None:
        hint = hint or f"mend line {line} of {self.label}"
        self.problems.append(Problem(dotted(loc), f"{self.label}:{line}", what, "", wanted, hint))


def _clean(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _int(text: str) -> int:
    digits = text.replace("_", "")
    value = int(digits, 0) if digits[:2] in ("0o", "0x") else int(digits)
    if value.bit_length() > 1024:
        raise ValueError("too long")  # Python refuses to print very long numbers, and nothing here counts so far
    return value


def _float(text: str) -> float:
    low = text.lower().replace("_", "")
    if low.lstrip("+-") == ".inf":
        return -math.inf if low.startswith("-") else math.inf
    return math.nan if low == ".nan" else float(low)


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": _int,
    "float": _float,
    "merge": str,
}
