"""Objects to a header and tensors, and back: exactly, and nothing but records."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rlctl.algorithms.losses import PolicyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.config.schema import ActorConfig
from rlctl.engine_records import EngineInfo, StepOutput, TrainOutput
from rlctl.generation import Completion, FinishReason, GenerateRequest, SamplingParams
from rlctl.microbatch import MicroBatchPlan
from rlctl.records import BackendKind
from rlctl.runtime.phases import Status
from rlctl.runtime.records import Boot, Call, ErrorRecord, Raised, Result
from rlctl.runtime.wire import WireError, decode, encode

HERE = (__name__, "rlctl")


@dataclass(frozen=True)
class Nested:
    values: tuple[Any, ...]
    by_name: dict[str, Any] = field(default_factory=dict)
    doubled: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * len(self.values))


class Colour(Enum):
    RED = "red"


class Settings(BaseModel):
    size: int = 1
    colour: Colour = Colour.RED
    inner: ActorConfig | None = None


class Outer:
    @dataclass(frozen=True)
    class Inner:
        x: int


class Lazy(Mapping[str, int]):
    """A mapping that is no dict."""

    def __getitem__(self, key: str) -> int:
        return {"a": 1}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def there_and_back(value: Any, allowed: tuple[str, ...] = HERE) -> Any:
    header, tensors = encode(value, allowed)
    json.loads(header)
    assert all(t.is_contiguous() and t.device.type == "cpu" for t in tensors)
    return decode(header, tensors, allowed)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, NaN equal to itself."""
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, BaseModel):
        return a == b and a.model_fields_set == b.model_fields_set
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return a == b


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20), st.just(Colour.RED)
)
VALUES = st.recursive(
    st.one_of(
        SCALARS, st.lists(st.integers(), min_size=16, max_size=40), st.lists(st.floats(), min_size=16, max_size=40)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=6).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=3), st.booleans()), inner, max_size=4),
        st.builds(Nested, st.lists(inner, max_size=3).map(tuple)),
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_any_plain_value_comes_back_as_it_was(value: Any) -> None:
    assert same(there_and_back(value), value)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    whole = torch.arange(24).remainder(2).to(dtype).reshape(2, 3, 4)
    for tensor in (whole, whole[:, 1], whole.transpose(0, 2), whole[:0], whole[0, 0, 0], whole[:1].expand(3, 3, 4)):
        assert same(there_and_back(tensor), tensor)
    assert there_and_back({"dtype": dtype})["dtype"] is dtype


def test_gradients_and_parameters_travel_as_values() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    got = there_and_back([parameter, torch.conj(torch.tensor([1 + 2j]))])
    assert not got[0].requires_grad
    assert torch.equal(got[0], torch.ones(3))
    assert got[1][0] == 1 - 2j
    assert not got[1].is_conj()


def test_one_tensor_in_two_fields_is_written_once() -> None:
    shared = torch.arange(5.0)
    header, tensors = encode({"old": shared, "rollout": shared, "view": shared[:3]})
    assert len(tensors) == 2
    got = decode(header, tensors)
    assert got["old"] is got["rollout"]
    assert torch.equal(got["view"], shared[:3])


def test_the_runtime_s_own_records() -> None:
    batch = pack(
        {"input_ids": [[1, 2, 3], [4, 5]], "loss_mask": [[0, 1, 1], [0, 1]], "x": [[0.5] * 3, [float("nan")] * 2]},
        rows={"index": [0, 1]},
        meta={"temperature": 0.7, "name": "a", "tags": ["b"]},
        dtypes={"loss_mask": torch.bool},
    )
    loss = PolicyLoss(ActorConfig(ppo_epochs=2), check_rollout=True)
    call = Call(7, "train_batch", ("actor", batch, loss, MicroBatchPlan(max_tokens=64), "token-mean", None))
    got = there_and_back(call)
    assert isinstance(got.args[1], PackedBatch)
    assert got.args[1].meta == batch.meta
    assert same(dict(got.args[1].items), dict(batch.items))
    assert got.args[2] == loss
    assert got.args[2].config.model_fields_set == {"ppo_epochs"}
    assert got.args[3] == MicroBatchPlan(max_tokens=64)
    output = TrainOutput(1.5, {"a": float("inf")}, {}, StepOutput(float("nan"), 1e-3, True), 3)
    completions = [Completion(0, 1, list(range(40)), [-0.5] * 40, FinishReason.LENGTH)]
    request = GenerateRequest([[1, 2], list(range(30))], SamplingParams(stop=("x",), seed=3))
    info = EngineInfo(5, 7, "llama", {"attention": "packed"})
    error = Raised(1, 7, ErrorRecord("ValueError", "x", details=("a",), status=Status("forward", {"rows": 2})))
    for record in (output, completions, request, info, error, Boot(store="file:///x"), BackendKind.TRAIN):
        assert same(there_and_back(Result(0, 1, record)).value, record)


