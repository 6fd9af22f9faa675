"""`rlctl verify --all` on megatron: every axis alone and in pairs, on real gloo ranks, equals plain Hugging Face code.

`make evidence` runs every case and writes the records that ship. An ordinary run takes those of one and two ranks, and of four
the ones in which most axes meet; that no record is missing is asserted here too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.device import Device
from rlctl.plugins import PluginSet, load_plugins
from rlctl.records import EvidenceLevel
from rlctl.testing.evidence import DIRECTORY_VARIABLE, record_evidence
from rlctl.userdirs import user_data_dir
from rlctl.verify.report import Report
from rlctl.verify.request import Request, make_request
from rlctl.verify.run import Verifier
from rlctl.verify.topologies import parse_topology

rlctl_megatron = pytest.importorskip("rlctl_megatron")
pytest.importorskip("megatron.core", reason="megatron-core is not installed (rlctl-plugin-megatron)")
pytestmark = pytest.mark.slow

ALWAYS = {"export_names", "export", "loss", "grad_norm", "gradients", "weights", "checkpoint"}
ADAMW = {"loss_adamw", "grad_norm_adamw", "weights_adamw"}
HEADS = {"language_model": {"log_probs", "entropy"}, "value_model": {"values"}}
BOUND = 1e-4
"""Nothing in float32 may be further from one process than this; weights after AdamW have a bound of their own."""

WANTED: list[dict[str, int]] = [
    {},
    {"tp": 2},
    {"tp": 2, "sp": 1},
    {"tp": 4},
    {"pp": 2},
    {"pp": 4},
    {"pp": 2, "vpp": 2},
    {"cp": 2},
    {"cp": 4},
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 4, "ep": 4},
    {"tp": 2, "pp": 2, "sp": 1},
    {"tp": 2, "cp": 2},
    {"pp": 2, "cp": 2},
    {"tp": 2, "dp_shard": 2},
    {"pp": 2, "dp_shard": 2},
    {"cp": 2, "dp_shard": 2},
]
"""What must be among them, whatever --all comes to choose."""


OF_FOUR: list[dict[str, int]] = [
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 4, "ep": 2},
    {"pp": 2, "cp": 2},
    {"tp": 2, "sp": 1, "cp": 2},
    {"dp_shard": 4, "ep": 2, "etp": 2},
    {"tp": 2, "sp": 1, "pp": 2, "vpp": 2},
    {"dp_shard": 2, "pp": 2, "vpp": 2, "ep": 2},
]
"""Of those with more than two ranks, what every run of the suite verifies."""

ALLGATHER = ["dp_shard=2,ep=2", "tp=2,sp=1,ep=2", "tp=2,sp=1,dp_shard=2,ep=2", "dp_shard=4,ep=2,etp=2"]
"""Where experts are verified with the other way to move tokens; --all has the one that is set by default."""


@dataclass(frozen=True)
class Lab:
    """One verifier, so that ranks and references serve every test of this module."""

    plugins: PluginSet
    verifier: Verifier

    def run(self, **asked: Any) -> Report:
        """What :func:`make_request` is asked for, on the CPU."""
        request = make_request(self.plugins, "megatron", Device("cpu"), record=False, timeout_s=180, **asked)
        return self.verifier.run(request)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLCTL_DATA_DIR", str(root / "data"))
        patch.setenv("RLCTL_CACHE_DIR", str(root / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        plugins = load_plugins()
        with Verifier(plugins) as verifier:
            yield Lab(plugins, verifier)


@pytest.fixture(scope="module")
def everything(lab: Lab) -> Request:
    return make_request(lab.plugins, "megatron", Device("cpu"), every=True, nproc=4, record=False, timeout_s=180)


@pytest.fixture(scope="module")
def report(lab: Lab, everything: Request) -> Report:
    if os.environ.get(DIRECTORY_VARIABLE):
        return lab.verifier.run(everything)
    some = [c for c in everything.choices if c.topology.world_size <= 2 or c.topology.axes() in OF_FOUR]
    assert len(some) > 30
    return lab.verifier.run(replace(everything, choices=tuple(some)))


@pytest.mark.parametrize("topology", ALLGATHER)
def test_experts_that_gather_all_tokens_equal_one_process(lab: Lab, topology: str) -> None:
    report = lab.run(topology=topology, models=["tiny:qwen3_moe"], engine=["moe_token_dispatcher=allgather"])
    (case,) = [c for c in report.cases if c.model_type == "language_model"]
    assert case.passed, (case.failures, case.error)
    assert case.notes["experts_dispatch"] == "allgather"
    assert dict(case.topology) == parse_topology(topology, None).axes()
    assert set(case.deltas) == ALWAYS | ADAMW | HEADS["language_model"]
    assert max(d.value for q, d in case.deltas.items() if q not in ADAMW) < BOUND, case.deltas


def test_a_family_that_is_refused_is_no_failed_comparison(lab: Lab) -> None:
    """Nothing was compared, so nothing of what holds may be taken back."""
    request = make_request(lab.plugins, "megatron", Device("cpu"), topology="tp=2", models=["tiny:gpt2"], record=True)
    (case,) = [c for c in lab.verifier.run(request).cases if c.model_type == "language_model"]
    assert not case.passed
    assert case.error is not None
    assert case.error["error"] == "CapabilityError"
    assert not list((user_data_dir() / "evidence").glob("*gpt2*"))


def test_every_topology_equals_one_process(report: Report) -> None:
    failed = [(c.topology, c.model, c.model_type, c.failures, c.error) for c in report.cases if not c.passed]
    assert not failed, json.dumps(failed, indent=1, default=str)
    for case in report.cases:
        assert set(case.deltas) == ALWAYS | ADAMW | HEADS[case.model_type], case.topology
        exact = {q: d.value for q, d in case.deltas.items() if q not in ADAMW}
        assert max(exact.values()) < BOUND, (case.topology, exact)
        record_evidence(
            _record_name(case.topology, case.device, case.model, case.model_type),
            backend="megatron",
            level=EvidenceLevel.PARITY,
            axes=case.topology,
            world_size=case.world_size,
            device=case.device,
            model_family=case.model_family,
            model_type=case.model_type,
            what="rlctl verify: equal to one process of plain Hugging Face code, float32; SFT, GRPO or value loss, three steps",
            deltas={q: d.value for q, d in case.deltas.items()},
            dists=("torch", "transformers", "megatron-core"),
        )


def test_nothing_that_was_promised_is_left_out(everything: Request) -> None:
    ran = [(c.topology.axes(), c.model, str(c.model_type)) for c in everything.choices]
    lm = [axes for axes, _, head in ran if head == "language_model"]
    for wanted in WANTED:
        assert wanted in lm, wanted
    moe = [axes for axes, model, _ in ran if "moe" in model]
    assert any(a.get("tp") == 2 and a.get("ep") == 2 and a.get("sp") for a in moe)
    assert any(a.get("ep") == 2 and a.get("etp") == 2 for a in moe)
    values = [axes for axes, _, head in ran if head == "value_model"]
    assert all(axes in values for axes in ({}, {"tp": 2}, {"pp": 2}, {"cp": 2}))
    tied = {model for _, model, _ in ran}
    assert {"tiny:qwen3", "tiny:qwen2"} <= tied  # the first ties its head, the second does not
    for axes in OF_FOUR:
        assert axes in lm, axes


def test_every_case_has_a_record_that_ships(everything: Request) -> None:
    shipped = {p.stem for p in (Path(rlctl_megatron.__file__).parent / "evidence").glob("*.json")}
    names = {_record_name(c.topology.axes(), "cpu", c.model, str(c.model_type)) for c in everything.choices}
    assert len(names) == len(everything.choices) >= 59
    assert not names - shipped


def _record_name(axes: Mapping[str, int], device: str, model: str, head: str) -> str:
    return "-".join([*(f"{k}{v}" for k, v in axes.items()), device, model, head]).replace("tiny:", "")
