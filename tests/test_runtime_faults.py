"""One of two real ranks fails in every phase of a step, in processes: a clear end, the right rank and phase, no orphans."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from runtime_fault_cases import CASES, run_case

from rlctl.errors import RlctlError
from rlctl.runtime.transports.base import Transport
from rlctl.runtime.transports.process import ProcessTransport

pytestmark = pytest.mark.slow


def in_processes(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> RlctlError:
    scratch = folder / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def transport(env: Mapping[str, str]) -> Transport:
        return ProcessTransport(folder / "logs", env)

    error = run_case(CASES[name], transport, folder, device)
    assert list(scratch.iterdir()) == []
    assert sorted(p.name for p in (folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    return error


@pytest.mark.parametrize("name", CASES)
def test_a_fault_ends_the_call_clearly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_processes(name, tmp_path, monkeypatch)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", CASES)
def test_a_fault_ends_the_call_clearly_on_two_cuda_devices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(in_processes(name, tmp_path, monkeypatch, "cuda"))
