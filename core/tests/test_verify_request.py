"""Which topologies and models a request comes to, what is refused, and the evidence that comes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.constraints import CONSTRAINTS
from rlctl.device import Device
from rlctl.doctor.environment import check_evidence
from rlctl.doctor.report import BackendReport
from rlctl.errors import CapabilityError, ConfigError, UsageError
from rlctl.evidence import load_evidence
from rlctl.plugins import Stage, load_plugins
from rlctl.records import (
    API_VERSION,
    Axis,
    BackendKind,
    BackendSpec,
    Capability,
    CheckStatus,
    EvidenceLevel,
    ModelType,
    Support,
)
from rlctl.topology import Topology
from rlctl.verify.compare import Delta
from rlctl.verify.models import without_dropout
from rlctl.verify.report import Case, Report, record_case, record_name, summary_line
from rlctl.verify.request import make_request
from rlctl.verify.selection import LeftOut
from rlctl.verify.tiny import FAMILIES, fit_tiny
from rlctl.verify.topologies import parse_topology, words

LM = ModelType.LANGUAGE_MODEL


def spec(**axes: str | None) -> BackendSpec:
    """A backend that supports these axes under these constraints."""
    cells = tuple(Capability(Axis(a), Support.SUPPORTED, "does", constraint=c) for a, c in axes.items())
    refused = tuple(Capability(a, Support.UNSUPPORTED, "does not") for a in Axis if a.value not in axes)
    return BackendSpec(
        name="mine",
        kind=BackendKind.TRAIN,
        engine="mine:Engine",
        config="mine:Config",
        api_version=API_VERSION,
        model_types=(LM,),
        devices=(("cpu", None),),
        capabilities=(*cells, *refused),
        requirements=(),
        imports=(),
        install_hint="pip install mine",
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("usp", [1, 2, 3, 4, 8])
def test_verify_tiny_models_fit_their_topology(family: str, usp: int) -> None:
    backend = spec(usp="heads_divisible_by_usp", pp="layers_divisible_by_stages")
    model = fit_tiny(family, backend, Topology(world_size=2 * usp, usp=usp, pp=2), "cpu", None, LM)
    assert model.num_heads % usp == 0
    assert model.num_layers % 2 == 0
    assert model.num_kv_heads % usp == 0 or usp % model.num_kv_heads == 0
    # Small topologies share one size, so that they share one reference.
    if usp <= 4 and usp != 3:
        assert (model.num_heads, model.num_layers) == (4, 2)
    assert "heads_divisible_by_usp" in CONSTRAINTS


def test_verify_dense_models_have_no_experts_to_spread() -> None:
    backend = spec(dp_shard=None, ep="experts_divisible_by_ep")
    topology = Topology(world_size=2, dp_shard=2, ep=2)
    assert fit_tiny("mixtral", backend, topology, "cpu", None, LM).num_experts == 4
    with pytest.raises(CapabilityError, match="tiny:llama") as caught:
        fit_tiny("llama", backend, topology, "cpu", None, LM)
    assert "experts" in caught.value.details[0]


def test_verify_topologies_are_read() -> None:
    assert parse_topology("dp_shard=2, usp=2", None).world_size == 4
    assert parse_topology(None, None).world_size == 1
    assert parse_topology(None, 4).dp_shard == 4
    assert parse_topology("usp=2", 8).dp_shard == 4
    assert parse_topology("tp=2,sp=true", None).sp is True
    for text in ("dp_shard", "dp_shard=x", "dp_shard=2,dp_shard=4", "=2"):
        with pytest.raises(UsageError):
            parse_topology(text, None)
    with pytest.raises(UsageError, match="dp_shards") as caught:
        parse_topology("dp_shards=2", None)
    assert caught.value.next == "--topology dp_shard=2"
    with pytest.raises(CapabilityError, match="multiply"):
        parse_topology("dp_shard=2,usp=2", 8)


def request(here, **more):
    return make_request(load_plugins(), "mine", Device("cpu"), **more)


def test_verify_requests_are_checked_before_anything_starts(here, tmp_path: Path) -> None:
    here.add_backend("mine")
    found = request(here, every=True, nproc=3)
    assert [words(t) for t in found.topologies] == ["one process", "dp_shard=2", "dp_shard=3"]
    assert found.models == ("tiny:qwen3", "tiny:qwen3_moe")
    assert (found.settings, found.master) == ({"size": 1}, "float32")
    assert request(here, engine=["size=3"]).settings == {"size": 3}
    # This backend has no dtype of computation of its own, so the weights' is what there is.
    assert request(here, dtype="bfloat16").master == "bfloat16"
    assert len(request(here, models=["tiny:all"]).models) == len(FAMILIES)
    for error, more in (
        (UsageError, {"every": True, "topology": "dp_shard=2"}),
        (UsageError, {"models": ["tiny:qwen33"]}),
        (UsageError, {"engine": ["size"]}),
        (ConfigError, {"engine": ["size=large"]}),
        (UsageError, {"engine": ["size={"]}),
        (ConfigError, {"models": [str(tmp_path)]}),
        (ConfigError, {"models": [str(tmp_path / "none")]}),
    ):
        with pytest.raises(error) as caught:
            request(here, **more)
        assert caught.value.next


def test_verify_request_imports_no_torch(site) -> None:
    site.add_backend("mine")
    done = site.python("""
        import sys
        from rlctl.device import Device
        from rlctl.plugins import load_plugins
        from rlctl.verify.request import make_request
        make_request(load_plugins(), "mine", Device("cpu"), every=True, nproc=2)
        print(sorted(set(sys.modules) & {"torch", "transformers", "numpy"}))
    """)
    assert done.stdout.strip() == "[]", done.stderr


def test_verify_dropout_is_switched_off_in_a_copy(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text(json.dumps({"attn_pdrop": 0.0, "use_dropout": True}))
    assert without_dropout(model, tmp_path / "copies") == (model, "")
    (model / "config.json").write_text(json.dumps({"attn_pdrop": 0.1, "text_config": {"hidden_dropout": 0.2}}))
    copy, changed = without_dropout(model, tmp_path / "copies")
    assert changed == "attn_pdrop, text_config.hidden_dropout"
    assert json.loads((copy / "config.json").read_text()) == {"attn_pdrop": 0.0, "text_config": {"hidden_dropout": 0.0}}
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((model / "config.json").read_text())["attn_pdrop"] == 0.1


CASE = Case(
    backend="mine",
    topology={"dp_shard": 2},
    world_size=2,
    model="tiny:llama",
    model_family="llama",
    model_type="language_model",
    device="cpu",
    dtype="float32",
    deltas={"loss": Delta(1e-7, "step 2"), "gradients": Delta(1e-6)},
    tolerances={"loss": 1e-5, "gradients": 2e-5},
)
FAILED = replace(CASE, deltas={**CASE.deltas, "gradients": Delta(float("inf"), "w")}, failures=("gradients",))


def test_verify_report_says_what_failed() -> None:
    assert CASE.passed
    assert not FAILED.passed
    assert not replace(CASE, error={"what": "rank 1 died"}).passed
    report = Report((CASE, FAILED), (LeftOut("ep=2", "tiny:llama", "no experts"),))
    assert not report.passed
    assert not Report(()).passed
    payload = report.to_json()
    keys = {"backend", "topology", "model", "passed", "deltas", "tolerances", "failures", "skipped", "error", "where"}
    assert keys <= set(payload["cases"][0])
    assert payload["cases"][0]["deltas"] == {"loss": 1e-7, "gradients": 1e-6}
    left_out = {"topology": "ep=2", "model": "tiny:llama", "model_type": "language_model", "reason": "no experts"}
    assert payload["left_out"] == [left_out]
    assert summary_line(report.cases) == "1 of 2 passed; dp_shard=2 (tiny:llama) failed: gradients"
    assert summary_line(()) == "nothing was run"


def test_verify_writes_evidence_and_takes_it_back(here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.add_backend("mine")
    plugins = load_plugins()
    [record] = [r for r in plugins.backends() if r.spec.name == "mine"]
    path, messages = record_case(CASE, record, Device("cpu"))
    assert messages == []
    assert (
        Path(path).name == f"{record_name(CASE)}.json" == "verify-mine-language_model-cpu-dp_shard2-llama-float32.json"
    )

    def now(axis: Axis = Axis.DP_SHARD):
        return load_evidence(plugins.entries).for_cell("mine", axis, "language_model", "cpu", None)

    assert (now().level, now().stale, now().failed) == (EvidenceLevel.PARITY, False, ())
    # A proof in another precision, and one of another combination.
    record_case(replace(CASE, dtype="bfloat16"), record, Device("cpu"))
    record_case(replace(CASE, topology={"dp_shard": 4}, world_size=4), record, Device("cpu"))
    _, messages = record_case(FAILED, record, Device("cpu"))
    assert len(messages) == 2
    assert all("took back" in m and "dp_shard2" in m for m in messages)
    assert now().level is EvidenceLevel.PARITY
    assert dict(now().proof.record.axes) == {"dp_shard": 4}
    assert [p.record.what for p in now().failed] == ["rlctl verify failed: gradients"]
    assert json.loads(Path(path).read_text())["deltas"]["gradients"] == 1e300
    alone = load_evidence(plugins.entries).for_topology("mine", {"dp_shard": 2}, "language_model", "cpu", None, "llama")
    assert (len(alone.failed), alone.stale) == (1, True)
    record_case(CASE, record, Device("cpu"))
    assert now().failed == ()
    # A device that is not there is simulated, and proves nothing.
    elsewhere = replace(CASE, device="npu")
    record_case(elsewhere, record, Device("npu"))
    found = load_evidence(plugins.entries).for_cell("mine", Axis.DP_SHARD, "language_model", "npu", None)
    assert found.simulated == 1
    assert found.proof is None or found.stale


def test_verify_failure_refutes_proofs_that_ship_with_a_plugin(here) -> None:
    here.add_backend("mine")
    plugins = load_plugins()
    [record] = [r for r in plugins.backends() if r.spec.name == "mine"]
    book = load_evidence(plugins.entries)
    record_case(CASE, record, Device("cpu"))
    shipped = load_evidence(plugins.entries).proofs[0]
    record_case(FAILED, record, Device("cpu"))
    failure = load_evidence(plugins.entries).proofs[0]

    def level(*proofs):
        return replace(book, proofs=proofs).for_cell("mine", Axis.DP_SHARD, "language_model", "cpu", None).level

    assert level(shipped) is EvidenceLevel.PARITY
    assert level(shipped, failure) is EvidenceLevel.DECLARED
    newer = replace(shipped, record=replace(shipped.record, date="9999-01-01"))
    assert level(newer, failure) is EvidenceLevel.PARITY
    other = replace(shipped, record=replace(shipped.record, model_family="gemma3"))
    assert level(other, failure) is EvidenceLevel.PARITY


def test_verify_doctor_shows_what_was_proved(here) -> None:
    here.add_backend("mine")
    plugins = load_plugins()
    [record] = [r for r in plugins.backends() if r.spec.name == "mine"]

    rows = [BackendReport("mine", "train", "toy", "toy", "1", Stage.REGISTERED, CheckStatus.OK)]

    def doctor() -> dict[str, str]:
        check = check_evidence(rows, plugins.entries)
        return {"status": str(check.status), "found": check.found, "next": check.next}

    assert doctor()["found"] == "mine: parity of 0 topologies (0 on this machine)"
    record_case(CASE, record, Device("cpu"))
    assert doctor() == {
        "status": "ok",
        "found": "mine: parity of 1 topology (1 on this machine)",
        "next": "rlctl verify --backend mine --all --nproc 2",
    }
    record_case(FAILED, record, Device("cpu"))
    found = doctor()
    assert found["status"] == "warn"
    assert "rlctl verify failed: gradients" in found["found"]
    assert found["next"] == "rlctl verify --backend mine --topology dp_shard=2"
