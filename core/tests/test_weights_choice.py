"""Which way weights take: by where the ranks are, what they offer, and what is wished for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlctl.errors import CapabilityError, GuardError
from rlctl.plugins import PluginSet
from rlctl.records import WeightTransportSpec
from rlctl.runtime.transfer import OWN, Whereabouts, Wish, choose, offered
from rlctl.sync import Ledger

CPU = Whereabouts("127.0.0.1", "cpu", "", OWN)
NEAR = replace(CPU, room="boot/1/1000")
GPU = Whereabouts("127.0.0.1", "cuda", "GPU-0", OWN)
OTHER = replace(GPU, unit="GPU-1")
IPC = WeightTransportSpec("ipc", "x:Y", "host", ("cuda",))


def name(*places: Whereabouts, wish: Wish = "auto") -> str:
    spec = choose(wish, places[0], places[1:])
    return "controller" if spec is None else spec.name


def test_one_kind_of_device_goes_from_rank_to_rank() -> None:
    assert name(CPU, CPU, CPU) == "gloo"
    assert name(GPU, OTHER) == "nccl"
    assert name(CPU, replace(CPU, address="10.0.0.2")) == "gloo"


def test_ranks_that_see_the_same_memory_use_it() -> None:
    assert name(NEAR, NEAR, NEAR) == "shared_memory"
    assert name(NEAR, replace(NEAR, room="boot/2/1000")) == "gloo", "processes of another container have other numbers"
    assert name(NEAR, replace(NEAR, address="10.0.0.2")) == "gloo"
    assert name(NEAR, NEAR, wish="collective") == "gloo"
    assert name(GPU, GPU, GPU) == "cuda_ipc", "one GPU, which NCCL takes one rank of"
    assert name(GPU, OTHER, wish="collective") == "nccl"
    assert name(NEAR, NEAR, wish="host") == "shared_memory"
    with pytest.raises(CapabilityError, match="no link") as caught:
        choose("host", NEAR, [CPU])
    assert "cannot map one another's memory" in str(caught.value.found)


def test_what_does_not_fit_goes_by_the_controller() -> None:
    assert name(GPU, CPU) == "controller"
    assert name(GPU, OTHER, replace(GPU, unit="GPU-1")) == "controller", "NCCL refuses two ranks on one device"
    assert name(replace(CPU, device="npu"), replace(CPU, device="npu")) == "controller"
    assert name(CPU, replace(CPU, offers=())) == "controller", "the other environment does not know it"
    assert name(CPU, CPU, wish="controller") == "controller"


def test_the_nearest_link_that_all_know_is_taken() -> None:
    own, other = (replace(place, offers=(*OWN, IPC)) for place in (GPU, OTHER))
    assert name(own, other) == "ipc"
    assert name(own, OTHER) == "nccl"
    assert name(own, replace(other, address="10.0.0.2")) == "nccl", "it reaches no further than the host"
    assert name(own, replace(own)) == "cuda_ipc", "that reaches less far"
    without = replace(own, offers=(*OWN[1:], IPC))
    assert name(without, without) == "ipc", "it may join ranks on one device"


@pytest.mark.parametrize(
    ("sender", "receiver", "found"),
    [
        (GPU, CPU, "weights on cpu and cuda"),
        (GPU, GPU, "two ranks on one cuda device"),
        (replace(CPU, device="npu"), replace(CPU, device="npu"), "links for cpu (gloo), cuda (nccl)"),
        (CPU, replace(CPU, offers=()), "links for nothing"),
    ],
)
def test_a_wish_that_cannot_be_met_says_why(sender: Whereabouts, receiver: Whereabouts, found: str) -> None:
    assert name(CPU, CPU, wish="collective") == "gloo"
    with pytest.raises(CapabilityError) as caught:
        choose("collective", sender, [receiver])
    assert found in str(caught.value.found)
    assert "runtime.weight_transport=auto" in str(caught.value)


def test_cores_own_links_join_one_version_of_torch() -> None:
    old, new = (replace(CPU, made_of=f"torch {version}") for version in ("2.12.0", "2.13.0"))
    assert name(old, old) == "gloo"
    assert name(old, new) == "controller"
    with pytest.raises(CapabilityError) as caught:
        choose("collective", old, [new, new])
    assert "core's own do not join torch 2.12.0 and torch 2.13.0" in str(caught.value.found)
    assert "one version of torch" in str(caught.value.wanted)
    shared = WeightTransportSpec("file", "x:Y", "host", ("cpu",))
    assert name(replace(old, offers=(*OWN, shared)), replace(new, offers=(*OWN, shared))) == "file", (
        "a plugin's own matter"
    )


def test_plugins_add_links_and_take_none_of_cores() -> None:
    class Plugins(PluginSet):
        def records(self, hook):
            assert hook == "rlctl_weight_transports"
            inside = WeightTransportSpec("inside", "x:Y", "process", ("cpu",))
            return [("dist", IPC), ("dist", replace(IPC, name="gloo")), ("dist", inside)]

    assert offered(PluginSet()) == OWN
    assert offered(Plugins()) == (*OWN, IPC)


def test_a_name_that_comes_twice_is_refused() -> None:
    import torch

    ledger = Ledger(verify=False)
    with pytest.raises(GuardError, match="exports weight 'w' twice"):
        list(ledger.note(iter([("w", torch.ones(1)), ("v", torch.ones(1)), ("w", torch.ones(1))])))
    assert list(ledger.sent) == ["w", "v"]
    assert ledger.num_bytes == 8
