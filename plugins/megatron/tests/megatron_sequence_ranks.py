"""One rank of a group of four: sequences over cp and vocabularies over tp against one process. Started by
test_megatron_sequence_ranks.py; what both sides need is shared with the tests of one process.

Every figure is the largest difference from one process, as a share of the largest number there (at least 1).

Shapes: N tokens, P scored, f on this rank, V vocabulary, D hidden, h heads, g key/value heads, d head size.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from rlctl.algorithms.losses import PolicyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.config.schema import ActorConfig, PolicyLossConfig
from rlctl.normalizer import item_weights
from rlctl.readers import DenseReader, DenseValueReader
from rlctl.topology import resolve
from rlctl_megatron import attention, reader, standins, token_stats
from rlctl_megatron.attention import PackedAttention
from rlctl_megatron.layout import Laid, lay_out
from rlctl_megatron.mesh import Place, leave, settle
from rlctl_megatron.reader import ValueReader, VocabParallelReader, predicting
from rlctl_megatron.token_stats import VocabShard

LENGTHS = (5, 1, 9, 2, 2, 13)
D = 16
Figures = dict[str, float]


# ---- what a case is made of -----------------------------------------------------------------------------------------
def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def draw_batch(lengths: Sequence[int], vocab: int, temperature: float = 1.0) -> PackedBatch:
    generator = torch.Generator().manual_seed(len(lengths))
    ids = [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]
    masks = [(torch.rand(n, generator=generator) < 0.7) & (torch.arange(n) > 0) for n in lengths]
    return pack({"input_ids": ids, "loss_mask": masks}, meta={"temperature": temperature})


def sources(batch: PackedBatch, place: Place, sp: bool) -> torch.Tensor:
    """``[f]`` which token of the batch lies where on this rank."""
    counted = batch.with_items(input_ids=torch.arange(batch.num_items))
    return lay_out(counted, place.device, place, sp).input_ids[0]


def everything(found: Any, batch: PackedBatch, vocab: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(one number through every method that has a gradient, with uneven weights; what the methods returned)."""
    ids = batch.items["input_ids"]
    w = torch.linspace(0.5, 2.0, batch.num_items, device=ids.device)
    both = found.log_prob_and_entropy()
    at = found.log_prob_at(torch.stack([ids, (ids + 5) % vocab, (ids * 7 + 1) % vocab, ids], -1))
    plain, other, entropy = found.log_prob(), found.log_prob((ids + 3) % vocab), found.entropy()
    number = (w * plain).sum() + (w.flip(0) * entropy).sum() + (w * both[0].exp()).sum() + (both[1] ** 2).sum()
    number = number + (torch.stack([w, -w, w**2, w.flip(0)], -1) * at).sum() + (w * other).sum()
    rows = [sequence_loss(found, batch, name) for name in ("gspo", "geo_mean")]
    return number / batch.num_items + sum(rows), [plain, other, entropy, *both, at, torch.stack(rows)]


def moved(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """The batch with its items on ``device``."""
    return batch.with_items(**{name: values.to(device) for name, values in batch.items.items()})


def sequence_loss(found: Any, batch: PackedBatch, loss_mode: str) -> torch.Tensor:
    """rlctl's own loss of whole rows, with bounds that some rows are within."""
    generator, plain = torch.Generator().manual_seed(9), found.log_prob().detach()
    noise, advantages = (torch.randn(n, generator=generator) for n in (batch.num_items, batch.num_rows))
    # As an engine has it: made on the host, its items then on the device.
    host = moved(batch, torch.device("cpu")).with_items(advantages=batch.spread(advantages))
    host = host.with_items(item_weight=item_weights(host, "seq-mean-token-mean"))
    ready = moved(host, plain.device).with_items(old_log_probs=plain + 0.5 * noise.to(plain))
    section = PolicyLossConfig(loss_mode=loss_mode, clip_ratio_low=0.3, clip_ratio_high=0.4)
    return PolicyLoss(ActorConfig(policy_loss=section))(found, ready).loss


def off_by(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Largest difference of any pair, as a share of the largest number (at least 1); nan counts as endless."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        if a.numel():
            off = float((a.detach().double() - b.detach().double()).abs().max()) / max(
                1.0, float(b.detach().abs().max())
            )
            worst = max(worst, off if off == off else float("inf"))
    return worst


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], window: int
) -> torch.Tensor:
    """``[N, h, d]``: every token against every other, and a mask."""
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(row))[:, None] - torch.arange(len(row))
    seen = (row[:, None] == row) & (distance >= 0) & ((distance <= window) | (window < 0))
    copies = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def attention_module(
    heads: int, kv_heads: int, size: int, cp: int = 1, group: Any = None, window: int = -1, **settings: Any
) -> PackedAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * size, num_attention_heads=heads, num_query_groups=kv_heads,
        context_parallel_size=cp, use_cpu_initialization=True,
        **{"attention_dropout": 0.0, "window_size": (window, 0) if window >= 0 else None, **settings},
    )  # fmt: skip
    return PackedAttention(config, 1, AttnMaskType.causal, "self", pg_collection=SimpleNamespace(cp=group))


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(module, name)
    setattr(module, name, value)
    attention._plan.cache_clear()
    try:
        yield
    finally:
        setattr(module, name, old)
        attention._plan.cache_clear()


