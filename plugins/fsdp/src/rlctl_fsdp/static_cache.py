"""A preallocated key/value cache that any Hugging Face decoder can write to.

Shapes: P prompts, C copies of each, R = P x C rows, K key/value heads, L columns, D head size.

Columns. Every row owns columns ``0 .. width`` for its prompt (filled from the left; what is right of its end is hidden)
and ``width + t`` for its t-th generated token. Prompts are padded on the right, so prefill is plainly causal and needs
no mask; a new token is one slice write; with prompts of one length nothing is ever hidden.

Storage. *Joined*: one buffer ``[R, K, L, D]``, the prompt's part repeated for each copy; it is what fused kernels read.
*Shared*: prompts once, ``[P, K, width, D]``, and generated tokens ``[R, K, L - width, D]``. Rows of one prompt then read
it together, as one larger matrix product, and nothing is repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer


class StaticLayer(DynamicLayer):
    """One layer's buffers. What the model's own code asks of a cache is answered from the owner's columns."""

    def __init__(self, owner: StaticCache) -> None:
        super().__init__()
        self.owner = owner
        self.prompt_keys: torch.Tensor | None = None
        self.prompt_values: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        owner = self.owner
        owner.current = self
        if not owner.store:
            return key_states, value_states
        if not self.is_initialized:
            self._allocate(key_states, value_states)
        if owner.prompts is not None:
            self._write_prompts(key_states, value_states)
            return key_states, value_states
        assert self.keys is not None
        assert self.values is not None
        rows, column = key_states.shape[0], owner.column - owner.first_own
        self.keys[:rows, :, column : column + 1] = key_states
        self.values[:rows, :, column : column + 1] = value_states
        return self.keys[:rows, :, : column + 1], self.values[:rows, :, : column + 1]

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        owner = self.owner
        owner.decide_storage(key)
        own = owner.columns - owner.first_own
        self.keys = key.new_empty(owner.rows, key.shape[1], own, key.shape[3])
        self.values = value.new_empty(owner.rows, value.shape[1], own, value.shape[3])
        self.is_initialized = True
        if owner.shared:
            prompts = owner.rows // owner.copies
            self.prompt_keys = key.new_empty(prompts, key.shape[1], owner.width, key.shape[3])
            self.prompt_values = value.new_empty(prompts, value.shape[1], owner.width, value.shape[3])

    def _write_prompts(self, key: torch.Tensor, value: torch.Tensor) -> None:
        owner = self.owner
        assert owner.prompts is not None
        first, last = owner.prompts
        length, width = key.shape[2], owner.width
        for new, joined, shared in ((key, self.keys, self.prompt_keys), (value, self.values, self.prompt_values)):
            assert joined is not None
            if shared is not None:
                target, source = shared[first:last], new
            else:
                target, source = joined.view(-1, owner.copies, *joined.shape[1:])[first:last], new.unsqueeze(1)
            target[..., :length, :] = source
            # Hidden columns are multiplied by a weight of zero: they must hold numbers, not what malloc left.
            target[..., length:width, :] = 0

    def keep(self, index: torch.Tensor, prompts: torch.Tensor | None, used: int) -> None:
        """Move the rows of ``index`` to the front; keep only ``prompts`` of the shared part."""
        count = index.shape[0]
        for buffer in (self.keys, self.values):
            assert buffer is not None
            # index_select first: rows move downwards and must not be overwritten before they are read.
            buffer[:count, :, :used] = buffer[:, :, :used].index_select(0, index)
        if prompts is not None and self.prompt_keys is not None and self.prompt_values is not None:
            self.prompt_keys = self.prompt_keys.index_select(0, prompts)
            self.prompt_values = self.prompt_values.index_select(0, prompts)

    def get_seq_length(self) -> int:
        return self.owner.column

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.owner.column + length, 0


