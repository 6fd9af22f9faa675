"""What `rlctl plan` says that an engine keeps, against the bytes of its storages."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from megatron_state_ranks import ADAMW
from megatron_tiny import CONFIGS, engine_on, nll, one_step, provider, rows

from rlctl.catalogue_memory import train_policy
from rlctl.plan.activations import Precision
from rlctl.plan.memory import Setting
from rlctl.plan.parameters import count_parameters
from rlctl.plan.shapes import model_shape
from rlctl.plan.training import StateMemory
from rlctl_megatron import offload

PADDING = 0.02
"""In shared buffers a weight begins at a multiple of 64 elements, which tiny ones notice."""


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("distributed", ["never", "always"])
def test_weights_moments_and_gradient_buffers_are_as_planned(distributed) -> None:
    config = CONFIGS["qwen2"]
    shape = model_shape(config)
    assert shape is not None
    total = count_parameters(shape).total
    planned = StateMemory(
        "actor", total, total, Precision("float32", "float32"), Setting(train_policy("megatron"), shards=1)
    )
    with engine_on(config, optim=ADAMW, distributed_optimizer=distributed) as engine:
        one_step(engine, rows())
        built, stepper = provider(engine)._built, provider(engine)._stepper
        for when in ("at rest", "after scoring"):
            assert _bytes(offload.weights(built)) == pytest.approx(planned.weights().num_bytes, rel=PADDING), when
            assert _bytes(offload.gradients(built)) == pytest.approx(planned.gradients().num_bytes, rel=PADDING), when
            assert _bytes(offload.moments(stepper)) == pytest.approx(planned.optimizer().num_bytes, rel=PADDING), when
            engine.forward_backward([rows()], nll, forward_only=True)
