"""Three ways to run a causal language model token by token, behind one small interface.

Shapes: P prompts, C copies of each, R rows still running, V vocabulary.

:class:`StaticRunner` is the quick one, :class:`DynamicRunner` uses transformers' own cache for models whose state is
more than keys and values, :class:`RecomputeRunner` works for anything that maps tokens to logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rlctl_fsdp.static_attention import ATTENTION, STATE, UnsupportedAttentionError, register_attention
from rlctl_fsdp.static_cache import StaticCache


class Runner(Protocol):
    """State of the rows that are decoded together."""

    any_length: bool
    """Prompts of several lengths may share a batch."""
    name: str
    device: torch.device

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None: ...

    @classmethod
    def attention_of(cls, module: PreTrainedModel) -> str:
        """The attention implementation that the module must be in while this runner is used."""
        ...

    def logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits ``[P, longest, V]`` of whole rows; what is right of a row's end means nothing."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], copies: int, max_new: int) -> torch.Tensor:
        """Read the prompts; returns the logits ``[P, V]`` that follow each."""
        ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed one token a row ``[R]``; returns the next logits ``[R, V]``."""
        ...

    def keep(self, index: torch.Tensor) -> None:
        """Go on with the rows of ``index`` (ascending) only."""
        ...


def cache_argument(module: PreTrainedModel) -> str:
    """What the model calls its cache: transformers renamed ``past_key_values`` to ``cache``."""
    parameters = inspect.signature(module.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def natural_attention(module: PreTrainedModel) -> str:
    """The implementation that transformers itself would choose for this model."""
    return module.get_correct_attn_implementation(None)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """``[len(rows), longest]``, filled up with 0 on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], device=device)


@contextmanager
def _last_hidden_only(module: PreTrainedModel, last: torch.Tensor) -> Iterator[None]:
    """Within, the output projection sees only position ``last[i]`` of row i: ``[P, L, V]`` logits never exist."""
    head = module.get_output_embeddings()
    if head is None:
        yield
        return
    index = torch.arange(last.shape[0], device=last.device)

    def pick(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        hidden = args[0] if args else None
        if isinstance(hidden, torch.Tensor) and hidden.ndim == 3 and hidden.shape[0] == last.shape[0]:
            return (hidden[index, last][:, None], *args[1:])
        return None

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def _pick_last(logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    if logits.shape[1] == 1:
        return logits[:, 0]
    return logits[torch.arange(last.shape[0], device=last.device), last]


def _positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)


class StaticRunner:
    """Preallocated cache; see :mod:`rlctl_fsdp.static_cache`.

    Args:
        module: in generation mode with this runner's attention.
    """

    any_length = True
    name = "static"
    prefill_tokens = 16_384
    """Bound on the padded tokens of one prefill pass."""

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.cache_name = cache_argument(module)
        self.cache: StaticCache | None = None

    @classmethod
    def attention_of(cls, module: PreTrainedModel) -> str:
        register_attention()
        return ATTENTION

    @staticmethod
    def problem(module: PreTrainedModel) -> str | None:
        """Why this runner cannot serve the model, as far as its configuration tells; None when nothing speaks against it."""
        if not module._can_set_attn_implementation():
            return "its attention cannot be exchanged"
        kinds = {type(layer) for layer in DynamicCache(config=module.config).layers}
        others = sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer})
        return f"its cache has {', '.join(others)}" if others else None

    def prefill(self, prompts: Sequence[Sequence[int]], copies: int, max_new: int) -> torch.Tensor:
        lengths = [len(p) for p in prompts]
        cache = self.cache = StaticCache(self._layers(), lengths, copies, max_new, self.device)
        parts = []
        first = 0
        while first < len(prompts):
            last, width = first, 0
            while last < len(prompts):
                width = max(width, lengths[last])
                if last > first and width * (last + 1 - first) > self.prefill_tokens:
                    break
                last += 1
            cache.prompts = (first, last)
            ids = padded(prompts[first:last], self.device)
            ends = torch.tensor(lengths[first:last], device=self.device) - 1
            with _last_hidden_only(self.module, ends):
                parts.append(_pick_last(self._forward(ids, _positions(ids)), ends))
            first = last
        cache.begin_decoding()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        cache = self.cache = StaticCache(self._layers(), [len(r) for r in rows], 1, 1, self.device)
        cache.prompts, cache.store = (0, len(rows)), False
        ids = padded(rows, self.device)
        return self._forward(ids, _positions(ids))

    def _layers(self) -> int:
        return int(self.module.config.get_text_config(decoder=True).num_hidden_layers)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        arguments: dict[str, Any] = {self.cache_name: self.cache, STATE: self.cache}
        return self.module(input_ids=ids, position_ids=positions, use_cache=True, **arguments).logits

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.cache is not None
        return self._forward(tokens[:, None], self.cache.advance())[:, -1]

    def keep(self, index: torch.Tensor) -> None:
        assert self.cache is not None
        self.cache.keep(index)

    def check_windows(self) -> None:
        """After a pass: each layer that its configuration calls sliding must have asked for its window.

        Raises:
            UnsupportedAttentionError: one did not, so that this path would show it too much beyond the window.
        """
        assert self.cache is not None
        for i, layer in enumerate(DynamicCache(config=self.module.config).layers):
            wanted = getattr(layer, "sliding_window", None) if isinstance(layer, DynamicSlidingWindowLayer) else None
            if self.cache.seen_windows.get(i) != wanted:
                raise UnsupportedAttentionError(
                    f"layer {i} asks for the window {self.cache.seen_windows.get(i)}, its configuration says {wanted}"
                )


def _plain_logits(module: PreTrainedModel, rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    assert len({len(r) for r in rows}) == 1, "rows of one length: without a mask, padding would be read"
    return module(input_ids=torch.tensor([list(r) for r in rows], device=device), use_cache=False).logits


class DynamicRunner:
    """transformers' own cache, prompts of one length, hence no padding whatever the model keeps as state."""

    any_length = False
    name = "dynamic"

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.cache_name = cache_argument(module)
        self.cache: DynamicCache | None = None
        self.position = 0

    @classmethod
    def attention_of(cls, module: PreTrainedModel) -> str:
        return natural_attention(module)

    def logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return _plain_logits(self.module, rows, self.device)

    def prefill(self, prompts: Sequence[Sequence[int]], copies: int, max_new: int) -> torch.Tensor:
        ids = torch.tensor([list(p) for p in prompts], device=self.device)
        self.cache = DynamicCache(config=self.module.config)
        logits = self._forward(ids, torch.arange(ids.shape[1], device=self.device)[None])
        self.position = ids.shape[1] - 1
        if copies > 1:
            self._reorder(torch.arange(len(prompts), device=self.device).repeat_interleave(copies))
        return logits

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        arguments: dict[str, Any] = {self.cache_name: self.cache}
        positions = positions.expand(ids.shape[0], -1)
        return self.module(input_ids=ids, position_ids=positions, use_cache=True, **arguments).logits[:, -1]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.position += 1
        return self._forward(tokens[:, None], torch.tensor([[self.position]], device=self.device))

    def keep(self, index: torch.Tensor) -> None:
        self._reorder(index)

    def _reorder(self, index: torch.Tensor) -> None:
        assert self.cache is not None
        # The one batch operation that layers of every kind have; it selects, so an index may also come twice.
        self.cache.reorder_cache(cast(torch.LongTensor, index))


class RecomputeRunner:
    """No cache: every step reads the rows from their beginning. Slow, and right for any model."""

    any_length = False
    name = "recompute"

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self.module = module
        self.device = device
        self.ids = torch.zeros(0, 0, dtype=torch.long, device=device)

    @classmethod
    def attention_of(cls, module: PreTrainedModel) -> str:
        return natural_attention(module)

    def logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return _plain_logits(self.module, rows, self.device)

    def prefill(self, prompts: Sequence[Sequence[int]], copies: int, max_new: int) -> torch.Tensor:
        ids = torch.tensor([list(p) for p in prompts], device=self.device)
        self.ids = ids.repeat_interleave(copies, 0)
        return self._forward(ids)

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.module(input_ids=ids, use_cache=False).logits[:, -1]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        return self._forward(self.ids)

    def keep(self, index: torch.Tensor) -> None:
        self.ids = self.ids.index_select(0, index)