def test_models_paths_and_other_mappings() -> None:
    model = Settings(
        size=3, inner=ActorConfig(clip_grad=2.0) if "clip_grad" in ActorConfig.model_fields else ActorConfig()
    )
    assert same(there_and_back(model), model)
    assert there_and_back(Settings()).model_fields_set == set()
    assert there_and_back(Path("/a/b")) == Path("/a/b")
    assert there_and_back(torch.Size([2, 3])) == (2, 3)
    assert there_and_back(Lazy()) == {"a": 1}
    assert there_and_back(Outer.Inner(3)) == Outer.Inner(3)


class Version(str):
    __slots__ = ()


def test_subclasses_of_text_and_numbers_become_plain() -> None:
    import numpy

    got = there_and_back([Version("2.1"), numpy.float64(0.5)])
    assert got == ["2.1", 0.5]
    assert [type(v) for v in got] == [str, float]


def closure(value: int) -> Any:
    return lambda: value


class Plain:
    pass


@dataclass
class Elsewhere:
    x: int = 1


Elsewhere.__module__ = "somebody.elses"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            [1, {"a": closure(3)}],
            ["the function closure.<locals>.<lambda>", "at [1]['a']", "frozen dataclass with __call__"],
        ),
        (Plain(), ["an object of type Plain"]),
        (Plain, ["the class Plain"]),
        ({1, 2}, ["an object of type set"]),
        (
            Elsewhere(),
            ["an object of type Elsewhere", "somebody.elses.Elsewhere", f"a module of {__name__} or rlctl"],
        ),
        (torch.ones(2).to_sparse(), ["Tensor (torch.sparse_coo, on cpu)", "a dense tensor"]),
        (torch.empty(2, device="meta"), ["on meta"]),
    ],
)
def test_what_is_no_record_is_refused_with_its_place(value: Any, words: list[str]) -> None:
    with pytest.raises(WireError) as error:
        encode(value, HERE)
    assert [w for w in words if w not in str(error.value)] == []


def test_a_local_record_is_refused() -> None:
    @dataclass(frozen=True)
    class Local:
        x: int = 1

    with pytest.raises(WireError, match="a class at the top of a module"):
        encode(Local(), HERE)


def header_of(body: Any) -> bytes:
    return json.dumps([0, body]).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"c": ["os:system", {"command": "true"}]}, "not allowed here"),
        ({"c": ["rlctlx.records:Boot", {}]}, "not allowed here"),
        ({"e": ["subprocess:Popen", "x"]}, "not allowed here"),
        ({"c": ["rlctl.files:os.system", {}]}, "no record"),
        ({"c": ["rlctl.registry:create_engine", {}]}, "no record"),
        ({"M": ["rlctl.runtime.records:Boot", {}, []]}, "no record"),
        ({"c": ["rlctl.no_such_module:X", {}]}, "is not here"),
        ({"y": "load"}, "dtype"),
    ],
)
def test_a_message_makes_nothing_run_that_is_no_record(body: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        decode(header_of(body), [])


@pytest.mark.parametrize("given", [{"rank": 0, "no_such_field": 1}, {}])
def test_a_record_with_other_fields_is_of_another_version(given: dict[str, Any]) -> None:
    with pytest.raises(WireError) as caught:
        decode(header_of({"c": ["rlctl.runtime.records:Death", given]}), [])
    assert "rlctl.runtime.records:Death: " in str(caught.value.found)
    assert "same versions" in str(caught.value.wanted)


def test_reading_and_writing_leave_no_cycle_behind() -> None:
    """Else every batch would stay until the collector happens to run."""
    gc.collect()
    gc.disable()
    try:
        tensor = torch.ones(100)
        there = weakref.ref(tensor)
        header, tensors = encode({"a": tensor, "b": [1] * 20})
        del tensor
        got = decode(header, tensors)
        back = weakref.ref(got["a"])
        del tensors, got
        assert there() is None
        assert back() is None
    finally:
        gc.enable()
