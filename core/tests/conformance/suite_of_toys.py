"""The conformance suites on every toy. Run by test_conformance_suite_*.py in a process of its own; not collected else."""

from __future__ import annotations

from typing import Any

import toy_light
import toy_rollout
import toy_train
from toy_model import make_model

from rlctl.records import BackendKind
from rlctl.testing import RolloutConformance, TrainConformance

MODEL = {"config": {"model_type": "toy", "vocab": 16, "hidden": 12}}


def _suite(kind: BackendKind, name: str, **attributes: Any) -> type:
    base = TrainConformance if kind is BackendKind.TRAIN else RolloutConformance
    module = attributes.pop("module", "toy_train" if kind is BackendKind.TRAIN else "toy_rollout")
    config = attributes.pop("config", "toy_config:ToyConfig")
    values = {"spec": toy_light.spec(kind, f"{module}:{name}", config), "model": MODEL, "light_module": "toy_light"}
    if kind is BackendKind.TRAIN:
        values["dropout_model"] = {"config": {**MODEL["config"], "dropout": 0.5}}
    else:
        values["weights"] = lambda self, seed: {
            k: v * 3.0 for k, v in make_model({**MODEL, "seed": seed}).state_dict().items()
        }
    return type(f"Test{name}", (base,), {**values, **attributes})


for _kind, _module in ((BackendKind.TRAIN, toy_train), (BackendKind.ROLLOUT, toy_rollout)):
    _base = toy_train.Toy if _kind is BackendKind.TRAIN else toy_rollout.ToyRollout
    for _name, _cls in list(vars(_module).items()):
        if isinstance(_cls, type) and issubclass(_cls, _base):
            _key = f"Test{'Rollout' if _kind is BackendKind.ROLLOUT and _name != 'ToyRollout' else ''}{_name}"
            globals()[_key] = _suite(_kind, _name)

# The engine for simulated ranks, on one.
TestFakeTrain = _suite(BackendKind.TRAIN, "FakeTrain", module="rlctl.testing.fake_engine", refused_model=None)
TestLaxConfig = _suite(BackendKind.TRAIN, "Toy", config="toy_config:LaxConfig")
TestHeavyModule = _suite(BackendKind.TRAIN, "Toy", light_module="toy_train")
TestHeavyConfig = _suite(BackendKind.TRAIN, "Toy", config="toy_train:HeavyConfig")
