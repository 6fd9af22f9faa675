"""Batches: every row once an epoch, no row twice in a batch, exact resume."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.data.sampler import BatchSampler
from rlctl.errors import CheckpointError, DataError

SIZES = st.integers(1, 40).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows)))


@settings(max_examples=80, deadline=None)
@given(SIZES, st.booleans(), st.integers(0, 5))
def test_every_row_once_an_epoch_and_never_twice_in_a_batch(sizes: tuple[int, int], shuffle: bool, seed: int) -> None:
    rows, batch = sizes
    sampler = BatchSampler(rows, batch, shuffle, seed)
    stream: list[int] = []
    for _ in range(3 * sampler.steps_per_epoch + 2):
        assert sampler.epoch == len(stream) // rows
        taken = sampler.next()
        assert len(set(taken)) == batch
        stream += taken
    for start in range(0, len(stream) - rows + 1, rows):
        assert Counter(stream[start : start + rows]) == Counter(range(rows))


@settings(max_examples=80, deadline=None)
@given(SIZES, st.booleans(), st.integers(0, 12))
def test_resume_is_exact(sizes: tuple[int, int], shuffle: bool, steps: int) -> None:
    rows, batch = sizes
    sampler = BatchSampler(rows, batch, shuffle, seed=7)
    for _ in range(steps):
        sampler.next()
    # Checkpoints keep it as JSON.
    state = json.loads(json.dumps(sampler.state_dict()))
    again = BatchSampler(rows, batch, shuffle, seed=7)
    again.load_state_dict(state)
    assert again.epoch == sampler.epoch
    assert [again.next() for _ in range(8)] == [sampler.next() for _ in range(8)]


def test_order_without_shuffle_and_epochs_differ_with_it() -> None:
    plain = BatchSampler(5, 2, shuffle=False)
    assert [plain.next() for _ in range(3)] == [[0, 1], [2, 3], [4, 0]]
    shuffled = BatchSampler(50, 50, shuffle=True, seed=1)
    first, second = shuffled.next(), shuffled.next()
    assert first != second
    assert first != list(range(50))
    assert BatchSampler(50, 50, shuffle=True, seed=2).next() != first


def test_steps_per_epoch_sees_every_row() -> None:
    assert BatchSampler(7, 3).steps_per_epoch == 3
    assert BatchSampler(6, 3).steps_per_epoch == 2


@pytest.mark.parametrize("rows", [0, 3])
def test_fewer_rows_than_a_batch(rows: int) -> None:
    with pytest.raises(DataError) as caught:
        BatchSampler(rows, 4)
    assert caught.value.found == f"{rows} rows"
    assert "data.train_batch_size = 4" in str(caught.value.wanted)


@pytest.mark.parametrize(("rows", "batch", "seed"), [(21, 4, 0), (20, 5, 0), (20, 4, 1)])
def test_a_state_of_another_run_is_refused(rows: int, batch: int, seed: int) -> None:
    state = BatchSampler(20, 4, True, 0).state_dict()
    with pytest.raises(CheckpointError):
        BatchSampler(rows, batch, True, seed).load_state_dict(state)
