"""Weights from one pool to another over gloo and in shared memory, between real processes: what arrives, what is noticed, and how
it ends. Each kind of end is seen over gloo; in shared memory those that its waiting makes others, and with RLCTL_TEST_ALL_LINKS all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_toys import engine, odd_tensors, pools

from rlctl.errors import EngineError, GuardError, RlctlError
from rlctl.runtime.carriage import Transfer
from rlctl.runtime.failures import WorkerError
from rlctl.runtime.remote import RemoteEngine

pytestmark = pytest.mark.slow

BUCKET_MIB = 1
ENDS_WITHIN_S = 30.0
COLLECTIVE = Transfer("collective", BUCKET_MIB)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    pair = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*pair)


HOW = {"collective": "gloo", "host": "shared_memory"}


def sync(source: RemoteEngine, target: RemoteEngine, version: int, transfer: Transfer = COLLECTIVE) -> Any:
    return source.sync_to(target, version, share=False, verify=True, dtype=None, transfer=transfer)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RemoteEngine, RemoteEngine]]:
    """One training rank, two rollout ranks, and more engines in the same processes."""
    folder = tmp_path_factory.mktemp("logs")
    groups = pools(folder)
    try:
        yield engine(groups[0], "train"), engine(groups[1], "rollout")
    finally:
        for group in groups:
            group.close()


@pytest.mark.parametrize("wish", HOW)
def test_every_tensor_arrives_bit_for_bit_on_every_rank(pair: tuple[RemoteEngine, RemoteEngine], wish: Any) -> None:
    source, target = pair
    for version in (1, 2, 3):  # the link is used again
        source.move(str(version))
        report = sync(source, target, version, Transfer(wish, BUCKET_MIB))
        wanted = odd_tensors(version)
        total = sum(t.numel() * t.element_size() for t in wanted.values())
        assert (report.how, report.num_tensors, report.num_bytes) == (HOW[wish], len(wanted), total)
        assert total > 2**20, "more than one bucket"
        largest = max(t.numel() * t.element_size() for t in wanted.values())
        assert report.peak_bytes == 2 * 2**20 + largest
        for held in target.group.call("held", "rollout"):
            assert list(held) == list(wanted)
            assert all(same_bits(held[name], wanted[name]) for name in wanted)


def test_the_controller_brings_the_same(pair: tuple[RemoteEngine, RemoteEngine]) -> None:
    source, target = pair
    source.move("7")
    report = sync(source, target, 7, Transfer("controller", BUCKET_MIB))
    assert report.how == "controller"
    for held in target.group.call("held", "rollout"):
        assert all(same_bits(held[name], tensor) for name, tensor in odd_tensors(7).items())


def test_an_engine_takes_its_links_with_it(pair: tuple[RemoteEngine, RemoteEngine]) -> None:
    groups = pair[0].group, pair[1].group
    before = [group.call("num_links") for group in groups]
    for _ in range(2):  # the same roles again
        source, target = engine(groups[0], "train", role="warm"), engine(groups[1], "rollout", role="warm")
        assert sync(source, target, 1).how == "gloo"
        assert [group.call("num_links") for group in groups] == [[n + 1 for n in counts] for counts in before]
        target.shutdown()
        source.shutdown()
        assert [group.call("num_links") for group in groups] == before


def test_no_memory_is_kept_between_syncs(pair: tuple[RemoteEngine, RemoteEngine]) -> None:
    assert sync(*pair, 1, Transfer("host", BUCKET_MIB)).how == "shared_memory"
    for group in (pair[0].group, pair[1].group):
        for hello in group.hellos:
            assert "memfd:rlctl-weights" not in Path(f"/proc/{hello.pid}/maps").read_text()
            files = list(Path(f"/proc/{hello.pid}/fd").iterdir())
            assert not [f for f in files if f.is_symlink() and "rlctl-weights" in os.readlink(f)]


@pytest.mark.parametrize("wish", ["collective", "controller", "host"])
@pytest.mark.parametrize(
    ("side", "fault", "says"),
    [
        ("train", "misname", "not taken: {name}.other; never sent: {name}"),
        ("train", "leave out", "not taken: none; never sent: {name}"),
        ("rollout", "corrupt", "1 of 73 tensors differ, first {name}"),
        ("rollout", "stale", "first float32.scalar"),
    ],
)
def test_what_is_not_as_it_should_be_is_caught_by_name(
    pair: tuple[RemoteEngine, RemoteEngine], side: str, fault: str, says: str, wish: Any
) -> None:
    source, target = pair
    name = list(odd_tensors(0))[17]
    # The last of the ranks is the one at fault: all of them are looked at.
    bad = {"fault": fault, "at": 17, "rank": 1 if side == "rollout" else 0}
    role = f"{side}-{fault}-{wish}"
    other = engine((source if side == "train" else target).group, side, role=role, **bad)
    with pytest.raises(GuardError) as caught:
        sync(*((other, target) if side == "train" else (source, other)), 1, Transfer(wish, BUCKET_MIB))
    assert says.format(name=name) in str(caught.value)
    # Nothing is lost by it: the next sync works.
    assert sync(source, target, 9).num_tensors == 73


also_in_shared_memory = pytest.mark.parametrize("wish", HOW)
as_over_gloo = pytest.mark.parametrize("wish", HOW if os.environ.get("RLCTL_TEST_ALL_LINKS") else ["collective"])


def broken(
    wish: Any, folder: Path, train: dict[str, Any], rollout: dict[str, Any], error: type[RlctlError], **limits: float
) -> str:
    """The message of a second sync that goes wrong; both pools have ended then, soon, and nothing of them is left."""
    source_pool, target_pool = pools(folder, **limits)
    pids = [h.pid for g in (source_pool, target_pool) for h in g.hellos]
    try:
        source = engine(source_pool, "train")
        assert sync(source, engine(target_pool, "rollout", role="well"), 1, Transfer(wish, BUCKET_MIB)).how == HOW[wish]
        bad = (engine(source_pool, "train", role="a", **train), engine(target_pool, "rollout", role="b", **rollout))
        begun = time.monotonic()
        with pytest.raises(error) as caught:
            sync(*bad, 1, Transfer(wish, BUCKET_MIB))
        took = time.monotonic() - begun
    finally:
        source_pool.close()
        target_pool.close()
    message = str(caught.value)
    print(message)
    assert took < ENDS_WITHIN_S, message
    assert source_pool.closed
    assert target_pool.closed
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert f"sync 1: weights of a in pool main to b in pool gen by {HOW[wish]}" in message
    return message


@as_over_gloo
def test_a_receiver_that_raises(tmp_path: Path, wish: Any) -> None:
    message = broken(wish, tmp_path, {}, {"fault": "raise", "rank": 1}, WorkerError)
    assert message.startswith("rank 1 of pool gen failed during sync (version 1; bucket 1)")
    assert "ValueError: a fault on purpose" in message


@also_in_shared_memory
def test_a_receiver_that_refuses(tmp_path: Path, wish: Any) -> None:
    message = broken(wish, tmp_path, {}, {"fault": "refuse", "rank": 0}, EngineError)
    assert message.startswith("a refusal on purpose")
    assert "raised on rank 0 of pool gen during sync (version 1; bucket 1)" in message


@also_in_shared_memory
def test_a_receiver_that_is_killed(tmp_path: Path, wish: Any) -> None:
    message = broken(wish, tmp_path, {}, {"fault": "kill", "rank": 1}, WorkerError)
    assert message.startswith("rank 1 of pool gen died during sync (version 1; bucket 1)")
    assert "killed by SIGKILL" in message


@as_over_gloo
def test_a_receiver_that_stops_early(tmp_path: Path, wish: Any) -> None:
    message = broken(wish, tmp_path, {}, {"fault": "stop", "rank": 1}, EngineError)
    assert message.startswith("the rollout engine stopped reading weights before the last one")
    assert "pool gen during sync (version 1; bucket 1)" in message


@also_in_shared_memory
def test_a_receiver_that_hangs_ends_by_the_limit_of_a_collective(tmp_path: Path, wish: Any) -> None:
    message = broken(wish, tmp_path, {}, {"fault": "hang", "rank": 1, "at": 0}, WorkerError, timeout_s=4.0)
    assert "stood still for 4 s, the limit that runtime.collective_timeout_s sets" in message.splitlines()[0]
    assert "no answer from rank 1 of pool gen" in message


@as_over_gloo
def test_a_receiver_that_hangs_ends_by_the_limit_of_hangs(tmp_path: Path, wish: Any) -> None:
    message = broken(wish, tmp_path, {}, {"fault": "hang", "rank": 1, "at": 0}, WorkerError, hang_s=4.0)
    assert message.startswith("rank 1 of pool gen hangs during sync: no progress for 4 s")
    assert "in strike" in message


@also_in_shared_memory
def test_a_sender_that_raises(tmp_path: Path, wish: Any) -> None:
    message = broken(wish, tmp_path, {"fault": "raise"}, {}, WorkerError)
    assert message.startswith("rank 0 of pool main failed during sync (version 1")
    assert "ValueError: a fault on purpose" in message


@as_over_gloo
def test_a_sender_that_is_killed(tmp_path: Path, wish: Any) -> None:
    message = broken(wish, tmp_path, {"fault": "kill", "at": 70}, {}, WorkerError)
    assert message.startswith("rank 0 of pool main died during sync (version 1")
    assert "killed by SIGKILL" in message


@as_over_gloo
def test_a_sender_that_sends_a_tensor_twice(tmp_path: Path, wish: Any) -> None:
    name = list(odd_tensors(0))[17]
    message = broken(wish, tmp_path, {"fault": "double", "at": 17}, {}, GuardError)
    assert message.startswith(f"the training engine exports weight {name!r} twice")
    assert "raised on rank 0 of pool main during sync (version 1" in message