class StaticCache(Cache):
    """Keys and values of the rows that are decoded together.

    Args:
        num_layers: attention layers of the model.
        lengths: prompt lengths, one a prompt.
        copies: rows a prompt.
        max_new: generated tokens that fit.
        device: where the buffers live.
    """

    share_from = 8192
    """Prompt columns x head size from which on prompts are stored once. Below, the second matrix product costs more than
    the keys that are not read again."""

    def __init__(self, num_layers: int, lengths: list[int], copies: int, max_new: int, device: torch.device) -> None:
        self.static_layers = [StaticLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.static_layers))
        self.copies = copies
        self.width = max(lengths)
        # The last sampled token is never fed back, so it needs no column.
        self.columns = self.width + max(max_new - 1, 0)
        self.rows = len(lengths) * copies
        self.device = device
        self.lengths = torch.tensor(lengths, device=device).repeat_interleave(copies)
        self.ragged = min(lengths) != self.width
        self.prompts: tuple[int, int] | None = None
        """During prefill: the range of prompts that the running forward pass holds."""
        self.store = True
        """False: only score what is given, keep nothing."""
        self.shared: bool | None = None
        self.slots: torch.Tensor | None = None
        """Shared storage after rows have left: place of each row in the grid ``[prompts, copies]``; None: row i is at i."""
        self.column = 0
        self.current: StaticLayer | None = None
        """The layer whose attention runs."""
        self.seen_windows: dict[int, int | None] = {}
        """Layer index -> the sliding window that its attention asked for."""
        self._bias: torch.Tensor | None = None
        self._step_bias: dict[int | None, torch.Tensor | None] = {}

    def decide_storage(self, like: torch.Tensor) -> None:
        """Shared where attention is plain matrix products in float32 (see :mod:`rlctl_fsdp.static_attention`)."""
        if self.shared is None:
            plain = like.dtype is torch.float32 and like.device.type == "cpu"
            self.shared = plain and self.copies > 1 and self.width * like.shape[-1] >= self.share_from

    @property
    def first_own(self) -> int:
        """The column that is first in a row's own buffers."""
        return self.width if self.shared else 0

    def begin_decoding(self) -> None:
        self.prompts = None
        self.column = self.width - 1

    def advance(self) -> torch.Tensor:
        """Move to the next column; returns the positions ``[R, 1]`` of the tokens that go there."""
        self.column += 1
        self._step_bias.clear()
        return (self.lengths + (self.column - self.width))[:, None]

    def keep(self, index: torch.Tensor) -> None:
        """Keep the rows of ``index`` (ascending), moving them to the front of the buffers."""
        prompts = self._regroup(index) if self.shared else None
        used = self.column + 1 - self.first_own
        for layer in self.static_layers:
            layer.keep(index, prompts, used)
        self.lengths = self.lengths.index_select(0, index)
        if self._bias is not None:
            self._bias = self._bias.index_select(0, index)
        self._step_bias.clear()

    def _regroup(self, index: torch.Tensor) -> torch.Tensor | None:
        """Make the grid as small as the rows that stay allow; returns the prompts that stay, None when all do."""
        before = index if self.slots is None else self.slots.index_select(0, index)
        prompts, group, counts = torch.unique_consecutive(
            before // self.copies, return_inverse=True, return_counts=True
        )
        whole = self.static_layers[0].prompt_keys
        assert whole is not None
        self.copies = int(counts.max())
        rank = torch.arange(len(index), device=index.device) - (counts.cumsum(0) - counts)[group]
        self.slots = None if int(counts.min()) == self.copies else group * self.copies + rank
        return None if len(prompts) == whole.shape[0] else prompts

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask ``[R, 1, 1, columns in use]``, or None when each row sees them all."""
        if window is not None and self.column + 1 <= window:
            window = None
        if window not in self._step_bias:
            self._step_bias[window] = self._make_bias(window, dtype)
        return self._step_bias[window]

    def _make_bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        used = self.column + 1
        if window is None:
            if not self.ragged:
                return None
            if self._bias is None:
                columns = torch.arange(self.columns, device=self.device)
                self._bias = _additive((columns >= self.lengths[:, None]) & (columns < self.width), dtype)
            return self._bias[..., :used]
        columns = torch.arange(used, device=self.device)
        lengths = self.lengths[:, None]
        position = torch.where(columns < self.width, columns, lengths + (columns - self.width))
        current = lengths + (self.column - self.width)
        return _additive(((columns >= lengths) & (columns < self.width)) | (current - position >= window), dtype)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return bias[:, None, None]
