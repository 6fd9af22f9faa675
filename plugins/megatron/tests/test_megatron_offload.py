"""Storages that wait on the host: views and aliases survive, and what was freed is what is said. Tried on the CPU, where memory
is given back in the same way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_tiny import CONFIGS, engine_on, exported, nll, one_step, provider, rows
from torch import nn

from rlctl.errors import EngineError
from rlctl_megatron.offload import Parked, Whereabouts, gradients, moments, weights


def test_parked_storages_come_back_with_their_views_and_aliases() -> None:
    whole = torch.arange(12, dtype=torch.float32)
    middle, turned, bits = whole[3:9].view(2, 3), whole.view(3, 4).t(), whole.view(torch.int32)
    parameter = nn.Parameter(whole[:4])
    other = torch.ones(3, dtype=torch.bfloat16)
    wanted = [t.detach().clone() for t in (whole, middle, turned, bits, parameter, other)]
    parked = Parked()
    assert not parked
    # Twice the same storage is parked once.
    assert parked.park([middle, whole, parameter.data, other]) == 12 * 4 + 3 * 2
    assert parked
    assert whole.untyped_storage().size() == other.untyped_storage().size() == 0
    assert parked.park([middle, other]) == 0, "what is away is not sent away again"
    parked.restore()
    assert not parked
    for found, value in zip((whole, middle, turned, bits, parameter, other), wanted, strict=True):
        assert torch.equal(found.detach(), value)
    # They are still one memory, not equal copies.
    middle.zero_()
    assert whole[3:9].eq(0).all()
    assert bits[3:9].eq(0).all()
    assert float(parameter[3]) == 0.0
    parked.restore()
    assert whole[3:9].eq(0).all(), "nothing old comes back twice"


def test_empty_tensors_are_left_alone() -> None:
    parked = Parked()
    assert parked.park([torch.empty(0), torch.empty(2, 0)]) == 0
    assert not parked


class _Accelerator(Whereabouts):
    """One that sees an accelerator where there is none: its host is this process's memory too."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(torch.device("meta"), **settings)


@pytest.mark.parametrize("distributed", ["always", "never"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_whose_parts_wait_elsewhere_takes_the_same_steps(distributed, tied) -> None:
    model = CONFIGS["llama-tied" if tied else "llama"]
    optim = {"name": "adamw", "lr": 1e-2}
    seen = []
    for away in (False, True):
        with engine_on(model, optim=optim, distributed_optimizer=distributed) as engine:
            backend = provider(engine)
            if away:
                backend._host = _Accelerator(param_offload=True, optimizer_offload=True)
                backend._host.rest(backend._built, backend._stepper)
                assert all(t.untyped_storage().size() == 0 for t in weights(backend._built))
            norms = []
            for seed in range(3):
                norms.append(one_step(engine, rows(seed=seed)).grad_norm)
                if away:
                    parts = [*weights(backend._built), *gradients(backend._built), *moments(backend._stepper)]
                    assert len(parts) > 20
                    assert all(t.untyped_storage().size() == 0 for t in parts), "everything is away between the steps"
            seen.append((norms, exported(engine)))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(seen[1][1][n], t) for n, t in seen[0][1].items())


def test_parts_are_moved_by_name_and_come_back_when_used() -> None:
    with engine_on(CONFIGS["llama"], optim={"name": "adamw"}) as engine:
        backend = provider(engine)
        one_step(engine, rows())
        before = exported(engine)
        backend._host = _Accelerator()
        engine.move("cpu", "model", "optimizer")
        gone = {part: _bytes(found) for part, found in _parts(backend).items()}
        assert gone["model"] == gone["optimizer"] == 0
        assert gone["grad"] > 0, "which was not asked for"
        engine.move("cuda", "optimizer")
        assert _bytes(_parts(backend)["optimizer"]) > 0
        assert all(torch.equal(t, before[n]) for n, t in exported(engine).items())
        with pytest.raises(EngineError, match="no such part") as error:
            engine.move("cpu", "weights")
        assert "model, optimizer, grad" in str(error.value)


def test_gradients_that_wait_for_their_step_are_not_sent_away() -> None:
    with engine_on(CONFIGS["llama"]) as engine:
        backend = provider(engine)
        backend._host = _Accelerator(param_offload=True)
        engine.set_mode(True)
        engine.forward_backward([rows()], nll, forward_only=False)
        assert _bytes(_parts(backend)["model"]) > 0
        engine.forward_backward([rows(seed=1)], nll, forward_only=True)
        assert _bytes(_parts(backend)["grad"]) > 0, "scoring in between leaves them where they are"
        assert engine.optimizer_step().grad_norm > 0
        assert _bytes(_parts(backend)["model"]) == _bytes(_parts(backend)["grad"]) == 0


def test_on_a_cpu_nothing_is_moved() -> None:
    with engine_on(CONFIGS["llama"], param_offload=True, optimizer_offload=True) as engine:
        one_step(engine, rows())
        engine.move("cpu", "model", "optimizer", "grad")
        assert all(_bytes(found) for part, found in _parts(provider(engine)).items() if part != "optimizer")


def test_an_engine_that_only_scores_has_weights_alone() -> None:
    with engine_on(CONFIGS["llama"], forward_only=True) as engine:
        backend = provider(engine)
        backend._host = _Accelerator()
        engine.move("cpu", "model", "optimizer", "grad")
        assert _bytes(weights(backend._built)) == 0
        assert not list(gradients(backend._built))
        assert list(exported(engine))


def _parts(backend: Any) -> dict[str, list[torch.Tensor]]:
    own = SimpleNamespace(built=backend._built, stepper=backend._stepper)
    return {
        "model": list(weights(own.built)),
        "grad": list(gradients(own.built)),
        "optimizer": list(moments(own.stepper)),
    }


def _bytes(tensors: Any) -> int:
    """Of their storages that are here."""
    return sum(size for _, size in {(t.untyped_storage()._cdata, t.untyped_storage().size()) for t in tensors})
