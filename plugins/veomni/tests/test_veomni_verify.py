"""`rlctl verify --all` on veomni: every axis alone and in pairs, on real gloo ranks, equals plain Hugging Face code."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator

import pytest

from rlctl.device import Device
from rlctl.plugins import load_plugins
from rlctl.records import EvidenceLevel
from rlctl.testing.evidence import record_evidence
from rlctl.verify.report import Case, Report
from rlctl.verify.request import make_request
from rlctl.verify.run import Verifier

if importlib.util.find_spec("veomni") is None:  # not imported here: it would log all it does
    pytest.skip("veomni is not installed (it has an environment of its own)", allow_module_level=True)
pytestmark = pytest.mark.slow

ALWAYS = {"export_names", "export", "loss", "grad_norm", "gradients", "weights", "checkpoint"}
ADAMW = {"loss_adamw", "grad_norm_adamw", "weights_adamw"}
HEADS = {"language_model": {"log_probs", "entropy"}, "value_model": {"values"}}
ROUTING = {"experts", "expert_tokens"}
"""A mixture also says which experts it chose."""
BOUND = 1e-5
"""Nothing in float32 may be further from one process than this; weights after AdamW have a bound of their own."""

WANTED: list[tuple[str, dict[str, int]]] = [
    ("qwen3", {}),
    ("qwen3", {"dp_shard": 2}),
    ("qwen3", {"dp_shard": 2, "dp_replicate": 2}),
    ("qwen3", {"usp": 2}),
    ("qwen3", {"dp_shard": 2, "usp": 2}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"dp_shard": 2}),
    ("qwen3_moe", {"dp_shard": 2, "ep": 2}),
    ("qwen3_moe", {"dp_shard": 4, "ep": 4}),
    ("qwen3_moe", {"dp_shard": 4, "ep": 2}),
    ("qwen3_moe", {"usp": 2, "ep": 2}),
    ("qwen3_moe", {"dp_shard": 2, "usp": 2, "ep": 2}),
    ("qwen3_moe", {"dp_shard": 2, "usp": 2, "ep": 4}),
    ("qwen3_moe", {"dp_shard": 2, "dp_replicate": 2, "ep": 2}),
]
"""What must be among them, whatever --all comes to choose."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Report, Report]]:
    """(of --all, of the other families that the backend runs)."""
    root = tmp_path_factory.mktemp("verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLCTL_DATA_DIR", str(root / "data"))
        patch.setenv("RLCTL_CACHE_DIR", str(root / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        plugins = load_plugins()
        settings = {"record": False, "timeout_s": 240}
        with Verifier(plugins) as verifier:
            whole = verifier.run(make_request(plugins, "veomni", Device("cpu"), every=True, nproc=4, **settings))
            others = verifier.run(
                make_request(
                    plugins,
                    "veomni",
                    Device("cpu"),
                    topology="usp=2",
                    nproc=2,
                    models=("tiny:llama", "tiny:qwen2"),
                    **settings,
                )
            )
            yield whole, others


def test_every_topology_of_veomni_equals_one_process(reports: tuple[Report, Report]) -> None:
    cases: list[Case] = [case for report in reports for case in report.cases]
    failed = [(c.topology, c.model, c.model_type, c.failures, c.error) for c in cases if not c.passed]
    assert not failed, json.dumps(failed, indent=1, default=str)
    for case in cases:
        routing = ROUTING if case.model_family == "qwen3_moe" else set()
        assert set(case.deltas) == ALWAYS | ADAMW | HEADS[case.model_type] | routing, case.topology
        exact = {q: d.value for q, d in case.deltas.items() if q not in ADAMW}
        assert max(exact.values()) < BOUND, (case.topology, exact)
        name = [*(f"{k}{v}" for k, v in case.topology.items()), case.device, case.model, case.model_type]
        record_evidence(
            "-".join(name).replace("tiny:", ""),
            backend="veomni",
            level=EvidenceLevel.PARITY,
            axes=case.topology,
            world_size=case.world_size,
            device=case.device,
            model_family=case.model_family,
            model_type=case.model_type,
            what="rlctl verify: equal to one process of plain Hugging Face code, float32; SFT, GRPO or value loss, three steps",
            deltas={q: d.value for q, d in case.deltas.items()},
            dists=("torch", "transformers", "veomni"),
        )


def test_nothing_that_was_promised_of_veomni_is_left_out(reports: tuple[Report, Report]) -> None:
    ran = [
        (c.model.removeprefix("tiny:"), dict(c.topology)) for c in reports[0].cases if c.model_type == "language_model"
    ]
    for wanted in WANTED:
        assert wanted in ran, wanted
    values = [dict(c.topology) for c in reports[0].cases if c.model_type == "value_model"]
    assert all(axes in values for axes in ({}, {"dp_shard": 2}, {"usp": 2}))
    assert {c.model_family for c in reports[1].cases} == {"llama", "qwen2"}
