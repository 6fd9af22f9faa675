"""The weight of the entropy bonus: its two controls against loops over their definitions, and the stage that remembers it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlctl.algorithms.entropy_control import additive_weight, next_additive, next_sac
from rlctl.config.schema import ActorConfig, RunConfig
from rlctl.trainers.entropy import EntropyStage

ENTROPIES = st.lists(st.floats(0, 8), max_size=12)


def stage(start: float = 0.0, **control: Any) -> EntropyStage:
    return EntropyStage(ActorConfig.model_validate({"entropy_coeff": start, "entropy_ctrl": control}))


@given(entropies=ENTROPIES, target=st.floats(0.1, 5), step=st.floats(1e-4, 0.1), start=st.floats(0, 0.5))
def test_the_additive_control_is_that_of_the_report(
    entropies: list[float], target: float, step: float, start: float
) -> None:
    made, c = stage(start, type="additive", target_entropy=target, step=step, max_coeff=0.5), start
    for k, entropy in enumerate(entropies):
        before = entropies[k - 1] if k else None
        in_force = c if before is None or before <= target else 0.0
        assert made.weight == made.actor_config().entropy_coeff == in_force
        assert made.learn({"actor/entropy": entropy}) == {"actor/entropy_coeff": in_force}
        moved = c + (step if entropy < target else -step if entropy > target else 0.0)
        c = 0.0 if moved < 0 else 0.5 if moved > 0.5 else moved
    assert made.coef == (c if entropies else None)


@given(alpha=st.floats(1e-6, 0.05), entropy=st.floats(0, 8), target=st.floats(0.1, 5), rate=st.floats(1e-4, 0.5))
def test_sac_steps_down_the_gradient_of_its_objective(alpha: float, entropy: float, target: float, rate: float) -> None:
    """eq. 18: J(alpha) = alpha (H - target); descent in log alpha."""
    log_alpha = torch.tensor(math.log(alpha), dtype=torch.float64, requires_grad=True)
    (log_alpha * (entropy - target)).backward()
    assert log_alpha.grad is not None
    wanted = math.exp(float(log_alpha.detach() - rate * log_alpha.grad))
    found = next_sac(alpha, entropy, target=target, step=rate, largest=1e3)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert found > 0
    assert (found > alpha) == (entropy < target) or found == pytest.approx(alpha)
    assert next_sac(alpha, entropy, target=target, step=rate, largest=found / 2) == found / 2


def test_absurd_entropies_make_no_infinity() -> None:
    assert math.isfinite(next_sac(0.1, -1e9, target=1.0, step=1.0, largest=math.inf))
    assert next_sac(0.1, 1e9, target=1.0, step=1.0, largest=1.0) > 0
    assert next_additive(0.0, 1e9, target=1.0, step=0.1, largest=1.0) == 0.0
    assert additive_weight(0.3, 1.0, target=1.0) == 0.3
    made = stage(0.2, type="additive", target_entropy=1.0, max_coeff=1.0)
    assert made.learn({}) == made.learn({"actor/entropy": math.nan}) == {"actor/entropy_coeff": 0.2}
    assert (made.coef, made.entropy) == (None, None)


def test_a_fixed_weight_stays_and_says_nothing() -> None:
    made = stage(0.3)
    assert made.learn({"actor/entropy": 1.0}) == {}
    assert made.weight == 0.3
    assert made.actor_config() is made.config
    made.load_state_dict({"coef": 0.7, "entropy": 1.0})
    assert made.weight == 0.3


def test_what_it_remembers_passes_through_json_bit_by_bit() -> None:
    settings = {"type": "sac", "target_entropy": 0.7, "step": 0.1}
    one, other = stage(0.01, **settings), stage(0.01, **settings)
    one.learn({"actor/entropy": 0.1 + 0.2})
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert (other.coef, other.entropy) == (one.coef, one.entropy)
    assert other.weight != 0.01


def test_a_resumed_control_of_another_kind_starts_again_and_says_so() -> None:
    one = stage(0.0, type="additive", target_entropy=0.5)
    one.learn({"actor/entropy": 1.0})
    assert one.coef == 0.0, "which sac could not move"
    state = json.loads(json.dumps(one.state_dict()))
    other = stage(0.01, type="sac", target_entropy=0.5)
    (note,) = other.load_state_dict(state)
    assert "actor.entropy_ctrl.type was additive and is sac" in note
    assert "starts again from actor.entropy_coeff 0.01" in note
    assert other.weight == 0.01
    aim = stage(0.0, type="additive", target_entropy=2.0)
    assert "target_entropy was 0.5 and is 2.0" in aim.load_state_dict(state)[0]
    assert aim.weight == 0.0


def test_a_resumed_weight_keeps_to_new_bounds_and_says_whose_it_is() -> None:
    settings = {"type": "additive", "target_entropy": 2.0, "step": 0.05}
    one = stage(0.05, **settings)
    one.learn({"actor/entropy": 1.0})
    state = json.loads(json.dumps(one.state_dict()))
    assert stage(0.05, **settings).load_state_dict(state) == []
    low = stage(0.05, **settings, max_coeff=0.06)
    (note,) = low.load_state_dict(state)
    assert "was 0.1 and is now actor.entropy_ctrl.max_coeff 0.06" in note
    assert low.weight == 0.06
    moved = stage(0.01, **settings)
    (note,) = moved.load_state_dict(state)
    assert "goes on with the checkpoint's 0.1" in note
    assert moved.weight == 0.1


REFUSED = {
    "no target": ({"entropy_ctrl": {"type": "sac"}, "entropy_coeff": 0.01}, "no actor.entropy_ctrl.target_entropy"),
    "fixed": ({"entropy_ctrl": {"target_entropy": 1.0}}, "set additive or sac"),
    "sac at 0": ({"entropy_ctrl": {"type": "sac", "target_entropy": 1.0}}, "start above 0"),
    "over the bound": (
        {"entropy_ctrl": {"type": "additive", "target_entropy": 1.0}, "entropy_coeff": 0.2},
        "max_coeff",
    ),
    "below 0": ({"entropy_ctrl": {"type": "additive", "target_entropy": 1.0}, "entropy_coeff": -0.1}, "not between 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_work_are_refused(name: str) -> None:
    actor, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate({"model": {"path": "m"}, "data": {"task": {"name": "sum"}}, "actor": actor})
