"""NPU cells of the matrix: each is declared and no more, names the test of its route, and is reached or refused by name."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl import catalogue
from rlctl.capabilities import Cell, matrix
from rlctl.catalogue import CatalogueEntry, PluginState
from rlctl.codec import evidence_from_json
from rlctl.device import detect_device
from rlctl.errors import BackendUnavailableError
from rlctl.evidence import EvidenceBook, Proof
from rlctl.plugins import PluginEntry, PluginSet, Stage
from rlctl.records import BackendKind, CheckStatus, EvidenceLevel, EvidenceRecord
from rlctl.registry import require_backend, resolve_backend

ROOT = Path(__file__).parents[1]
RELEASED = [e for e in catalogue.entries() if e.state is PluginState.RELEASED]
ON_NPU = [e for e in RELEASED if any(device == "npu" for device, _ in e.spec.devices)]
WITHOUT_PLUGIN = [
    e for e in catalogue.entries() if e not in RELEASED and any(device == "npu" for device, _ in e.spec.devices)
]


def shipped() -> EvidenceBook:
    """Every record that any plugin ships, installed here or not."""
    proofs = []
    for path in sorted(ROOT.glob("plugins/*/src/*/evidence/*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        proofs += [
            Proof(evidence_from_json(r), path.parts[-5]) for r in (found if isinstance(found, list) else [found])
        ]
    return EvidenceBook(tuple(proofs))


def on_npu(book: EvidenceBook) -> list[Cell]:
    return [c for c in matrix(everything(), book) if c.device == "npu"]


def everything() -> PluginSet:
    """All released plugins, as if each had what it requires."""
    by_dist: dict[str, list[CatalogueEntry]] = {}
    for entry in RELEASED:
        by_dist.setdefault(entry.dist or "", []).append(entry)
    return PluginSet(
        [
            PluginEntry(
                dist, dist, "0.1.0", "t", Stage.COMPATIBLE, CheckStatus.OK,
                backends=tuple(replace(e.spec, requirements=()) for e in found),
            )
            for dist, found in by_dist.items()
        ]
    )  # fmt: skip


def named(test: str) -> bool:
    """Whether ``path::function`` is a test of this repository."""
    path, _, function = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return function.startswith("test_") and any(
        isinstance(n, ast.FunctionDef) and n.name == function for n in tree.body
    )


def test_every_npu_cell_is_declared_and_names_the_test_of_its_route() -> None:
    cells = on_npu(shipped())
    backends = {(c.backend, c.model_type) for c in cells}
    assert {b for b, _ in backends} >= {
        "fsdp2",
        "hf",
        "megatron",
        "mindspeed_megatron",
        "veomni",
        "vllm",
        "mindspeed_mm",
    }
    assert [
        (c.backend, c.axis, c.evidence.level) for c in cells if c.evidence.level is not EvidenceLevel.DECLARED
    ] == []
    assert [p.record for p in shipped().proofs if p.record.device == "npu" and not p.record.simulated] == []
    tests = {c.routing_test for c in cells}
    assert len(tests) >= 5
    assert [test for test in sorted(tests) if not named(test)] == []


def test_a_record_of_a_real_npu_would_be_shown_and_one_of_a_simulated_one_is_not() -> None:
    def level(**changes: object) -> EvidenceLevel:
        record = EvidenceRecord(
            backend="megatron", model_type="language_model", device="npu", vendor="huawei", axes={"tp": 2},
            level=EvidenceLevel.PARITY, model_family="llama", what="w", versions={}, world_size=2, deltas={}, date="d",
        )  # fmt: skip
        book = EvidenceBook((Proof(replace(record, **changes), "x"),))
        (cell,) = [
            c for c in on_npu(book) if (c.backend, str(c.axis), c.model_type) == ("megatron", "tp", "language_model")
        ]
        return cell.evidence.level

    assert level() is EvidenceLevel.PARITY
    assert level(simulated=True) is EvidenceLevel.DECLARED
    assert level(device="cpu", vendor=None) is EvidenceLevel.DECLARED


def test_what_was_proved_on_cuda_keeps_its_level_there() -> None:
    cells = [c for c in matrix(everything(), shipped()) if c.device == "cuda"]
    proved = {(c.backend, str(c.axis)) for c in cells if c.evidence.level is EvidenceLevel.PARITY}
    assert {("fsdp2", "dp_shard"), ("fsdp2", "usp"), ("megatron", "tp"), ("megatron", "pp")} <= proved
    for cell in cells:
        if cell.evidence.level is not EvidenceLevel.DECLARED:
            assert cell.evidence.proof is not None
            assert cell.evidence.proof.record.device == "cuda"


def test_the_command_prints_the_test_beside_what_is_declared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rlctl_cli.main import main

    monkeypatch.setenv("RLCTL_DATA_DIR", str(tmp_path))

    with pytest.raises(SystemExit):
        main(["capabilities", "--backend", "megatron", "--device", "npu"])
    said = capsys.readouterr().out
    assert "npu/huawei: nothing is proved; routing by tests/test_ascend.py::test_the_quickstart" in said
    with pytest.raises(SystemExit):
        main(["capabilities", "--device", "npu", "--json"])
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {c["evidence"]["level"] for c in cells} == {"declared"}
    assert all(named(c["routing_test"]) for c in cells)


def test_the_page_lists_every_backend_of_an_npu_with_its_test() -> None:
    text = (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if "::test_" in line and line.startswith("| `")]
    listed = {
        (name, re.sub("[ |`]", "", row[-1]))
        for row in rows
        for name in re.findall(r"`(\w+)`", row[0].partition(" (")[0])
    }
    known = {(e.spec.name, e.spec.routing_tests["npu"]) for e in (*ON_NPU, *WITHOUT_PLUGIN)}
    assert listed == known


@pytest.mark.parametrize("entry", ON_NPU, ids=lambda e: f"{e.spec.name}-{e.dist}")
def test_a_run_on_an_npu_reaches_its_backend(entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_DEVICE", "npu")
    monkeypatch.delenv("RLCTL_VENDOR", raising=False)
    device = detect_device()
    for head in entry.spec.model_types:
        for name in (entry.spec.name, *entry.spec.aliases):
            record = resolve_backend(everything(), name, entry.spec.kind, head, device.type, device.vendor)
            assert (record.dist, record.spec.name) == (entry.dist, entry.spec.name)


@pytest.mark.parametrize("entry", WITHOUT_PLUGIN, ids=lambda e: e.spec.name)
def test_what_has_no_plugin_is_refused_by_name(entry: CatalogueEntry) -> None:
    assert {e.spec.name for e in WITHOUT_PLUGIN} == {"mindspeed_mm", "torchtitan", "fsdp_turbo"}
    with pytest.raises(BackendUnavailableError) as refused:
        require_backend(entry.spec.name, entry.spec.kind, everything())
    assert repr(entry.spec.name) in refused.value.what


@pytest.mark.parametrize("name", ["mindspeed_fsdp", "mindspeed_llm"])
def test_a_name_that_nothing_answers_is_refused_by_name(name: str) -> None:
    with pytest.raises(BackendUnavailableError) as refused:
        require_backend(name, BackendKind.TRAIN, everything())
    assert refused.value.what == f"no training backend is called {name!r}"
