"""What ranks saw in a named case against what one process saw, and the evidence of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from rlctl.records import EvidenceLevel
from rlctl.testing.evidence import record_evidence


def assert_equal_runs(
    one: dict[str, Any], ranks: Sequence[dict[str, Any]], device: str, wrap: str, loose: bool
) -> None:
    """Three steps, scores, weights before and after, and the resumed step, on every rank.

    Args:
        wrap: what the engine's note must say of the mesh.
        loose: the computation runs in bfloat16.
    """
    # Matrix products on a GPU add up in another order for another number of rows.
    tolerance = 3e-2 if loose else 2e-6 if device == "cpu" else 2e-5
    assert one["wrap"] == "plain module"
    for many in ranks:
        assert many["wrap"] == wrap
        for number, (got, wanted) in enumerate(zip(many["steps"], one["steps"], strict=True)):
            assert got.keys() == wanted.keys()
            # AdamW's first step magnifies the rounding of gradients near zero.
            allowed = tolerance if number == 0 else 5 * tolerance
            for key, value in wanted.items():
                assert got[key] == pytest.approx(value, rel=allowed, abs=allowed), key
        for stage in ("before", "weights"):
            assert list(many[stage]) == list(one[stage])
            for key, value in one[stage].items():
                difference = (many[stage][key] - value).abs()
                if stage == "before":
                    assert float(difference.max()) == 0.0, key
                elif loose:
                    # Adam turns the sign of a tiny gradient into a whole step, so only the mean is near.
                    assert float(difference.mean()) <= 2e-3, key
                else:
                    assert float(difference.max()) <= (1e-4 if device == "cpu" else 2e-4), key
        for key, per_row in many["scores"].items():
            for row, values in zip(many["rows"], per_row, strict=True):
                torch.testing.assert_close(
                    values, one["scores"][key][row], atol=5e-2 if loose else 10 * tolerance, rtol=1e-5
                )
        assert many["resume_equal"], "a resumed run takes the very step that the first one took"
    assert one["resume_equal"]
    assert any((one["weights"][k] != one["before"][k]).any() for k in one["weights"])


def record_runs(
    name: str, axes: Mapping[str, int], device: str, one: dict[str, Any], ranks: Sequence[dict[str, Any]], dtype: str
) -> None:
    """Hand what was just compared to the evidence of ``axes`` (see :mod:`rlctl.testing.evidence`)."""

    def worst(key: str) -> float:
        pairs = [(a[key], b[key]) for many in ranks for a, b in zip(many["steps"], one["steps"], strict=True)]
        return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)

    weights = max(float((many["weights"][k] - v).abs().max()) for many in ranks for k, v in one["weights"].items())
    scores = max(
        float((values - one["scores"][key][row]).abs().max())
        for many in ranks
        for key, per_row in many["scores"].items()
        for row, values in zip(many["rows"], per_row, strict=True)
    )
    record_evidence(
        f"{axes_name(axes)}-{device}-{name}",
        backend="fsdp2",
        level=EvidenceLevel.PARITY,
        axes=axes,
        world_size=len(ranks),
        device=device,
        model_family=one["family"],
        what=f"three steps, scores, export and resume of {len(ranks)} {'NCCL' if device == 'cuda' else 'gloo'} ranks "
        f"against one process, {dtype}, case {name}",
        deltas={
            "loss_relative": worst("loss"),
            "grad_norm_relative": worst("grad_norm"),
            "updated_weights_max": weights,
            "scores_max": scores,
        },
    )


def axes_name(axes: Mapping[str, int]) -> str:
    """``dp_shard2-usp2``."""
    return "-".join(f"{name}{size}" for name, size in axes.items())
