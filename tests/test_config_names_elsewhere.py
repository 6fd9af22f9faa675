"""Names that the field has for what is one or more settings here."""

from __future__ import annotations

import pytest

from rlctl.algorithms.lookup import ELSEWHERE
from rlctl.config.load import load_config
from rlctl.config.schema import RunConfig
from rlctl.errors import ConfigError
from rlctl.plugins import load_plugins


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ppo", "algorithm.adv_estimator=gae"),
        ("GSPO", "actor.policy_loss.loss_mode=gspo"),
        ("dapo", "algorithm.filter_groups"),
        ("Dr-GRPO", "algorithm.adv_estimator=dr_grpo"),
        ("grop", "Did you mean grpo?"),
    ],
)
def test_an_algorithm_under_its_own_name_is_found(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [f"algorithm.adv_estimator={name}"], plugins=load_plugins())
    assert says in str(caught.value)


def test_what_they_are_said_to_be_exists() -> None:
    words = [word.strip(",()") for text in ELSEWHERE.values() for word in text.split() if "." in word]
    assert len(words) >= len(ELSEWHERE) - 1
    for word in words:
        place, _, _ = word.partition("=")
        section: object = RunConfig
        for part in place.split("."):
            fields = section.model_fields  # type: ignore[attr-defined]
            assert part in fields, place
            section = fields[part].default_factory or fields[part].annotation
            section = next(
                (kind for kind in getattr(section, "__args__", ()) if hasattr(kind, "model_fields")), section
            )
