"""Which rows a step takes."""

from __future__ import annotations

import random
from typing import Any

from rlctl.errors import CheckpointError, DataError


class BatchSampler:
    """Batches of row positions, epoch after epoch, resumable exactly.

    Epochs follow each other without a gap: a batch at the end of an epoch is filled from the next one, so every row is
    seen once an epoch whatever the batch size. A row that is already in such a batch comes later in its new epoch: no
    batch holds a row twice. The order depends on (seed, epoch) alone, in every process.

    Args:
        num_rows: rows of the dataset.
        batch_size: rows of a batch.
        shuffle: a new order each epoch; otherwise the order of the file.
        seed: of the shuffle.
        setting: the key that ``batch_size`` comes from, for messages.

    Raises:
        DataError: fewer rows than one batch.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        *,
        setting: str = "data.train_batch_size",
    ) -> None:
        assert batch_size > 0, f"batch_size {batch_size}"
        if num_rows < batch_size:
            raise DataError(
                "the training data has fewer rows than one batch",
                found=f"{num_rows} rows",
                wanted=f"at least {setting} = {batch_size}",
                next=f"{setting}={num_rows}, or more rows" if num_rows else "add rows to data.train_files",
            )
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._setting = setting
        self._start(epoch=0, position=0, carry=[])

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next batch begins in."""
        return self._epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches after which every row has been seen at least once."""
        return -(-self._num_rows // self._batch_size)

    def next(self) -> list[int]:
        """The next batch: ``batch_size`` different positions in ``range(num_rows)``."""
        batch = self._order[self._position : self._position + self._batch_size]
        self._position += len(batch)
        short = self._batch_size - len(batch)
        if short or self._position == self._num_rows:
            self._start(epoch=self._epoch + 1, position=short, carry=batch if short else [])
            batch = batch + self._order[:short]
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Plain data that brings a sampler of the same arguments to the same place."""
        return {
            "num_rows": self._num_rows,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "carry": list(self._carry),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            CheckpointError: the state is of another dataset size, batch size, seed or shuffle setting.
        """
        mine = self.state_dict()
        names = {
            "num_rows": "the rows of data.train_files",
            "batch_size": self._setting,
            "shuffle": "data.shuffle",
            "seed": "trainer.seed",
        }
        for key, setting in names.items():
            if state.get(key) != mine[key]:
                raise CheckpointError(
                    "the checkpoint's place in the data does not fit this run: rows would be replayed or skipped",
                    found=f"{setting}: {mine[key]}",
                    wanted=f"{state.get(key)}, as when the checkpoint was written",
                    next="resume with the same data settings, or start anew with trainer.resume_mode=disable",
                )
        self._start(epoch=state["epoch"], position=state["position"], carry=list(state["carry"]))

    def _start(self, epoch: int, position: int, carry: list[int]) -> None:
        """Begin ``epoch``; ``carry`` are the rows of the last epoch in the batch that reaches into this one."""
        self._epoch, self._position, self._carry = epoch, position, carry
        order = list(range(self._num_rows))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        if carry:
            held = set(carry)
            short = self._batch_size - len(carry)
            head = [row for row in order if row not in held][:short]
            taken = set(head)
            order = head + [row for row in order if row not in taken]
        self._order = order
