"""Memory of the output layer: logits that are kept, the chunk that is worked on, and the head's own gradient.

The engine that this describes computes log-probs chunk by chunk and keeps raw logits only within a budget; its buffers are
followed in the order in which they are made and dropped.

Legend: D hidden, V vocabulary, P scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.plan.activations import Precision
from rlctl.plan.memory import Load, Setting

_MIN_ROWS = 256


@dataclass(frozen=True)
class HeadMemory:
    """Sizes of the head's tensors for one micro-batch.

    Args:
        frozen: the head's weight gets no gradient.
    """

    vocab_size: int
    hidden_size: int
    precision: Precision
    setting: Setting
    load: Load
    frozen: bool = False

    @property
    def kept(self) -> int:
        """Bytes of raw logits that stay until the head's backward pass."""
        size = self.load.scored * self.vocab_size * self.precision.compute_bytes
        budget = self.setting.logits_budget
        return size if budget is None or size <= budget else 0

    @property
    def rows(self) -> int:
        """Tokens of one chunk."""
        if self.setting.logits_budget is None:
            return self.load.scored
        return min(max(_MIN_ROWS, self.setting.chunk_bytes // (4 * self.vocab_size)), self.load.scored)

    @property
    def several(self) -> bool:
        return self.load.scored > self.rows

    def logits(self, *, backward: bool) -> tuple[int, str]:
        """(bytes, words) of kept logits and of one chunk's buffers."""
        each = self.backward_buffers() if backward else self.forward_buffers()
        chunk = self.rows * self.vocab_size * each
        v, c = f"V {self.vocab_size:,}", self.precision.compute_bytes
        kept = (
            f"{self.load.scored:,} scored tokens x {v} x {c} bytes kept"
            if self.kept
            else "logits over the budget: none kept"
        )
        return self.kept + chunk, f"{kept}; {self.rows:,} tokens x {v} x {each} bytes for the chunk that is worked on"

    @property
    def _float32(self) -> int:
        """Bytes a logit of the float32 logits of a chunk; 0 where they are the kept ones themselves."""
        same = self.precision.compute_bytes == 4 and not self.load.scaled and bool(self.kept)
        return 0 if same else 4

    @property
    def _made(self) -> int:
        """Bytes a logit while float32 logits are made: the product, its float32 copy, and that over the temperature."""
        c = self.precision.compute_bytes
        return (0 if self.kept else c) + (0 if c == 4 else 4) + (4 if self.load.scaled else 0)

    def forward_buffers(self) -> int:
        """Bytes a logit of a chunk. From the second chunk on, the last one's tensors go as the new ones come."""
        exponentials = 4 if self.load.entropy else 0
        before = self._float32 + exponentials if self.several else 0
        return max(self._made + before, self._float32 + exponentials * (2 if self.several else 1))

    def backward_buffers(self) -> int:
        """As :meth:`forward_buffers`, with the gradient by the logits in float32 and in the compute dtype."""
        c = self.precision.compute_bytes
        before = c if self.several else 0
        start = self._made + (self._float32 if self.several else 0) + before
        middle = self._float32 + before + 4 + (4 if self.load.entropy else 0)
        return max(start, middle, self._float32 + 4 + (0 if c == 4 else c))

    def working(self, *, backward: bool) -> int:
        """Casts and gradients of the head's weight and of the hidden states that it reads."""
        wide = self.vocab_size * self.hidden_size
        c = self.precision.compute_bytes
        cast = wide * c if self.precision.autocast else 0
        if not backward:
            return cast
        gradient = 0 if self.frozen else wide * ((4 + c) if self.several else c)
        return cast + gradient + self.load.scored * self.hidden_size * self.precision.stream_bytes
