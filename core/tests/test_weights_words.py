"""Ends of a link in threads of one process: words and buckets of many syncs and receivers do not get into one another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from sync_toys import odd_tensors

from rlctl.runtime import meeting
from rlctl.runtime.failures import PeerFailedError
from rlctl.runtime.link import PackedLink, SharedMemoryLink
from rlctl.runtime.transfer import LinkEnd

RECEIVERS = 3
Links = list[PackedLink]


@pytest.fixture(scope="module", params=[PackedLink, SharedMemoryLink], ids=["gloo", "shared memory"])
def links(request: pytest.FixtureRequest) -> Iterator[Links]:
    """The sender's end first. Any number of syncs goes over them, also after one that failed."""
    holder, url = meeting.reserve("127.0.0.1")
    with ThreadPoolExecutor(1 + RECEIVERS) as threads:
        ends = [
            LinkEnd(url, rank, 1 + RECEIVERS, "cpu", 20.0, 64 * 1024, f"end {rank}") for rank in range(1 + RECEIVERS)
        ]
        found = list(threads.map(request.param, ends))
        holder.close()
        yield found
        for link in found:
            link.close()


def together(links: Links, weights: Callable[[], Iterator[Any]], number: int, *, bad: int | None = None) -> list[Any]:
    """What each end has or raises; receiver ``bad`` fails after its third tensor."""

    def run(rank: int) -> Any:
        try:
            if rank == 0:
                return links[0].send(weights(), number)
            got: dict[str, torch.Tensor] = {}
            for name, tensor in links[rank].receive(number):
                got[name] = tensor.clone()
                if rank == bad and len(got) == 3:
                    links[rank].give_up("it is broken")
                    return "gave up"
        except Exception as error:
            return error
        return got

    with ThreadPoolExecutor(len(links)) as threads:
        return list(threads.map(run, range(len(links))))


def test_many_syncs_of_many_receivers(links: Links) -> None:
    kept: set[int] = set()
    for number in range(6):  # from 0: the numbers are nobody else's keys
        wanted = odd_tensors(number)
        sent, *received = together(links, lambda w=wanted: iter(w.items()), number)
        assert sent is None
        for got in received:
            assert list(got) == list(wanted)
            assert all(got[n].dtype == t.dtype and got[n].shape == t.shape for n, t in wanted.items())
            assert all(torch.equal(got[n], t) for n, t in wanted.items() if n != "special")
        kept.add(links[0]._words.num_keys())
    assert max(kept) - min(kept) <= 1, "the words of a sync are deleted with the next one"


def test_nothing_and_what_has_no_bytes(links: Links) -> None:
    assert together(links, lambda: iter(()), 10) == [None, *[{}] * RECEIVERS]
    sent, *received = together(links, lambda: iter([("empty", torch.empty(0, 5)), ("none", torch.empty(0))]), 11)
    assert sent is None
    assert all(list(got) == ["empty", "none"] and got["empty"].shape == (0, 5) for got in received)


def test_a_receiver_that_gives_up_ends_all_of_them_and_the_next_sync_works(links: Links) -> None:
    sent, first, second, third = together(links, lambda: iter(odd_tensors(1).items()), 20, bad=2)
    for error in (sent, first, third):
        assert isinstance(error, PeerFailedError)
        assert str(error) == "end 2: it is broken"
    assert second == "gave up"
    assert together(links, lambda: iter([("w", torch.ones(3))]), 21)[0] is None


def test_an_export_that_fails_ends_all_receivers_and_the_next_sync_works(links: Links) -> None:
    def weights() -> Iterator[Any]:
        for i, named in enumerate(odd_tensors(1).items()):
            if i == 50:
                raise ValueError("no more")
            yield named

    sent, *received = together(links, weights, 30)
    assert isinstance(sent, ValueError)
    assert [str(error) for error in received] == ["end 0: ValueError: no more"] * RECEIVERS
    assert together(links, lambda: iter([("w", torch.ones(3))]), 31)[0] is None


def test_the_sender_packs_on_while_engines_load(links: Links) -> None:
    # The receivers stop in their first bucket until the sender packs the second.
    asked = threading.Event()

    def weights() -> Iterator[Any]:
        for i in range(8):
            if i == 6:
                asked.set()
            yield f"w{i}", torch.full((4 * 1024,), float(i))  # four fill a bucket

    def receive(rank: int) -> list[str]:
        names: list[str] = []
        for name, _ in links[rank].receive(40):
            names.append(name)
            assert asked.wait(10.0), "the sender waits for the receivers before it packs on"
        return names

    with ThreadPoolExecutor(len(links)) as threads:
        sent = threads.submit(links[0].send, weights(), 40)
        got = [threads.submit(receive, rank) for rank in range(1, 1 + RECEIVERS)]
        assert all(one.result() == [f"w{i}" for i in range(8)] for one in got)
        assert sent.result() is None
    assert links[0].peak_bytes == 2 * 64 * 1024 + 16 * 1024
    # Where all see the same buffers, a receiver reads these tensors there.
    assert links[1].peak_bytes == 2 * 64 * 1024 + (0 if links[1].carrier.in_place else 16 * 1024)
