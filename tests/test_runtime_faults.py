"""One of two real ranks fails in every phase of a step, in processes: a clear end, the right rank and phase, no orphans."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from runtime_fault_cases import CASES, run_case

from rlctl.runtime.transports.base import Transport
from rlctl.runtime.transports.process import ProcessTransport


@pytest.mark.parametrize("name", CASES)
def test_a_fault_ends_the_call_clearly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def transport(env: Mapping[str, str]) -> Transport:
        return ProcessTransport(tmp_path / "logs", env)

    error = run_case(CASES[name], transport, tmp_path)
    print(error)
    assert list(scratch.iterdir()) == []
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
