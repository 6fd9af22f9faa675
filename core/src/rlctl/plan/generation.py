"""Memory of a rollout engine on one rank: weights, the key/value cache, and what a weight sync gathers.

Legend: D hidden, V vocabulary, G key/value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlctl.catalogue_memory import RolloutPolicy
from rlctl.config.schema import RunConfig
from rlctl.plan.activations import Precision, passing_bytes_a_token
from rlctl.plan.memory import Item
from rlctl.plan.parameters import DTYPE_BYTES, ParameterCount
from rlctl.plan.shapes import ModelShape

_SHARED_FROM = 8192


@dataclass(frozen=True)
class RolloutMemory:
    """Items of one rollout engine.

    Args:
        section: the engine's own section.
        dp_size: engines (or ranks) over which prompts are split.
        ranks: of tp and pp that share one engine's weights and cache.
        shared: it generates from the training module: no weights of its own.
        precision: of the training engine that it shares a module with.
    """

    shape: ModelShape | None
    total: int
    config: RunConfig
    policy: RolloutPolicy
    section: Mapping[str, Any]
    dp_size: int
    ranks: int
    shared: bool
    device: str
    precision: Precision

    @property
    def dtype(self) -> str:
        """dtype of an own copy."""
        wanted = str(self.section.get(self.policy.dtype_key) or "auto")
        return self.config.model.dtype if wanted == "auto" else wanted

    def weights(self) -> Item:
        if self.shared:
            return Item(
                "rollout weights",
                "rollout",
                0,
                "none: it generates from the training module itself (rollout.share_weights)",
            )
        size = DTYPE_BYTES[self.dtype]
        over = f" / {self.ranks} ranks" if self.ranks > 1 else ""
        words = f"{self.total:,} parameters x {size} bytes ({self.dtype}){over}: a copy, whole on each engine"
        return Item("rollout weights", "rollout", -(-self.total * size // self.ranks), words)

    def rows(self) -> tuple[int, str]:
        """(rows decoded together at worst, words)."""
        data, rollout = self.config.data, self.config.rollout
        train = -(-data.train_batch_size // self.dp_size) * rollout.n
        validation = -(-data.val_batch_size // self.dp_size) * rollout.val_kwargs.n
        rows = max(train, validation)
        words = f"{rows:,} rows of a step on this engine"
        if validation > train:
            words = f"{rows:,} rows of a validation batch on this engine"
        most = [rows]
        longest = data.max_prompt_length + data.max_response_length
        if self.policy.rows_key:
            most.append(int(self.section.get(self.policy.rows_key) or rows))
        if self.policy.tokens_key and self.section.get(self.policy.tokens_key):
            most.append(max(1, int(self.section[self.policy.tokens_key]) // longest))
        if min(most) < rows:
            words = f"{min(most):,} rows at a time ({self.policy.rows_key}, {self.policy.tokens_key})"
        return min(most), words

    def cache(self) -> Item | None:
        """Keys and values: those that are set aside, else of the rows that are decoded together (None where the model's shape is
        not known)."""
        given = self.section.get(self.policy.cache_key) if self.policy.cache_key else None
        if given is None and self.device == "cpu":
            given = self.policy.cache_mib_on_cpu or None
        if given is not None:
            words = f"{int(given):,} MiB set aside (rollout.engine.{self.policy.cache_key})"
            return Item("KV cache", "rollout", int(given) << 20, words)
        if self.shape is None:
            return None
        keys, values = self._key_value_bytes()
        one = self.shape.num_layers * self.shape.kv_size
        each = one * (keys + values) // self.ranks
        rows, words = self.rows()
        prompt, response = self.config.data.max_prompt_length, self.config.data.max_response_length - 1
        n = self.config.rollout.n
        tokens = rows * (prompt + response)
        of = f"{prompt + response:,} tokens"
        if self._shares_prompts() and rows >= n > 1:
            tokens = -(-rows // n) * prompt + rows * response
            of = f"{response:,} tokens, and each prompt once"
        formula = (
            f"{words} x {of} x {each:,} bytes a token ({self.shape.num_layers} layers x {self.shape.num_kv_heads} heads x "
            f"{self.shape.head_dim} x ({keys} + {values}) bytes{f' / {self.ranks} ranks' if self.ranks > 1 else ''})"
        )
        return Item("KV cache", "rollout", tokens * each, formula)

    def _key_value_bytes(self) -> tuple[int, int]:
        """Under autocast keys leave their rotation in the dtype of the stream, values leave their product in the compute dtype."""
        if self.shared:
            return self.precision.stream_bytes, self.precision.compute_bytes
        return DTYPE_BYTES[self.dtype], DTYPE_BYTES[self.dtype]

    def _shares_prompts(self) -> bool:
        """The embedded engine keeps prompts once where attention is plain float32 products on a CPU and they are long."""
        assert self.shape is not None, "the cache has a shape"
        plain = self.policy.shares_module and self.device == "cpu" and self._key_value_bytes() == (4, 4)
        return plain and self.config.data.max_prompt_length * self.shape.head_dim >= _SHARED_FROM

    def prefill(self) -> Item | None:
        """What one layer holds while prompts are read, a bounded number of tokens at a time."""
        if self.shape is None or not self.policy.prefill_tokens:
            return None
        data = self.config.data
        rows, n = self.rows()[0], max(1, self.config.rollout.n)
        tokens = min(max(self.policy.prefill_tokens, data.max_prompt_length), -(-rows // n) * data.max_prompt_length)
        own = self.precision if self.shared else Precision(self.dtype, self.dtype)
        each = passing_bytes_a_token(self.shape, own, moe=bool(self.shape.moe_layers), tp=self.ranks)
        return Item(
            "prefill", "rollout", round(tokens * each), f"{tokens:,} prompt tokens x {each:,.0f} bytes of one layer"
        )

    def logits(self) -> Item | None:
        """Logits of one token of every row, and their float32 probabilities."""
        if self.shape is None:
            return None
        rows, _ = self.rows()
        size = rows * self.shape.vocab_size * 12 // self.ranks
        return Item(
            "decoding logits",
            "rollout",
            size,
            f"{rows:,} rows x V {self.shape.vocab_size:,} x 12 bytes (logits, log-probs, sorting)",
        )


def sync_item(count: ParameterCount | None, shape: ModelShape | None, total: int, size: int, shared: bool) -> Item:
    """What a copy of the weights gathers: the tensors of one module at a time."""
    if shared:
        return Item("weight sync", "rollout", 0, "nothing is copied")
    if count is None or shape is None:
        return Item(
            "weight sync",
            "rollout",
            total * size,
            f"at most all {total:,} parameters x {size} bytes (the layers are not known)",
        )
    experts = shape.num_experts * 3 * shape.hidden_size * shape.expert_size
    largest = max(count.embedding, experts, shape.hidden_size * shape.intermediate_size)
    words = (
        "experts of one layer" if largest == experts else "embedding" if largest == count.embedding else "one matrix"
    )
    return Item(
        "weight sync",
        "rollout",
        2 * largest * size,
        f"{words}, {largest:,} parameters x {size} bytes, gathered and in flight (x 2)",
    )
