"""The learning rate formula: warm-up, peak, the shapes after it, and what it refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.config.schema import OptimConfig
from rlctl.errors import ConfigError
from rlctl.schedule import lr_factor


def factors(steps: int, **optim: object) -> list[float]:
    return [lr_factor(s, OptimConfig(**optim).model_dump()) for s in range(steps)]  # type: ignore[arg-type]


def test_constant_with_warm_up() -> None:
    assert factors(5) == [1.0] * 5
    assert factors(6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_hold_the_peak_once_and_end_at_the_floor() -> None:
    linear = factors(7, lr_scheduler_type="linear", lr_warmup_steps=2, total_training_steps=6, min_lr_ratio=0.2)
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    cosine = factors(6, lr_scheduler_type="cosine", total_training_steps=4)
    assert cosine == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0, 0.0])


def test_a_run_of_one_step_learns() -> None:
    for kind in ("constant", "linear", "cosine"):
        assert factors(1, lr_scheduler_type=kind, total_training_steps=1) == [1.0]


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(1, 40),
    st.floats(0, 1),
)
def test_shape(kind: str, warmup: int, total: int, floor: float) -> None:
    values = factors(60, lr_scheduler_type=kind, lr_warmup_steps=warmup, total_training_steps=total, min_lr_ratio=floor)
    assert all(0.0 < v <= 1.0 for v in values[: min(warmup, total)])
    assert all(min(floor, 1.0) - 1e-12 <= v <= 1.0 + 1e-12 for v in values[warmup:])
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert all(v > 0 for v in values[:total]), "no step of the run is wasted on a rate of zero"
    if kind != "constant":
        assert values[max(total, warmup + 1)] == pytest.approx(floor)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="cosine schedule needs its length") as caught:
        lr_factor(0, {"lr_scheduler_type": "cosine"})
    assert caught.value.next
    with pytest.raises(ConfigError, match="unknown learning rate schedule"):
        lr_factor(0, {"lr_scheduler_type": "cyclic"})
    with pytest.raises(AssertionError):
        lr_factor(-1, {})
