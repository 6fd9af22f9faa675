"""Seeds of a step."""

from __future__ import annotations


def step_seed(seed: int, step: int, stream: int = 0) -> int:
    """A seed of its own for each step and purpose, so that a resumed run samples what an unbroken one would have."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + stream * 0x94D049BB133111EB) & (2**63 - 1)
    return (mixed ^ (mixed >> 31)) & (2**62 - 1)
