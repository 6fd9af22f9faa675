"""Objects as a JSON header and a list of tensors, and back: plain records only, never code.

What travels: None, bool, int, float, str, bytes, list, tuple, dict, Path, enums, tensors and dtypes of torch, dataclasses
and pydantic models. A record is written as ``module:Class`` with its fields, and read only when its module belongs to an
allowed package, so a message can make the other side import and run nothing else. torch itself is imported only where a
tensor is met.

In the header a JSON list is a list and a JSON object is always a tag: ``{"t": [...]}`` a tuple, ``{"d": {...}}`` a dict
with string keys, and so on. Long lists of numbers (token ids, log-probs) go into one tensor of ints and one of floats,
and only their bounds into the header.
"""

from __future__ import annotations

import base64
import importlib
import json
import math
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rlctl.errors import RlctlError

if TYPE_CHECKING:
    import torch

ALLOWED: tuple[str, ...] = ("rlctl",)
"""Packages whose records are read when nothing else is said."""

_COLUMN = 16
"""Lists of numbers from this length on go into a tensor."""
_INT64 = range(-(2**63), 2**63)
_PLAIN = frozenset({int, str, bool, type(None)})


class WireError(RlctlError):
    """A value cannot travel between processes, or a message must not be read here."""


def encode(value: Any, allowed: Sequence[str] = ALLOWED) -> tuple[bytes, list[torch.Tensor]]:
    """``value`` as (header, tensors). Tensors come as they are, detached, contiguous and on the CPU; a copy is made only
    where they are not. An object met twice is written once where it is a tensor.

    Raises:
        WireError: something in ``value`` is no plain record; says where.
    """
    writer = _Writer(tuple(allowed))
    body = writer.write(value, "")
    return json.dumps([len(writer.tensors), body], separators=(",", ":")).encode(), writer.finish()


def decode(header: bytes, tensors: Sequence[torch.Tensor], allowed: Sequence[str] = ALLOWED) -> Any:
    """The inverse of :func:`encode`. Tensors are used as they are.

    Raises:
        WireError: the header names a class outside ``allowed``, one that is no record, or one with other fields here.
    """
    count, body = json.loads(header)
    return _Reader(tensors, count, tuple(allowed)).read(body)