# ---- comparisons ------------------------------------------------------------------------------------------------
def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _summed(t: torch.Tensor, *groups: dist.ProcessGroup | None) -> torch.Tensor:
    t = t.clone()
    for group in groups:
        if group is not None:
            dist.all_reduce(t, group=group)
    return t


def _hidden(full: torch.Tensor, batch: PackedBatch, place: Place, sp: bool) -> torch.Tensor:
    """``[f, 1, D]`` of the last stage (``[f / tp, 1, D]`` with sp)."""
    mine = full[sources(batch, place, sp)][:, None]
    return mine.chunk(place.topology.tp)[place.tp_rank] if sp else mine


def compare_reader(
    place: Place,
    vocab: int,
    sp: bool = False,
    temperature: float = 1.0,
    keep_bytes: int = 0,
    chunk: int = 3,
    lengths: Sequence[int] = LENGTHS,
    scale: float = 0.5,
    forget_start: bool = False,
    reduce_gradient: bool = True,
) -> Figures:
    """The vocab-parallel reader against the dense one."""
    batch = draw_batch(lengths, vocab, temperature)
    full = draw(batch.num_items, D, seed=1)
    weight = draw(vocab, D, seed=2) * scale
    h0, w0 = _leaves(full, weight)
    dense = DenseReader(h0 @ w0.T, batch)
    number, want = everything(dense, batch, vocab)
    number.backward()

    tp = place.topology.tp
    rows = -(-vocab // tp)
    padded = torch.cat([weight, weight.new_zeros(rows * tp - vocab, D)])
    start = rows * place.tp_rank
    h1, w1 = _leaves(full, padded[start : start + rows])
    laid = lay_out(batch, place.device, place, sp)
    with replaced(token_stats, "chunk_rows", lambda *_: chunk):
        picked = predicting(_hidden(h1, batch, place, sp), laid, place.tp_group, sp, vocab_parallel=reduce_gradient)
        shard = VocabShard(w1, vocab, 0 if forget_start else start, place.tp_group, temperature)
        found = VocabParallelReader(picked, laid, batch.items["input_ids"], shard, place.cp_group, keep_bytes)
        number, got = everything(found, batch, vocab)
        number.backward()
        top, want_top = found.topk(min(3, vocab)), dense.topk(min(3, vocab))
        squares = off_by([found.sum_p2()], [dense.sum_p2()])
    assert found._raw is None or found._raw.nbytes <= keep_bytes, "kept more than was allowed"
    weight_grad = torch.cat([_grad(w0), torch.zeros_like(padded[vocab:])])[start : start + rows]
    return {
        "values": off_by(got, want),
        "hidden": off_by([_summed(_grad(h1), place.cp_group, place.tp_group if sp else None)], [_grad(h0)]),
        "weight": off_by([_summed(_grad(w1), place.cp_group)], [weight_grad]),
        "top": off_by(top[:1], want_top[:1]),
        "squares": squares,
        "top ids": float((top[1] != want_top[1]).sum()),
    }


def compare_values(place: Place, sp: bool = False, as_if_parallel: bool = False) -> Figures:
    """The value reader against the dense one."""
    batch = draw_batch(LENGTHS, 11)
    w = torch.linspace(0.5, 2.0, batch.num_items)
    full, weight = draw(batch.num_items, D, seed=3), draw(1, D, seed=4)
    h0, w0 = _leaves(full, weight)
    want = DenseValueReader((h0 @ w0.T)[:, 0], batch).values()
    (w * want**2).sum().backward()
    h1, w1 = _leaves(full, weight)
    laid = lay_out(batch, place.device, place, sp)
    picked = predicting(_hidden(h1, batch, place, sp), laid, place.tp_group, sp, vocab_parallel=as_if_parallel)
    got = ValueReader(picked, laid, w1, place.cp_group).values()
    (w * got**2).sum().backward()
    return {
        "values": off_by([got], [want]),
        "hidden": off_by([_summed(_grad(h1), place.cp_group, place.tp_group if sp else None)], [_grad(h0)]),
        "weight": off_by([_summed(_grad(w1), place.cp_group)], [_grad(w0)]),
    }


def compare_attention(
    place: Place,
    window: int = -1,
    kv_heads: int = 2,
    lengths: Sequence[int] = LENGTHS,
    sp: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Figures:
    """Packed attention of this rank's tokens against all tokens in one process, in double."""
    batch = draw_batch(lengths, 11)
    n, heads, size = batch.num_items, 4, 8
    full = [draw(n, count, size, seed=5 + i, dtype=dtype) / 2 for i, count in enumerate((heads, kv_heads, kv_heads))]
    weights = draw(n, heads, size, seed=9, dtype=dtype)
    one = _leaves(*(t.double() for t in full))
    want = plain_attention(one[0], one[1], one[2], lengths, window)
    (want * weights).sum().backward()

    mine = _leaves(*full)
    laid = lay_out(batch, place.device, place, sp)
    at = sources(batch, place, sp)
    real = torch.ones_like(at, dtype=torch.bool) if laid.padding is None else ~laid.padding[0]
    module = attention_module(heads, kv_heads, size, place.topology.cp, place.cp_group, window)
    q, k, v = (t[at] for t in mine)
    # What filling holds must not matter: endless numbers would spread wherever they are looked at.
    k, v = (torch.where(real[:, None, None], t, 1e4) for t in (k, v))
    out = module(q, k, v, None, packed_seq_params=laid.packed).view(len(at), heads, size)
    (out[real] * weights[at[real]]).sum().backward()
    return {
        "values": off_by([out[real]], [want[at[real]]]),
        "gradients": off_by([_summed(_grad(t), place.cp_group) for t in mine], [_grad(t) for t in one]),
    }


# ---- mistakes ---------------------------------------------------------------------------------------------------
class _SumOfAll(torch.autograd.Function):
    """As ``reader.assemble``, but the gradient of every cp rank's loss is summed."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, index: torch.Tensor, total: int, group: Any) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(index)
        whole = values.new_zeros((total, *values.shape[1:])).index_copy_(0, index, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


class _OwnGradient(torch.autograd.Function):
    """As ``attention.gather_tokens``, but a rank keeps the gradient of its own queries only."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.part = slice(group.rank() * len(mine), (group.rank() + 1) * len(mine))
        everyone = mine.new_empty((group.size() * len(mine), *mine.shape[1:]))
        dist.all_gather_into_tensor(everyone, mine.contiguous(), group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad[ctx.part], None


def _largest_not_shared(place: Place) -> Figures:
    # Large logits: with small ones every shard has about the same largest.
    with replaced(token_stats, "_largest", lambda values, group: values):
        return compare_reader(place, 37, scale=2.0)


def _gradient_summed_over_cp(place: Place) -> Figures:
    with replaced(reader, "assemble", _SumOfAll.apply):
        return compare_reader(place, 37)


def _keys_keep_own_gradient(place: Place) -> Figures:
    with replaced(attention, "gather_tokens", _OwnGradient.apply):
        return compare_attention(place)


def _chunks_in_plain_order(place: Place) -> Figures:
    def plain(bounds: Any, cp: int, rank: int) -> Any:
        return torch.arange(int(bounds[-1])).chunk(cp)[rank].numpy()

    with replaced(attention, "zigzag", plain):
        return compare_attention(place)


def overwritten(place: Place) -> Figures:
    """How far logits are from what they were, after megatron's own function and after a reader that keeps them."""
    batch = draw_batch(LENGTHS, 40)
    laid = lay_out(batch, place.device, place, sp=False)
    hidden, weight = _leaves(draw(laid.positions.numel(), D, seed=1), draw(10, D, seed=2 + place.tp_rank))
    shard = VocabShard(weight, 40, 10 * place.tp_rank, place.tp_group)
    found = VocabParallelReader(hidden, laid, batch.items["input_ids"], shard, keep_bytes=1 << 20)
    number, _ = everything(found, batch, 40)
    kept = found._raw
    assert kept is not None
    inputs = [kept, hidden, weight]
    before = [t.detach().clone() for t in inputs]
    number.backward()
    everything(found, batch, 40)[0].backward()
    found.topk(3)
    ours = off_by(inputs, before)
    logits = before[0].clone()
    vocab_parallel_cross_entropy(logits, batch.items["input_ids"][laid.positions])
    return {"ours": ours, "megatron's": off_by([logits], before[:1])}


# ---- the cases --------------------------------------------------------------------------------------------------
LAYOUTS: dict[str, dict[str, int]] = {
    "tp4": {"tp": 4},
    "tp2": {"tp": 2, "dp_shard": 2},
    "cp4": {"cp": 4},
    "cp2": {"cp": 2, "dp_shard": 2},
    "tp2cp2": {"tp": 2, "cp": 2},
}
CASES: dict[str, tuple[str, Callable[[Place], Figures]]] = {
    "tp2 reader": ("tp2", lambda p: compare_reader(p, 37)),
    "tp2 reader with sp": ("tp2", lambda p: compare_reader(p, 37, sp=True, temperature=0.7)),
    "tp2 reader of large logits": ("tp2", lambda p: compare_reader(p, 37, scale=3.0)),
    "tp2 values": ("tp2", lambda p: compare_values(p)),
    "tp2 values with sp": ("tp2", lambda p: compare_values(p, sp=True)),
    "tp4 reader": ("tp4", lambda p: compare_reader(p, 37, temperature=1.3)),
    "tp4 reader that keeps logits": ("tp4", lambda p: compare_reader(p, 37, keep_bytes=1 << 20, chunk=1000)),
    "tp4 reader with sp": ("tp4", lambda p: compare_reader(p, 30, sp=True)),
    "tp4 reader with a shard of filling": ("tp4", lambda p: compare_reader(p, 5, keep_bytes=1 << 20)),
    "tp4 reader, nothing scored": ("tp4", lambda p: compare_reader(p, 37, lengths=(1, 1))),
    "tp4 values": ("tp4", lambda p: compare_values(p)),
    "cp2 reader": ("cp2", lambda p: compare_reader(p, 37, temperature=0.7)),
    "cp2 values": ("cp2", lambda p: compare_values(p)),
    "cp2 attention": ("cp2", lambda p: compare_attention(p)),
    "cp2 attention with a window": ("cp2", lambda p: compare_attention(p, window=3)),
    "cp4 reader": ("cp4", lambda p: compare_reader(p, 37)),
    "cp4 reader, a rank without scored tokens": ("cp4", lambda p: compare_reader(p, 37, lengths=(2, 3))),
    "cp4 reader, nothing scored": ("cp4", lambda p: compare_reader(p, 37, lengths=(1, 1))),
    "cp4 values": ("cp4", lambda p: compare_values(p)),
    "cp4 attention": ("cp4", lambda p: compare_attention(p)),
    "cp4 attention with a window": ("cp4", lambda p: compare_attention(p, window=4)),
    "cp4 attention, one key head": ("cp4", lambda p: compare_attention(p, kv_heads=1)),
    "cp4 attention, as many key heads": ("cp4", lambda p: compare_attention(p, kv_heads=4, lengths=(16, 8, 8))),
    "cp4 attention, double": ("cp4", lambda p: compare_attention(p, dtype=torch.float64)),
    "tp2cp2 reader": ("tp2cp2", lambda p: compare_reader(p, 37, temperature=0.7)),
    "tp2cp2 reader with sp": ("tp2cp2", lambda p: compare_reader(p, 37, sp=True)),
    "tp2cp2 values with sp": ("tp2cp2", lambda p: compare_values(p, sp=True)),
    "tp2cp2 attention with sp": ("tp2cp2", lambda p: compare_attention(p, sp=True)),
}
MISTAKES: dict[str, tuple[str, str, Callable[[Place], Figures]]] = {
    "the start of the shard is forgotten": ("tp4", "values", lambda p: compare_reader(p, 37, forget_start=True)),
    "the largest logit is each rank's own": ("tp4", "values", _largest_not_shared),
    "the hidden gradient is not summed": ("tp4", "hidden", lambda p: compare_reader(p, 37, reduce_gradient=False)),
    "the hidden gradient is not summed with sp": (
        "tp2",
        "hidden",
        lambda p: compare_reader(p, 37, sp=True, reduce_gradient=False),
    ),
    "a whole head's gradient is summed": ("tp2", "hidden", lambda p: compare_values(p, as_if_parallel=True)),
    "the gradient of a slice is summed over cp": ("cp2", "hidden", _gradient_summed_over_cp),
    "keys keep the gradient of their own rank's queries": ("cp2", "gradients", _keys_keep_own_gradient),
    "gathered keys stay in the ranks' order": ("cp2", "values", _chunks_in_plain_order),
}
"""name -> (layout, the figure that must be far off, what runs)"""


def main(out: Path) -> None:
    torch.set_num_threads(1)
    standins.prepare("cpu")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    figures: dict[str, Figures] = {}
    for layout, axes in LAYOUTS.items():
        _, place = settle(resolve(world, axes), {"device": "cpu"}, 60.0)
        for name, (where, run) in CASES.items():
            if where == layout:
                figures[name] = run(place)
        for name, (where, _, run) in MISTAKES.items():
            if where == layout:
                figures[name] = run(place)
        if layout == "tp4":
            figures["overwritten"] = overwritten(place)
        leave(place)
    (out / f"rank{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def bounds_of(laid: Laid) -> list[tuple[int, int]]:
    """(start, end) of each filled row, of all cp ranks together."""
    cu = laid.packed.cu_seqlens_q
    assert cu is not None
    return list(pairwise(cu.tolist()))


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main(Path(sys.argv[1]))
