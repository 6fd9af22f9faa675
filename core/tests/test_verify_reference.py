"""The reference of `rlctl verify`: what it imports, its losses, weights of tokens and update rules."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

import rlctl
from rlctl.normalizer import item_weights
from rlctl.normalizer_modes import LossAggMode
from rlctl.records import ModelType
from rlctl.verify import cases
from rlctl.verify.reference import Scores
from rlctl.verify.reference_losses import Objective, Sample, token_losses, token_weights
from rlctl.verify.reference_updates import Rule, adamw_step

VERIFY = Path(rlctl.__file__).parent / "verify"
REFERENCE = ("reference", "reference_losses", "reference_updates")


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever the statement stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_verify_reference_shares_no_code_with_what_it_measures() -> None:
    allowed = {"torch", "transformers", "math", "collections.abc", "dataclasses", "pathlib", "typing", "__future__"}
    own = {f"rlctl.verify.{name}" for name in REFERENCE}
    for name in REFERENCE:
        text = (VERIFY / f"{name}.py").read_text(encoding="utf-8")
        assert imported(VERIFY / f"{name}.py") - allowed - own == set()
        assert "import_module" not in text
        assert "__import__" not in text


def sample(scored: list[bool], seed: int = 0) -> Sample:
    g = torch.Generator().manual_seed(seed)
    n = len(scored)
    numbers = torch.randn(3, n, generator=g, dtype=torch.float64)
    return Sample(list(range(n)), scored, numbers[0].tolist(), (numbers[1] - 3).tolist(), (numbers[2] - 3).tolist())


SAMPLES = [
    sample([False, True, True, False], 1),
    sample([False, False, False], 2),
    sample([False, True, True, True, True], 3),
]


@pytest.mark.parametrize("mode", [str(m) for m in LossAggMode])
def test_verify_token_weights_are_what_their_names_say(mode: str) -> None:
    objective = Objective("grpo", mode, norm_length=8)
    expected = {
        "token-mean": [1 / 6, None, 1 / 6],
        "token-sum": [1.0, None, 1.0],
        "seq-mean-token-sum": [1 / 2, None, 1 / 2],
        "seq-mean-token-mean": [1 / 4, None, 1 / 8],
        "seq-mean-token-sum-norm": [1 / 16, None, 1 / 16],
    }[mode]
    found = token_weights(SAMPLES, objective)
    assert [f for f, e in zip(found, expected, strict=True) if e is not None] == pytest.approx(
        [e for e in expected if e is not None]
    )
    # And the normaliser under test means the same by them.
    weights = cases.packed(SAMPLES, objective).split_items(
        item_weights(cases.packed(SAMPLES, objective), mode, norm_length=8)
    )
    for row, s in enumerate(SAMPLES):
        assert weights[row][s.scored].tolist() == pytest.approx([found[row]] * sum(s.scored))


def test_verify_unknown_weighting_is_refused() -> None:
    with pytest.raises(ValueError, match="no-such"):
        token_weights(SAMPLES, Objective("sft", "no-such"))


def test_verify_losses_by_hand() -> None:
    log_p = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    entropy = torch.tensor([0.5, 0.25], dtype=torch.float64)
    scored = [False, True, True]
    found = {"log_probs": log_p, "entropy": entropy}
    assert token_losses(Sample([1, 2, 3], scored), found, Objective("sft", "token-mean")).tolist() == [1.0, 2.0]

    def one(advantage: float, ratio: float, gap: float = 0.0) -> float:
        s = Sample([1, 2], [False, True], [0.0, advantage], [0.0, -1.0 - math.log(ratio)], [0.0, -1.0 + gap])
        objective = Objective("grpo", "token-mean", clip_low=0.2, clip_high=0.3, clip_dual=3.0)
        first = {name: values[:1] for name, values in found.items()}
        return float(token_losses(s, first, objective)) + 0.05 * 0.5

    assert one(2.0, 1.1) == pytest.approx(-2.2)  # inside
    assert one(2.0, 1.5) == pytest.approx(-2.6)  # above: no more than 1.3
    assert one(2.0, 0.5) == pytest.approx(-1.0)  # below, but it would be an improvement: not clipped
    assert one(-2.0, 0.5) == pytest.approx(1.6)  # below, negative: no less than 0.8
    assert one(-2.0, 2.0) == pytest.approx(4.0)
    assert one(-2.0, 5.0) == pytest.approx(6.0)  # dual clip: at most 3
    assert one(0.0, 1.0, gap=0.7) == pytest.approx(0.1 * (math.exp(0.7) - 1 - 0.7))


def test_verify_value_losses_by_hand() -> None:
    def one(value: float, goal: float, old: float) -> float:
        s = Sample([1, 2], [False, True], returns=[9.0, goal], old_values=[9.0, old])
        found = {"values": torch.tensor([value], dtype=torch.float64)}
        return float(token_losses(s, found, Objective("value", "token-mean", value_clip=0.5)))

    assert one(1.2, 1.0, 1.0) == pytest.approx(0.02)  # within the bound
    assert one(2.0, 2.0, 1.0) == pytest.approx(0.125)  # right, but it went too far: 1.5 counts
    assert one(2.0, 1.0, 1.0) == pytest.approx(0.5)  # too far and wrong: the value itself counts
    assert one(0.0, 0.0, 1.0) == pytest.approx(0.125)  # the same below


def test_verify_adamw_is_torchs_and_its_bound_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(300, generator=generator)
    # Gradients over eight orders of magnitude, so that some are far below their error.
    scale = torch.logspace(-8, 0, 300)
    grads = [torch.randn(300, generator=generator, dtype=torch.float64) * scale for _ in range(3)]
    off = 1e-5
    errors = [off * (2 * torch.rand(300, generator=generator, dtype=torch.float64) - 1) for _ in range(3)]
    rule = Rule("adamw", lr=1e-2)

    def steps(gradients: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bound = start.clone(), torch.zeros_like(start)
        moments = (torch.zeros_like(start), torch.zeros_like(start))
        for number, gradient in enumerate(gradients, 1):
            adamw_step(weight, gradient, moments, rule, number, bound, off)
        return weight, bound

    weight, bound = steps(grads)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr=rule.lr, weight_decay=0.0)
    for gradient in grads:
        parameter.grad = gradient.float()
        optimizer.step()
    assert torch.allclose(weight, parameter.detach(), rtol=0, atol=2e-7)
    wrong, _ = steps([g + e for g, e in zip(grads, errors, strict=True)])
    moved = (wrong - weight).abs()
    assert bool((moved <= bound + 1e-7).all())
    # A bound that everything keeps would prove nothing: it is tight where the gradient is sure.
    assert float(bound[scale > 1e-1].median()) < 1e-3 * rule.lr
    assert float(moved[scale < 1e-7].max()) > rule.lr


def test_verify_rows_are_what_the_comparison_needs() -> None:
    batches = cases.batches_of(4, 61)
    assert [len(b) for b in batches] == [13, 9, 3]
    rows = batches[0]
    assert len({tuple(s.ids[:5]) for s in rows[:4]}) == 1
    assert not any(rows[4].scored)
    assert len(rows[5].ids) == 2
    assert all(len(s.ids) <= cases.TOKEN_BUDGET for s in rows)
    assert not any(s.scored[0] for s in rows)
    # A mask with holes: something unscored between scored tokens.
    assert any(
        [a, b, c] == [True, False, True]
        for r in rows
        for a, b, c in zip(r.scored, r.scored[1:], r.scored[2:], strict=False)
    )
    assert cases.batches_of(4, 61) == batches
    assert set(cases.RUNS) == set(ModelType)


def test_verify_rows_of_a_critic_meet_every_side_of_the_bound() -> None:
    plain = [sample([False] + [True] * 40, seed) for seed in range(4)]
    now = [torch.randn(41, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(4)]
    rows = cases.with_history(plain, [Scores({"values": values}) for values in now], 7)
    clip = cases.VALUE.value_clip
    sides: set[tuple[str, bool]] = set()
    for row, values in zip(rows, now, strict=True):
        for value, old, goal in zip(values.tolist(), row.old_values, row.returns, strict=True):
            moved = min(max(value, old - clip), old + clip)
            side = "below" if moved > value else "above" if moved < value else "within"
            sides.add((side, abs(moved - goal) > abs(value - goal)))
            # Nothing so close to a corner that rounding could take it across.
            assert abs(abs(value - old) - clip) > 0.1
            assert side == "within" or abs(abs(moved - goal) - abs(value - goal)) > 0.04
    assert sides == {("within", False)} | {(s, larger) for s in ("below", "above") for larger in (True, False)}
    batch = cases.packed(rows, cases.VALUE)
    assert {"returns", "old_values"} <= set(batch.items)
    assert "advantages" not in batch.items


def test_verify_rule_reads_gradients_off_a_step_without_wrecking_the_model() -> None:
    rule = cases.rule_of("sgd", grad_norm=2.0, loss=4.0, weight_norm=30.0)
    assert rule.lr == pytest.approx(0.25 * 4.0 / 4.0)
    assert cases.rule_of("sgd", grad_norm=0.1, loss=4.0, weight_norm=30.0).lr == pytest.approx(0.02 * 30.0 / 0.1)
    assert cases.rule_of("adamw", grad_norm=2.0, loss=4.0, weight_norm=30.0).clip == 1.0
    assert cases.optimizer_of(rule)["name"] == "sgd"