class _Writer:
    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = allowed
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[int, tuple[int, Any]] = {}  # id -> (index, the object, so that its id stays its own)
        self._ints, self._floats = array("q"), array("d")

    def finish(self) -> list[torch.Tensor]:
        """The tensors, the columns of numbers last: ints, floats."""
        if not self._ints and not self._floats:
            return self.tensors
        import torch

        for column, dtype in ((self._ints, torch.int64), (self._floats, torch.float64)):
            self.tensors.append(torch.frombuffer(column, dtype=dtype) if column else torch.empty(0, dtype=dtype))
        return self.tensors

    def write(self, value: Any, at: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        write = _WRITERS.get(kind, _Writer._other)
        return write(self, value, at)

    def _float(self, value: float, at: str) -> Any:
        return value if math.isfinite(value) else {"f": repr(value)}

    def _tuple(self, value: Sequence[Any], at: str) -> Any:
        return {"t": self._items(value, at)}

    def _bytes(self, value: bytes, at: str) -> Any:
        return {"b": base64.b64encode(value).decode()}

    def _items(self, values: Sequence[Any], at: str) -> list[Any]:
        return [self.write(v, f"{at}[{i}]") for i, v in enumerate(values)]

    def _list(self, values: list[Any], at: str) -> Any:
        kinds = set(map(type, values))
        if len(values) >= _COLUMN and kinds == {int} and min(values) in _INT64 and max(values) in _INT64:
            start = len(self._ints)
            self._ints.extend(values)
            return {"i": [start, len(self._ints)]}
        if len(values) >= _COLUMN and kinds == {float}:
            start = len(self._floats)
            self._floats.extend(values)
            return {"r": [start, len(self._floats)]}
        return values if kinds <= _PLAIN else self._items(values, at)

    def _dict(self, value: Mapping[Any, Any], at: str) -> Any:
        if all(type(k) is str for k in value):
            return {"d": {k: self.write(v, f"{at}[{k!r}]") for k, v in value.items()}}
        return {"m": [[self.write(k, f"{at} key"), self.write(v, f"{at}[{k!r}]")] for k, v in value.items()]}

    def _other(self, value: Any, at: str) -> Any:
        """What is told by more than its exact type."""
        if isinstance(value, Enum):
            return {"e": [self._name(value, at), value.name]}
        if isinstance(value, PurePath):
            return {"p": str(value)}
        if isinstance(value, Mapping):  # one that is filled as it is read travels as the dict that it stands for
            return self._dict(value, at)
        if isinstance(value, BaseModel):
            given = {n: self.write(v, f"{at}.{n}") for n, v in value}  # extra fields are among them
            return {"M": [self._name(value, at), given, sorted(value.model_fields_set)]}
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(value, torch.Tensor):
                return {"x": self._tensor(value, at)}
            if isinstance(value, torch.dtype):
                return {"y": str(value).removeprefix("torch.")}
            if isinstance(value, torch.Size):
                return {"t": list(value)}
        if is_dataclass(value) and not isinstance(value, type):
            given = {f.name: self.write(getattr(value, f.name), f"{at}.{f.name}") for f in fields(value) if f.init}
            return {"c": [self._name(value, at), given]}
        for plain in (float, str):  # numpy's float64, torch's version
            if isinstance(value, plain):
                return self.write(plain(value), at)
        raise WireError(
            f"{_words(value)} cannot travel to or from a rank",
            found=f"at {at.lstrip('.')}" if at else None,
            wanted="numbers, text, lists, dicts, tensors, or a dataclass of these",
            next="write what it does as a frozen dataclass with __call__, at the top of a module"
            if callable(value)
            else None,
        )

    def _tensor(self, value: torch.Tensor, at: str) -> int:
        known = self._seen.get(id(value))
        if known is not None:
            return known[0]
        import torch

        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_quantized
        if not plain or value.layout is not torch.strided or value.is_meta:
            raise WireError(
                f"a {type(value).__name__} ({value.layout}, on {value.device}) cannot travel to or from a rank",
                found=f"at {at.lstrip('.')}" if at else None,
                wanted="a dense tensor with values of its own",
            )
        self.tensors.append(value.detach().cpu().resolve_conj().resolve_neg().contiguous())
        self._seen[id(value)] = (len(self.tensors) - 1, value)
        return len(self.tensors) - 1

    def _name(self, value: Any, at: str) -> str:
        kind = type(value)
        if "<locals>" in kind.__qualname__ or not is_allowed(kind.__module__, self._allowed):
            raise WireError(
                f"{_words(value)} cannot travel to or from a rank",
                found=f"{kind.__module__}.{kind.__qualname__}{f' at {at.lstrip(chr(46))}' if at else ''}",
                wanted=f"a class at the top of a module of {' or '.join(self._allowed)}",
            )
        return f"{kind.__module__}:{kind.__qualname__}"


# Outside of the classes, and of functions that do not know their object: a cycle would keep tensors until a collection.
_WRITERS: dict[type, Callable[[_Writer, Any, str], Any]] = {
    float: _Writer._float,
    list: _Writer._list,
    tuple: _Writer._tuple,
    dict: _Writer._dict,
    bytes: _Writer._bytes,
}


class _Reader:
    def __init__(self, tensors: Sequence[torch.Tensor], count: int, allowed: tuple[str, ...]) -> None:
        self.tensors = tensors
        self.columns = tensors[count:]
        self._allowed = allowed

    def read(self, value: Any) -> Any:
        if type(value) is dict:
            ((tag, content),) = value.items()
            return _READERS[tag](self, content)
        if type(value) is list:
            return [self.read(v) if type(v) in (dict, list) else v for v in value]
        return value

    def column(self, column: int, bounds: Sequence[int]) -> list[Any]:
        return self.columns[column][bounds[0] : bounds[1]].tolist()

    def enum(self, value: Any) -> Any:
        kind, name = value
        return self._record(kind, Enum)[name]

    def dataclass(self, value: Any) -> Any:
        name, given = value
        kind, values = self._record(name, None), {k: self.read(v) for k, v in given.items()}
        try:
            return kind(**values)
        except TypeError as error:
            if given.keys() == {f.name for f in fields(kind) if f.init}:
                raise
            raise WireError(
                "a message has a record with other fields than it has here",
                found=f"{name}: {error}",
                wanted="the same versions of rlctl and its plugins on both sides",
            ) from error

    def model(self, value: Any) -> Any:
        name, given, fields_set = value
        # It was validated where it was made; a second time would not see what the user wrote, but what became of it.
        kind = self._record(name, BaseModel)
        return kind.model_construct(set(fields_set), **{k: self.read(v) for k, v in given.items()})

    def _record(self, name: str, base: type | None) -> Any:
        kind = resolve(name, self._allowed)
        fits = is_dataclass(kind) if base is None else isinstance(kind, type) and issubclass(kind, base)
        if not fits:
            raise WireError("a message names something that is no record", found=name)
        return kind


_READERS: dict[str, Callable[[_Reader, Any], Any]] = {
    "t": lambda r, v: tuple(map(r.read, v)),
    "d": lambda r, v: {k: r.read(x) for k, x in v.items()},
    "m": lambda r, v: {r.read(k): r.read(x) for k, x in v},
    "i": lambda r, v: r.column(0, v),
    "r": lambda r, v: r.column(1, v),
    "f": lambda r, v: float(v),
    "b": lambda r, v: base64.b64decode(v),
    "p": lambda r, v: Path(v),
    "x": lambda r, v: r.tensors[v],
    "y": lambda r, v: _dtype(v),
    "e": _Reader.enum,
    "c": _Reader.dataclass,
    "M": _Reader.model,
}


def resolve(name: str, allowed: Sequence[str]) -> Any:
    """What ``module:Qualified.name`` is.

    Raises:
        WireError: its module is not of an allowed package, or has nothing of that name.
    """
    module, _, path = name.partition(":")
    if not is_allowed(module, allowed):
        raise WireError(
            "a message names a class of a package that is not allowed here",
            found=name,
            wanted=f"a module of {' or '.join(allowed)}",
        )
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise WireError(
            "a message names a class that is not here",
            found=f"{name}: {error}",
            wanted="the same versions of rlctl and its plugins on both sides",
        ) from error
    return found


def is_allowed(module: str, allowed: Sequence[str]) -> bool:
    """True when ``module`` is one of the ``allowed`` packages or lies in one."""
    return any(module == package or module.startswith(f"{package}.") for package in allowed)


def _dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise WireError("a message names a dtype that this torch has not", found=name)
    return found


def _words(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function {value.__qualname__}"
    return f"an object of type {type(value).__name__}"
