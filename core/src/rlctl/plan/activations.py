"""What one layer keeps for its backward pass, tensor by tensor, for Hugging Face decoders that run eagerly.

Each entry is a tensor that autograd holds from the forward to the backward pass, in elements a token and bytes an element.
The list was read off torch's saved tensors family by family; ``tests/test_plan_memory.py`` compares its sum with live bytes.

Legend: D hidden, F feed-forward, H query heads, G key/value heads, E head size, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlctl.plan.parameters import DTYPE_BYTES
from rlctl.plan.shapes import ModelShape

Part = Literal["tokens", "inner"]
"""``tokens``: as wide as the residual stream; ``inner``: heads, feed-forward and experts, which tp splits."""


@dataclass(frozen=True)
class Precision:
    """dtypes of a training engine.

    Args:
        master: of the weights that the optimizer steps.
        compute: of matrix products.
        autocast: weights stay in ``master`` and each product casts its operands; False where whole modules run in
            ``compute``.
    """

    master: str
    compute: str
    autocast: bool = False

    @property
    def compute_bytes(self) -> int:
        return DTYPE_BYTES[self.compute]

    @property
    def master_bytes(self) -> int:
        return DTYPE_BYTES[self.master]

    @property
    def stream_bytes(self) -> int:
        """Of the residual stream between layers."""
        return self.master_bytes if self.autocast else self.compute_bytes


@dataclass(frozen=True)
class Saved:
    """``width`` elements a token of ``num_bytes`` bytes each."""

    words: str
    width: int
    num_bytes: int
    part: Part

    @property
    def bytes_a_token(self) -> int:
        return self.width * self.num_bytes


def layer_saved(shape: ModelShape, p: Precision, *, moe: bool, flash: bool, ragged: bool) -> list[Saved]:
    """Everything that one layer keeps.

    Args:
        moe: the layer has experts.
        flash: attention is one variable-length kernel over packed rows (accelerators in half precision); otherwise one
            fused call a group of rows of equal length.
        ragged: rows of several lengths: without ``flash`` their results are put together in one more tensor.
    """
    d = shape.hidden_size
    feeds = 1 if moe else 2 if shape.family.gated else 1
    out = list(_norm(shape, p, d, "attention norm", 1 if shape.family.fused_qkv else 3))
    out += _attention(shape, p, flash, ragged)
    if shape.family.post_norms:
        out += _norm(shape, p, d, "norm after attention", 0)
    before_feed = list(_norm(shape, p, d, "feed-forward norm", feeds))
    if shape.parallel_residual:
        before_feed = [s for s in before_feed if not s.words.endswith("input")]  # both norms read one tensor
    out += before_feed
    out += _experts(shape, p) if moe else _feed_forward(shape, p)
    if shape.family.post_norms:
        out += _norm(shape, p, d, "norm after feed-forward", 0)
    return out


def layer_bytes_a_token(shape: ModelShape, p: Precision, *, moe: bool, flash: bool, ragged: bool, tp: int = 1) -> float:
    """Bytes that one layer keeps for each token; ``tp`` ranks share the inner part."""
    saved = layer_saved(shape, p, moe=moe, flash=flash, ragged=ragged)
    return sum(s.bytes_a_token / (tp if s.part == "inner" else 1) for s in saved)


def passing_bytes_a_token(shape: ModelShape, p: Precision, *, moe: bool, tp: int = 1) -> float:
    """Bytes a token of what one layer holds at its fullest when nothing is kept for a backward pass."""
    d, c, r = shape.hidden_size, p.compute_bytes, p.stream_bytes
    if moe:
        k, f = shape.experts_per_token, shape.expert_size
        feed = k * (2 * d + 4 * f) * (p.master_bytes if p.autocast else c)
    else:
        feed = (3 if shape.family.gated else 2) * shape.intermediate_size * c
    attention = (4 * shape.query_size + 3 * shape.kv_size) * r
    return max(feed, attention) / tp + 2 * d * r + 2 * d * 4


def _norm(shape: ModelShape, p: Precision, size: int, words: str, consumers: int) -> Iterator[Saved]:
    """A norm over the residual stream whose result ``consumers`` matrix products read (0: it is added to the stream)."""
    c, kind = p.compute_bytes, shape.family.norm
    single = p.stream_bytes == 4
    if kind == "layer":
        yield Saved(f"{words}: input", size, p.stream_bytes, "tokens")
    else:
        # RMS norms compute in float32: the input itself, or its float32 copy.
        yield Saved(f"{words}: {'input' if single else 'float32 copy of the input'}", size, 4, "tokens")
        yield Saved(f"{words}: before the scale", size, 4 if single or kind == "gemma" else c, "tokens")
    if p.autocast:
        for _ in range(consumers):
            # Autocast casts the input of every product anew.
            yield Saved(f"{words}: cast for a product", size, c, "tokens")
    elif consumers:
        yield Saved(f"{words}: result", size, c, "tokens")


def _attention(shape: ModelShape, p: Precision, flash: bool, ragged: bool) -> Iterator[Saved]:
    c, q, kv = p.compute_bytes, shape.query_size, shape.kv_size
    if shape.family.qk_norm:
        exact = p.compute_bytes == 4
        before = 4 if exact or shape.family.norm == "gemma" else c
        for name, size in (("query", q), ("key", kv)):
            yield Saved(f"{name} norm: {'input' if exact else 'float32 copy'}", size, 4, "inner")
            yield Saved(f"{name} norm: before the scale", size, before, "inner")
    yield Saved("queries", q, c, "inner")
    yield Saved("keys", kv, c, "inner")
    if shape.family.fused_qkv and not flash:
        yield Saved("values, with the fused matrix's whole result", q + 2 * kv, c, "inner")
    else:
        yield Saved("values", kv, c, "inner")
    yield Saved("attention result", q, c, "inner")
    if not flash and (ragged or shape.family.fused_qkv):
        yield Saved("attention result, put together", q, c, "inner")
    yield Saved("log of the softmax sums", shape.num_heads, 4, "inner")


def _feed_forward(shape: ModelShape, p: Precision) -> Iterator[Saved]:
    f, c = shape.intermediate_size, p.compute_bytes
    if shape.family.gated:
        yield Saved("gate", f, c, "inner")
        yield Saved("up", f, c, "inner")
        yield Saved("activation of the gate", f, c, "inner")
        yield Saved("gated product", f, c, "inner")
    else:
        yield Saved("feed-forward, before the activation", f, c, "inner")
        yield Saved("feed-forward, after the activation", f, c, "inner")


def _experts(shape: ModelShape, p: Precision) -> Iterator[Saved]:
    k, f, d = shape.experts_per_token, shape.expert_size, shape.hidden_size
    # Grouped products of experts are not among those that autocast casts.
    e = p.master_bytes if p.autocast else p.compute_bytes
    yield Saved("router probabilities", shape.num_experts, 4, "tokens")
    yield Saved("tokens by expert", k * d, e, "inner")
    yield Saved("gate and up of the experts", 2 * k * f, e, "inner")
    yield Saved("activation of the gates", k * f, e, "inner")
    yield Saved("gated products", k * f, e, "inner")
    yield Saved("expert results", k * d, e, "inner")
    yield Saved("routing indices", 4 * k, DTYPE_BYTES["int64"], "tokens")
