"""The weight of the entropy bonus from step to step; in the checkpoint, so that a resumed run goes on with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlctl.algorithms.entropy_control import additive_weight, next_additive, next_sac
from rlctl.config.schema_roles import ActorConfig


@dataclass
class EntropyStage:
    """The weight of the entropy bonus of one run.

    Args:
        config: the ``actor`` section.
        coef: c or alpha of the next step; None: as the configuration begins.
        entropy: of the last step that measured one, in nats.
    """

    config: ActorConfig
    coef: float | None = None
    entropy: float | None = None

    @property
    def adaptive(self) -> bool:
        return self.config.entropy_ctrl.type != "fixed"

    @property
    def weight(self) -> float:
        """The weight of the next step's bonus."""
        control, coef = self.config.entropy_ctrl, self.config.entropy_coeff if self.coef is None else self.coef
        if control.type != "additive":
            return coef
        return additive_weight(coef, self.entropy, target=self._target)

    @property
    def _target(self) -> float:
        target = self.config.entropy_ctrl.target_entropy
        assert target is not None, "the configuration is refused without one"
        return target

    def actor_config(self) -> ActorConfig:
        """The ``actor`` section with the weight of the next step."""
        return self.config.model_copy(update={"entropy_coeff": self.weight}) if self.adaptive else self.config

    def learn(self, metrics: dict[str, float]) -> dict[str, float]:
        """Take the control's step after an update.

        Args:
            metrics: of the update; without a finite ``actor/entropy`` nothing was measured, and the weight stays.

        Returns:
            ``actor/entropy_coeff``, the weight that the update had; nothing where the weight is fixed.
        """
        if not self.adaptive:
            return {}
        control, used = self.config.entropy_ctrl, self.weight
        if math.isfinite(metrics.get("actor/entropy", math.nan)):
            self.entropy = metrics["actor/entropy"]
            coef = self.config.entropy_coeff if self.coef is None else self.coef
            move = next_additive if control.type == "additive" else next_sac
            self.coef = move(coef, self.entropy, target=self._target, step=control.step, largest=control.max_coeff)
        return {"actor/entropy_coeff": used}

    def state_dict(self) -> dict[str, Any]:
        """As JSON data; floats come back bit by bit."""
        return {"coef": self.coef, "entropy": self.entropy, **self._settings}

    @property
    def _settings(self) -> dict[str, Any]:
        control = self.config.entropy_ctrl
        return {"type": control.type, "target_entropy": control.target_entropy, "start": self.config.entropy_coeff}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Take :meth:`state_dict`'s answer back; a control that the configuration has switched off since then is left out.

        Returns:
            What the user should know, a line each: where settings were changed since then.
        """
        coef = state.get("coef")
        if not self.adaptive or coef is None:
            return []
        self.entropy = state.get("entropy")
        control = self.config.entropy_ctrl
        changed = [k for k in ("type", "target_entropy") if state.get(k, self._settings[k]) != self._settings[k]]
        if changed:
            said = " and ".join(f"actor.entropy_ctrl.{k} was {state[k]} and is {self._settings[k]}" for k in changed)
            return [
                f"{said}: the weight of the entropy starts again from actor.entropy_coeff {self.config.entropy_coeff:g}"
            ]
        self.coef = min(coef, control.max_coeff)
        notes: list[str] = []
        if self.coef != coef:
            notes.append(
                f"the weight of the entropy was {coef:g} and is now actor.entropy_ctrl.max_coeff {self.coef:g}"
            )
        if state.get("start", self.config.entropy_coeff) != self.config.entropy_coeff:
            notes.append(
                f"actor.entropy_coeff was {state['start']:g} and is {self.config.entropy_coeff:g}, where the control starts: the "
                f"run goes on with the checkpoint's {self.coef:g}"
            )
        return notes
