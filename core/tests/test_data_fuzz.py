"""100 mutated datasets: never a traceback, always a place and a remedy, and the file untouched."""

from __future__ import annotations

import io
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlctl.config.schema import DataConfig
from rlctl.data.check import check_files
from rlctl.data.rows import load_rows
from rlctl.errors import RlctlError

ROWS: list[dict[str, Any]] = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
        "extra_info": {"index": i, "tags": ["é", "b"]},
    }
    for i in range(8)
]
SHAPES: dict[str, list[dict[str, Any]]] = {
    "verl": ROWS,
    "plain": [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(8)],
    "gsm8k": [{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(8)],
    "chat": [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}
        for i in range(8)
    ],
    "sft": [{"prompt": f"p{i}", "response": f"r{i}"} for i in range(8)],
}
JUNK: list[Any] = [
    None, True, 0, -1.5, 10**30, "", " ", "\ud800", "a\x00b", [], {}, [[]], [{}], {"a": {"b": []}}, [None], "x" * 5000,
    [{"role": "user"}], [{"role": 3, "content": None}], float("nan"), float("inf"), {"role": "user", "content": "x"},
]  # fmt: skip


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a nested value, the top left out."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in ((*here, key), *places(item, (*here, key)))]


def change(row: dict[str, Any], place: tuple[Any, ...], action: Callable[[Any, Any], None]) -> dict[str, Any]:
    copied = json.loads(json.dumps(row))
    here = copied
    for key in place[:-1]:
        here = here[key]
    action(here, place[-1])
    return copied


@st.composite
def mutated_rows(draw: st.DrawFn) -> bytes:
    """A dataset some of whose values are of a wrong type, missing, renamed or nested junk."""
    rows = list(SHAPES[draw(st.sampled_from(sorted(SHAPES)))])
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.integers(0, len(rows) - 1))
        options = places(rows[number])
        if not options:
            continue
        place = draw(st.sampled_from(options))
        kind = draw(st.sampled_from(["junk", "drop", "rename"]))
        if kind == "junk":
            junk = draw(st.sampled_from(JUNK))
            rows[number] = change(rows[number], place, lambda here, key, junk=junk: here.__setitem__(key, junk))
        elif kind == "drop":
            rows[number] = change(rows[number], place, lambda here, key: here.__delitem__(key))
        elif isinstance(place[-1], str):
            rows[number] = change(rows[number], place, lambda here, key: here.__setitem__(key + "x", here.pop(key)))
    return jsonl(rows)


@st.composite
def mutated_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes flipped, cut, doubled or put in; line ends and marks of other systems."""
    out = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["flip", "cut", "insert", "crlf", "cr", "bom", "utf16", "empty", "digits", "deep"]))
        place = draw(st.integers(0, max(0, len(out) - 1)))
        if kind == "flip" and out:
            out[place] = draw(st.integers(0, 255))
        elif kind == "cut":
            del out[place : place + draw(st.integers(1, 200))]
        elif kind == "insert":
            out[place:place] = draw(st.binary(min_size=1, max_size=8))
        elif kind in ("crlf", "cr"):
            out = bytearray(bytes(out).replace(b"\n", b"\r\n" if kind == "crlf" else b"\r"))
        elif kind == "bom":
            out[:0] = b"\xef\xbb\xbf"
        elif kind == "utf16":
            out = bytearray(bytes(out).decode("utf-8", "replace").encode("utf-16"))
        elif kind == "empty":
            out = bytearray()
        elif kind == "digits":
            out += b'{"prompt": "p", "answer": ' + b"7" * 6000 + b"}\n"
        elif kind == "deep":
            out += b'{"prompt": ' + b"[" * 5000 + b"\n"
    return bytes(out)


REMEDY = re.compile(r"\w")
PLACE = re.compile(r"rows\.(jsonl:\d+|parquet row \d+|jsonl\b|parquet\b)")


def examine(name: str, content: bytes) -> None:
    """Read the dataset both ways that users do. Whatever it holds, the outcome is rows or an error that helps."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / name
        file.write_bytes(content)
        data = DataConfig(train_files=(str(file),))
        report = check_files(str(file), data)
        for fault in (*report.faults, *report.warnings):
            assert fault.what
            assert REMEDY.search(fault.next), fault
            if fault.kind != "duplicate":
                assert PLACE.search(fault.line()), fault
        json.dumps(report.to_json(), ensure_ascii=False, allow_nan=False).encode("utf-8")
        "\n".join(fault.line() for fault in report.faults).encode("utf-8")
        if report.ok:
            assert all(row.prompt_text.strip() for row in load_rows(data, "train"))
        else:
            with pytest.raises(RlctlError) as caught:
                load_rows(data, "train")
            assert caught.value.next
            assert PLACE.search(str(caught.value)), str(caught.value)
            str(caught.value).encode("utf-8")
        assert file.read_bytes() == content
        assert [child.name for child in Path(directory).iterdir()] == [name]


FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@FEW
@given(mutated_rows())
@example(b"")
@example(jsonl([{"prompt": "p", "answer": "\ud800"}]))
@example(jsonl([{"prompt": "p", "data_source": "\ud800"}]))
def test_mutated_values(content: bytes) -> None:
    examine("rows.jsonl", content)


@FEW
@given(st.sampled_from(sorted(SHAPES)).flatmap(lambda name: mutated_bytes(jsonl(SHAPES[name]))))
@example(b"{}\n")
@example(b"\xff\xfe")
def test_mutated_bytes(content: bytes) -> None:
    examine("rows.jsonl", content)


def parquet_bytes() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


def test_mutated_parquet() -> None:
    pytest.importorskip("pyarrow")

    @FEW
    @given(mutated_bytes(parquet_bytes()))
    @example(b"")
    @example(b"PAR1PAR1")
    def attempt(content: bytes) -> None:
        examine("rows.parquet", content)

    attempt()


def test_the_examination_can_fail() -> None:
    examine("rows.jsonl", jsonl(SHAPES["plain"]))
    with pytest.raises(AssertionError):
        examine("rows.csv", b"prompt,answer\n")
