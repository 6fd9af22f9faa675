"""The conformance suite: what any backend must pass, ours or not. Needs the extra ``rlctl-core[testing]`` (pytest).

In a plugin's own tests::

    from rlctl.testing import TrainConformance

    class TestToy(TrainConformance):
        backend = "toy"
        model = {"config": {"model_type": "toy", "hidden_size": 16}}
        vocab_size = 32

and ``pytest`` runs every check. Attributes are described in :class:`rlctl.testing.backend.BackendConformance`.
"""

try:
    import pytest
except ModuleNotFoundError as error:
    from rlctl.errors import PluginError

    raise PluginError(
        "rlctl.testing needs pytest", found="no module named pytest", next="pip install 'rlctl-core[testing]'"
    ) from error

# Before the modules are imported: their asserts then show values, as in any test file.
pytest.register_assert_rewrite(
    "rlctl.testing.backend",
    "rlctl.testing.train",
    "rlctl.testing.train_gradients",
    "rlctl.testing.train_optimizer",
    "rlctl.testing.train_reader",
    "rlctl.testing.train_state",
    "rlctl.testing.rollout",
)

from rlctl.testing.rollout import RolloutConformance  # noqa: E402
from rlctl.testing.train import TrainConformance  # noqa: E402

__all__ = ["RolloutConformance", "TrainConformance"]
