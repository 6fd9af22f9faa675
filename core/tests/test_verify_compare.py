"""Deltas: what is measured, in which unit, and that a difference shows where it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors.torch import save_file

from rlctl.verify import compare
from rlctl.verify.compare import FLOAT32_TOLERANCES, QUANTITIES, Deltas, Tensors


def directory(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir()
    save_file({k.replace("_", "."): v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)
    return Tensors(directory(tmp_path / "file", a_weight=a, b_weight=b))


def export(file: Tensors, **changed: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
    values = {n: file[n] for n in file.names} | {k.replace("_", "."): v for k, v in changed.items()}
    return [(n, v) for n, v in values.items() if v is not None]


def exported(
    file: Tensors, dtype: torch.dtype = torch.float32, tied: str = "", **changed: torch.Tensor | None
) -> Deltas:
    deltas = Deltas()
    compare.compare_export(deltas, export(file, **changed), file, dtype, frozenset({tied} - {""}))
    return deltas


def test_verify_every_quantity_has_a_unit_and_a_tolerance() -> None:
    assert set(QUANTITIES) == set(FLOAT32_TOLERANCES)
    assert all(QUANTITIES.values())


def test_verify_export_is_compared_by_name_shape_dtype_and_value(file: Tensors) -> None:
    good = exported(file)
    assert (good.found["export_names"].value, good.found["export"].value) == (0, 0)
    assert good.failures(FLOAT32_TOLERANCES) == []
    cases: dict[str, tuple[Deltas, str]] = {
        "missing": (exported(file, b_weight=None), "b.weight is missing"),
        "extra": (exported(file, c_weight=torch.ones(2)), "c.weight is not in the file"),
        "shape": (exported(file, b_weight=torch.ones(4)), "b.weight (4,) instead of (3,)"),
        "dtype": (
            exported(file, b_weight=file["b.weight"].bfloat16()),
            "b.weight torch.bfloat16 instead of torch.float32",
        ),
    }
    for found, where in cases.values():
        assert found.found["export_names"].value == 1
        assert found.found["export_names"].where == where
        assert "export_names" in found.failures(FLOAT32_TOLERANCES)
    off = exported(file, b_weight=file["b.weight"] + 1e-6)
    assert off.failures(FLOAT32_TOLERANCES) == ["export"]
    assert off.found["export"].where == "b.weight"
    assert exported(file, tied="c.weight", c_weight=torch.ones(2)).failures(FLOAT32_TOLERANCES) == []
    twice = Deltas()
    compare.compare_export(twice, [*export(file), *export(file)], file, torch.float32, frozenset())
    assert twice.found["export_names"].value == 2


def test_verify_gradients_are_read_off_a_step(file: Tensors, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    gradient = {n: torch.randn(file[n].shape, generator=generator) for n in file.names}
    wanted = Tensors(directory(tmp_path / "g", **{n.replace(".", "_"): g for n, g in gradient.items()}))

    def step(factor: float = 1.0, **other: torch.Tensor) -> Deltas:
        used = {**gradient, **{k.replace("_", "."): v for k, v in other.items()}}
        after = {n: file[n] - 0.1 * factor * used[n] for n in file.names}
        deltas = Deltas()
        compare.compare_gradients(deltas, after.items(), file, wanted, 0.1, "here")
        return deltas

    # Rounding of float32 weights is allowed for, and nothing else.
    assert step().found["gradients"].value < 1e-6
    assert step(2.0).found["gradients"].value == pytest.approx(1.0, rel=1e-4)
    one = gradient["b.weight"].clone()
    one[1] += 1e-3 * one.abs().max()
    found = step(b_weight=one).found["gradients"]
    assert found.value == pytest.approx(1e-3, rel=1e-2)
    assert found.where == "b.weight, here"


def test_verify_weights_are_measured_by_how_far_they_moved(file: Tensors, tmp_path: Path) -> None:
    moved = {n: file[n] + 1e-3 * torch.ones_like(file[n]) for n in file.names}
    wanted = Tensors(directory(tmp_path / "w", **{n.replace(".", "_"): w for n, w in moved.items()}))
    still = Deltas()
    compare.compare_weights(still, export(file), file, wanted, "sgd")
    assert still.found["weights"].value == pytest.approx(1.0, rel=1e-3)
    same = Deltas()
    compare.compare_weights(same, moved.items(), file, wanted, "sgd")
    assert same.found["weights"].value == 0.0


def test_verify_bounds_count_element_by_element(file: Tensors, tmp_path: Path) -> None:
    bound = {n: torch.full_like(file[n], 1e-4) for n in file.names}
    bound["b.weight"][2] = 1e-2
    bounds = Tensors(directory(tmp_path / "b", **{n.replace(".", "_"): b for n, b in bound.items()}))
    off = file["b.weight"].clone()
    off[2] += 5e-3
    deltas = Deltas()
    compare.compare_bounded(deltas, export(file, b_weight=off), file, bounds, "adamw")
    assert deltas.found["weights_adamw"].value == pytest.approx(0.5, rel=1e-2)
    off[0] += 5e-3
    compare.compare_bounded(deltas, export(file, b_weight=off), file, bounds, "adamw")
    assert deltas.found["weights_adamw"].value == pytest.approx(50, rel=2e-2)


def test_verify_not_a_number_is_beyond_every_tolerance(file: Tensors) -> None:
    deltas = Deltas()
    deltas.note("loss", math.nan, "here")
    deltas.note("loss", 1e9, "there")
    assert (deltas.found["loss"].value, deltas.found["loss"].where) == (math.inf, "here")
    compare.compare_scores(deltas, "log_probs", [torch.tensor([0.0, math.nan])], [torch.zeros(2)], "now")
    assert deltas.found["log_probs"].where == "row 0, token 1, now"
    assert deltas.failures(FLOAT32_TOLERANCES) == ["log_probs", "loss"]
    broken = exported(file, b_weight=torch.full((3,), math.nan))
    assert broken.failures(FLOAT32_TOLERANCES) == ["export"]


def test_verify_experts_are_compared_as_sets_where_the_choice_was_clear() -> None:
    wanted = torch.tensor([[[-1, -1]], [[0, 1]], [[2, 3]], [[1, 3]]])
    margin = torch.tensor([[0.0], [1.0], [1.0], [1e-6]])
    found = torch.tensor([[[0, 0]], [[1, 0]], [[2, 0]], [[0, 2]]])
    deltas = Deltas()
    compare.compare_experts(deltas, [found], [(wanted, margin)], 4, 1e-4, "now")
    # The unscored one and the unclear one do not count, the order of a pair neither.
    assert deltas.found["experts"].value == 0.5
    assert deltas.found["experts"].where == "1 of 2 choices, now"
    assert deltas.found["expert_tokens"].value == 1.0


def test_verify_relative_difference_of_nothing() -> None:
    assert compare.relative(0.0, 0.0) == 0.0
    assert compare.relative(1.0, 0.0) > 1e100
    assert compare.relative(1.1, 1.0) == pytest.approx(0.1)


def test_verify_what_an_engine_leaves_out_after_a_step_is_no_pass(file: Tensors) -> None:
    names = file.names
    part = [(name, tensor) for name, tensor in export(file) if name != names[0]]
    for tied in (frozenset(), frozenset({names[0]})):
        deltas = Deltas()
        compare.compare_gradients(deltas, part, file, file, 1.0, "here", tied=tied)
        compare.compare_bounded(deltas, part, file, file, "here", tied)
        values = {quantity: deltas.found[quantity] for quantity in ("gradients", "weights_adamw")}
        for found in values.values():
            assert (f"{names[0]} is missing" in found.where) is not bool(tied)
    nothing = Deltas()
    compare.compare_bounded(nothing, [], file, file, "here")
    assert math.isinf(nothing.found["weights_adamw"].value)
