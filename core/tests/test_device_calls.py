"""Detection and the few device calls, on the CPU that every test machine has."""

from __future__ import annotations

import random

import pytest

from rlctl import device
from rlctl.device import Device, detect_device
from rlctl.errors import CapabilityError

torch = pytest.importorskip("torch")
CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.delenv("RLCTL_DEVICE", raising=False)
    monkeypatch.delenv("RLCTL_VENDOR", raising=False)


def test_auto_asks_the_runtime():
    found = detect_device()
    assert found.type == ("cuda" if CUDA else found.type)
    assert device.is_available(found.type)


def test_cpu_is_always_there_and_has_no_vendor():
    assert detect_device("cpu") == Device("cpu", None)
    assert device.device_count("cpu") == 1
    assert device.device_name("cpu")


def test_the_variables_replace_detection(monkeypatch):
    monkeypatch.setenv("RLCTL_DEVICE", "npu")
    assert detect_device() == Device("npu", "huawei")
    monkeypatch.setenv("RLCTL_VENDOR", "fakechip")
    assert detect_device() == Device("npu", "fakechip")
    assert str(detect_device()) == "npu/fakechip"
    monkeypatch.setenv("RLCTL_DEVICE", "cuda")
    assert detect_device("cuda") == Device("cuda", "fakechip"), "what the variable says is taken as it is"
    monkeypatch.delenv("RLCTL_DEVICE")
    assert detect_device("cpu") == Device("cpu", "fakechip")


def test_a_written_device_beats_the_variable(monkeypatch):
    monkeypatch.setenv("RLCTL_DEVICE", "cuda")
    assert detect_device("cpu").type == "cpu"


@pytest.mark.skipif(CUDA, reason="this machine has the device")
def test_a_device_that_does_not_answer_is_refused_with_what_torch_says():
    with pytest.raises(CapabilityError) as caught:
        detect_device("cuda")
    assert torch.__version__ in str(caught.value)
    assert caught.value.next is not None
    assert "trainer.device=cpu" in caught.value.next


def test_an_unknown_device_type_is_absent_not_an_error():
    assert not device.is_available("abacus")
    assert not device.is_available("npu")


def test_seeds_repeat():
    device.seed_all(7)
    first = (random.random(), torch.rand(3).tolist())
    device.seed_all(7)
    assert (random.random(), torch.rand(3).tolist()) == first


def test_cpu_calls_do_nothing_and_memory_is_measured():
    for call in (device.synchronize, device.empty_cache):
        call("cpu")
        call(Device("cpu"))
        call(torch.device("cpu"))
    before = device.peak_rss_gb()
    block = torch.ones(64 * 2**20 // 4)  # 64 MiB, touched
    assert device.peak_rss_gb() >= before
    assert 0 < device.memory_allocated_gb("cpu") <= device.max_memory_allocated_gb("cpu") + 1e-3
    del block
    if device.reset_peak_memory("cpu"):
        assert device.peak_rss_gb() < before + 0.5


def test_the_name_of_a_device_that_is_not_there_is_no_failure() -> None:
    assert device.device_name("nosuch") == "nosuch, which does not answer"


def test_the_library_of_collectives_is_named_with_its_version() -> None:
    public = str(torch.__version__).partition("+")[0]
    assert device.collective_library("cpu") == f"torch {public}"
