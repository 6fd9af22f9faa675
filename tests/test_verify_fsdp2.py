"""`rlctl verify` on fsdp2: topologies pass; faults in the real engine do not, and are named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verify_faults import FAULT_FILE, FAULTS

from rlctl.capabilities import matrix
from rlctl.device import Device
from rlctl.evidence import load_evidence
from rlctl.plugins import PluginSet, load_plugins
from rlctl.records import EvidenceLevel
from rlctl.testing.evidence import record_evidence
from rlctl.verify.report import Report, summary_line
from rlctl.verify.request import make_request
from rlctl.verify.run import Verifier

HERE = Path(__file__).parent
LIGHT = """
from rlctl.hookspecs import hookimpl


@hookimpl
def rlctl_engine_wrappers(backend, role):
    return [("fault", "verify_faults:Faulty")] if role == "actor" else []
"""
OF_BOTH_HEADS = {"export_names", "export", "loss", "grad_norm", "gradients", "weights", "checkpoint"}
ALWAYS = OF_BOTH_HEADS | {"log_probs", "entropy"}
ADAMW = {"loss_adamw", "grad_norm_adamw", "weights_adamw"}

# (fault, topology, model, what must fail, what must not)
CONTROLS: list[tuple[str, str, str, set[str], set[str]]] = [
    ("wrong_normaliser", "dp_shard=2", "qwen3", {"gradients", "grad_norm", "weights"}, {"export"}),
    ("twice_on_one_rank", "dp_shard=2", "qwen3", {"gradients", "grad_norm", "weights", "weights_adamw"}, {"export"}),
    ("shards_loaded_swapped", "dp_shard=2", "qwen3", {"export", "log_probs", "loss"}, {"export_names", "checkpoint"}),
    ("shards_exported_swapped", "dp_shard=2", "qwen3", {"export", "weights"}, {"log_probs", "loss", "grad_norm"}),
    ("one_rank_not_reduced", "dp_shard=2", "qwen3", {"gradients", "grad_norm", "weights"}, {"export"}),
    ("stale_mask", "dp_shard=2", "qwen3", {"log_probs", "entropy", "loss", "gradients"}, {"export"}),
    ("shifted_mask", "dp_shard=2", "qwen3", {"log_probs", "entropy", "loss", "gradients"}, {"export"}),
    ("moments_forgotten", "dp_shard=2", "qwen3", {"checkpoint"}, ALWAYS - {"checkpoint"} | ADAMW),
    ("moments_need_room", "dp_shard=2", "qwen3", {"checkpoint"}, ALWAYS - {"checkpoint"} | ADAMW),
    ("positions_not_reset", "dp_shard=2", "gpt2", {"log_probs", "loss", "gradients"}, {"export"}),
    ("misrouted", "dp_shard=2", "qwen3_moe", {"experts", "expert_tokens", "log_probs"}, {"export"}),
    ("positions_of_slices", "usp=2", "qwen3", {"log_probs", "loss", "gradients"}, {"export"}),
    ("replicas_not_reduced", "dp_replicate=2", "qwen3", set(), {"export", "log_probs"}),
]


class Lab:
    """One verifier, so that ranks and references serve every test of this module."""

    def __init__(self, plugins: PluginSet, verifier: Verifier, fault_file: Path) -> None:
        self.plugins = plugins
        self._verifier = verifier
        self._fault_file = fault_file

    def forget(self) -> None:
        """What was learnt of the backend: the next engine has SGD again."""
        self._verifier._without_sgd.clear()

    def run(self, topology: str | None, *families: str, fault: str = "", record: bool = False, **more: Any) -> Report:
        self._fault_file.write_text(fault)
        request = make_request(
            self.plugins,
            "fsdp2",
            Device("cpu"),
            topology=topology,
            models=[f"tiny:{f}" for f in families],
            record=record,
            timeout_s=120,
            **more,
        )
        if not request.every:
            # A fault is one of the layers, which both heads have: one of them is enough.
            request = replace(request, choices=[c for c in request.choices if c.model_type == "language_model"])
        try:
            return self._verifier.run(request)
        finally:
            self._fault_file.write_text("")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("verify")
    site = root / "site"
    info = site / "rlctl_verify_faults-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlctl-verify-faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlctl.plugins]\nverify-faults = verify_faults_light\n")
    (site / "verify_faults_light.py").write_text(LIGHT)
    shutil.copy(HERE / "verify_faults.py", site)
    fault_file = root / "fault"
    fault_file.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
        patch.setenv(FAULT_FILE, str(fault_file))
        patch.setenv("RLCTL_DATA_DIR", str(root / "data"))
        patch.setenv("RLCTL_CACHE_DIR", str(root / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        plugins = load_plugins()
        assert [w[1][0] for w in plugins.engine_wrappers("fsdp2", "actor")] == ["fault"]
        with Verifier(plugins) as verifier:
            yield Lab(plugins, verifier, fault_file)


def shown(report: Report) -> str:
    return json.dumps(report.to_json(), indent=1)


def test_verify_passes_every_topology_of_two_ranks(lab: Lab) -> None:
    report = lab.run(None, "qwen3", every=True, nproc=2, record=True)
    assert report.passed, shown(report)
    axes = [dict(c.topology) for c in report.cases if c.model_type == "language_model"]
    assert sorted(map(str, axes)) == sorted(map(str, [{}, {"dp_shard": 2}, {"dp_replicate": 2}, {"usp": 2}]))
    assert axes == [dict(c.topology) for c in report.cases if c.model_type == "value_model"]
    for case in report.cases:
        assert set(case.deltas) == (OF_BOTH_HEADS | {"values"} if case.model_type == "value_model" else ALWAYS) | ADAMW
        # One micro-batch would prove nothing about accumulation.
        assert min(case.micro_batches.values()) > 1
        assert case.skipped == {}
        if case.model_type == "value_model":
            record_evidence(
                "-".join([f"{k}{v}" for k, v in case.topology.items()] or ["one-process"]) + "-cpu-qwen3-value_model",
                backend="fsdp2",
                level=EvidenceLevel.PARITY,
                axes=case.topology,
                world_size=case.world_size,
                device=case.device,
                model_family=case.model_family,
                model_type=case.model_type,
                what="rlctl verify: equal to one process of plain Hugging Face code, float32; PPO's value loss, three steps",
                deltas={q: d.value for q, d in case.deltas.items()},
            )
    cells = [c for c in matrix(lab.plugins, load_evidence(lab.plugins.entries), ["fsdp2"]) if c.device == "cpu"]
    cells = [c for c in cells if c.model_type == "language_model"]
    proved = {str(c.axis): c.evidence for c in cells if c.evidence.level == "parity" and not c.evidence.stale}
    assert set(proved) == {"dp_shard", "dp_replicate", "usp"}
    written = [json.loads(Path(c.evidence or "").read_text()) for c in report.cases]
    assert [w["axes"] for w in written if w["model_type"] == "language_model"] == axes
    assert {w["level"] for w in written} == {"parity"}
    assert "(4 on this machine)" in load_evidence(lab.plugins.entries).proved_words("fsdp2")


@pytest.mark.parametrize(("fault", "topology", "family", "must", "must_not"), CONTROLS, ids=[c[0] for c in CONTROLS])
def test_verify_names_what_a_fault_breaks(
    lab: Lab, fault: str, topology: str, family: str, must: set[str], must_not: set[str]
) -> None:
    report = lab.run(topology, family, fault=fault)
    [case] = report.cases
    assert not report.passed
    assert must <= set(case.failures), shown(report)
    assert not must_not & set(case.failures), shown(report)
    if fault == "replicas_not_reduced":
        assert case.error is not None
        assert "grad norm" in case.error["what"]
    else:
        assert case.error is None, shown(report)
    assert all(name in summary_line(report.cases) for name in must)


def test_every_fault_is_a_control() -> None:
    assert {c[0] for c in CONTROLS} == set(FAULTS)


def test_verify_engines_without_sgd_are_measured_with_smooth_steps(lab: Lab) -> None:
    report = lab.run(None, "llama", fault="sgd_refused")
    [case] = report.cases
    assert report.passed, shown(report)
    assert "the engine refuses it" in case.skipped["sgd"]
    assert set(case.deltas) >= ALWAYS | ADAMW
    assert set(case.micro_batches) == {"sft-smooth", "grpo-smooth", "grpo-adamw"}
    lab.forget()


def test_verify_mixture_of_experts_compares_routing(lab: Lab) -> None:
    report = lab.run("usp=2", "qwen3_moe")
    [case] = report.cases
    assert report.passed, shown(report)
    assert {"experts", "expert_tokens"} <= set(case.deltas)
    assert not case.deltas["experts"].where.startswith("0 of 0")


def test_a_failed_verify_takes_the_earlier_proof_back(lab: Lab) -> None:
    folder = Path(os.environ["RLCTL_DATA_DIR"]) / "evidence"
    assert lab.run("dp_shard=2", "qwen3", record=True).passed
    [path] = folder.glob("verify-fsdp2-language_model-*-dp_shard2-qwen3-float32.json")
    assert json.loads(path.read_text())["level"] == "parity"
    report = lab.run("dp_shard=2", "qwen3", fault="wrong_normaliser", record=True)
    assert any("took back" in m and str(path) in m for m in report.messages)
    record = json.loads(path.read_text())
    assert record["level"] == "declared"
    assert record["extra"]["failed"] is True
    assert "gradients" in record["what"]
    cells = matrix(lab.plugins, load_evidence(lab.plugins.entries), ["fsdp2"])
    [cell] = [c for c in cells if (c.device, c.axis, c.model_type) == ("cpu", "dp_shard", "language_model")]
    assert [p.record.what for p in cell.evidence.failed] == [record["what"]]
    assert lab.run("dp_shard=2", "qwen3", record=True).passed
    assert json.loads(path.read_text())["level"] == "parity"


def test_verify_four_ranks_combine_axes(lab: Lab) -> None:
    for topology in ("dp_shard=2,usp=2", "dp_replicate=2,dp_shard=2"):
        report = lab.run(topology, "qwen3")
        assert report.passed, shown(report)


def test_verify_command_says_so_in_its_exit_code(lab: Lab, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlctl_cli.main", "verify", "--backend", "fsdp2", "--device", "cpu", "--no-record"]

    def run(*more: str, fault: str = "") -> subprocess.CompletedProcess[str]:
        file = tmp_path / "fault"
        file.write_text(fault)
        env = {**os.environ, FAULT_FILE: str(file)}
        return subprocess.run(
            [*command, *more], env=env, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
        )

    good = run("--json")
    assert good.returncode == 0, good.stderr
    payload = json.loads(good.stdout)
    assert (payload["schema"], payload["passed"], len(payload["cases"])) == (1, True, 2)
    bad = run("--topology", "dp_shard=2", fault="one_rank_not_reduced")
    assert bad.returncode == 1
    assert "Traceback" not in bad.stderr
    assert "FAIL" in bad.stdout
    assert "0 of 2 passed; dp_shard=2 (tiny:qwen3) failed: " in bad.stdout
    assert "gradients" in bad.stdout.splitlines()[-1]
