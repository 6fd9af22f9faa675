"""When a row ends: end-of-sequence ids, stop token ids, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlctl.errors import EngineError

_UNKNOWN, _NO, _MAYBE = 0, 1, 2


class StopRules:
    """Decides after each step which rows are finished.

    Ids are looked up in a table, for all rows at once. Stop strings need text: a row is decoded only when its newest
    token can be the end of a stop string, which is worked out once a token id.

    Args:
        vocab_size: size of the output vocabulary.
        end_ids: ids that end a row.
        stop: stop strings.
        tokenizer: needed for stop strings.
    """

    def __init__(self, vocab_size: int, end_ids: Sequence[int], stop: Sequence[str], tokenizer: Any) -> None:
        self.ends = torch.zeros(vocab_size, dtype=torch.bool)
        inside = [i for i in end_ids if 0 <= i < vocab_size]
        self.ends[inside] = True
        self.stop = tuple(s for s in stop if s)
        self.tokenizer = tokenizer
        self._last = frozenset(s[-1] for s in self.stop)
        self._candidate = torch.full((vocab_size,), _UNKNOWN, dtype=torch.int8)
        if self.stop and tokenizer is None:
            raise EngineError(
                "stop strings need the model's tokenizer",
                found="no tokenizer",
                wanted="model.tokenizer or a model.path with one",
                next="set model.tokenizer, or stop by token id",
            )

    def finished(self, tokens: torch.Tensor, history: torch.Tensor, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Bool ``[R]``.

        Args:
            tokens: the newest token of each row ``[R]``, on the CPU.
            history: all generated tokens ``[all rows, max_tokens]``, the newest included.
            rows: which row of ``history`` each is ``[R]``.
            step: number of the newest token, from 0.
        """
        done = self.ends[tokens]
        if self.stop:
            kinds = self._candidate[tokens]
            if bool((kinds == _UNKNOWN).any()):
                self._classify(tokens[kinds == _UNKNOWN].unique().tolist())
                kinds = self._candidate[tokens]
            for i in ((kinds == _MAYBE) & ~done).nonzero()[:, 0].tolist():
                text = self.tokenizer.decode(history[rows[i], : step + 1].tolist(), skip_special_tokens=True)
                done[i] = any(s in text for s in self.stop)
        return done

    def _classify(self, ids: list[int]) -> None:
        for token in ids:
            text = self.tokenizer.decode([token], skip_special_tokens=True)
            # Empty or broken text: a part of a character, or a space that decoding alone strips. Look at the whole row.
            maybe = not text or "\ufffd" in text or any(character in self._last for character in text)
            self._candidate[token] = _MAYBE if maybe else _NO
