"""Evidence: where records come from, where they hold, and what never raises a level."""

from __future__ import annotations

import json

import pytest

from rlctl.codec import evidence_from_json, evidence_to_json
from rlctl.evidence import EvidenceBook, Proof, load_evidence, save_evidence, stale_reasons
from rlctl.plugins import load_plugins
from rlctl.records import Axis, EvidenceLevel, EvidenceRecord
from rlctl.requirements import installed_version


def record(**more) -> EvidenceRecord:
    fields = {
        "backend": "toy",
        "model_type": "language_model",
        "device": "cpu",
        "vendor": None,
        "axes": {"dp_shard": 2},
        "level": EvidenceLevel.PARITY,
        "model_family": "llama",
        "what": "gradients against one process",
        "versions": {"pluggy": installed_version("pluggy")},
        "world_size": 2,
        "deltas": {"gradients": 1e-7},
        "date": "2026-08-01",
        **more,
    }
    return EvidenceRecord(**fields)


def book(*records: EvidenceRecord) -> EvidenceBook:
    return EvidenceBook(tuple(Proof(r, "rlctl-toy") for r in records))


def at(found: EvidenceBook, axis: Axis | None = Axis.DP_SHARD, device: str = "cpu", vendor: str | None = None):
    return found.for_cell("toy", axis, "language_model", device, vendor)


def test_a_record_raises_the_axes_that_it_used_and_no_other():
    found = book(record())
    assert (at(found).level, at(found).stale) == (EvidenceLevel.PARITY, False)
    assert at(found, Axis.TP).level is EvidenceLevel.DECLARED
    assert at(found, None).level is EvidenceLevel.DECLARED
    assert found.for_cell("other", Axis.DP_SHARD, "language_model", "cpu", None).level is EvidenceLevel.DECLARED
    assert found.for_cell("toy", Axis.DP_SHARD, "value_model", "cpu", None).level is EvidenceLevel.DECLARED


def test_another_version_or_device_shows_as_stale_with_the_reason():
    old = at(book(record(versions={"pluggy": "0.1", "no-such-dist-here": "1"})))
    assert (old.level, old.stale) == (EvidenceLevel.PARITY, True)
    assert old.reasons[0].startswith("made with pluggy 0.1, now ")
    assert old.reasons[1] == "made with no-such-dist-here 1, not installed"
    elsewhere = at(book(record()), device="cuda", vendor="nvidia")
    assert (elsewhere.stale, elsewhere.reasons) == (True, ("made on cpu, not on cuda",))
    assert elsewhere.level is EvidenceLevel.DECLARED, "another kind of device has proved nothing of this one"
    assert elsewhere.proof is not None
    assert stale_reasons(record(device="cuda", vendor="amd"), "cuda", "nvidia") == ("made on amd, not on nvidia",)


def test_a_record_that_holds_beats_a_higher_stale_one():
    found = at(book(record(level=EvidenceLevel.END_TO_END, device="cuda"), record(level=EvidenceLevel.BUILDABLE)))
    assert (found.level, found.stale) == (EvidenceLevel.BUILDABLE, False)


def test_a_stale_record_of_the_cells_own_device_beats_one_of_another():
    there = record(device="cuda", vendor="nvidia", versions={"pluggy": "0.1", "no-such-dist-here": "1"})
    end_to_end = record(level=EvidenceLevel.END_TO_END)
    found = at(book(end_to_end, there), device="cuda", vendor="nvidia")
    assert (found.stale, found.level) == (True, EvidenceLevel.PARITY)
    assert found.reasons == stale_reasons(there, "cuda", "nvidia")
    assert at(book(end_to_end, there)).level is EvidenceLevel.END_TO_END


def test_simulated_records_never_raise_a_level():
    found = at(book(record(simulated=True, level=EvidenceLevel.END_TO_END)))
    assert (found.level, found.stale, found.simulated, found.proof) == (EvidenceLevel.DECLARED, False, 1, None)
    both = at(book(record(simulated=True, level=EvidenceLevel.END_TO_END), record(level=EvidenceLevel.BUILDABLE)))
    assert (both.level, both.simulated) == (EvidenceLevel.BUILDABLE, 1)


def test_one_process_and_imports_are_no_axis():
    alone = book(record(axes={}, world_size=1))
    assert at(alone, None).level is EvidenceLevel.PARITY
    assert at(alone, Axis.DP_SHARD).level is EvidenceLevel.DECLARED
    imports = book(record(axes={}, level=EvidenceLevel.IMPORTABLE))
    assert at(imports, Axis.DP_SHARD).level is EvidenceLevel.IMPORTABLE


def test_a_combination_is_proved_as_a_whole():
    found = book(record(axes={"dp_shard": 2, "tp": 2}))
    same = found.for_topology("toy", {"tp": 2, "dp_shard": 2}, "language_model", "cpu", None, "llama")
    assert (same.level, same.stale) == (EvidenceLevel.PARITY, False)
    other = found.for_topology("toy", {"tp": 2}, "language_model", "cpu", None, "qwen3")
    assert other.stale
    assert other.reasons == ("made with dp_shard=2, tp=2, not with tp=2", "made with a llama model, not a qwen3 one")


def test_shipped_and_own_records_are_read_and_broken_files_are_named(here):
    here.add_backend("toy", name="'toy'")
    package = here.path / "toypack"
    (package / "evidence").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('evidence is read without an import')")
    entry = here.path / "rlctl_toy-1.0.dist-info" / "entry_points.txt"
    plugins = load_plugins()
    (toy,) = [e for e in plugins.entries if e.name == "toy"]
    shipped = [evidence_to_json(record()), evidence_to_json(record(backend="fsdp2"))]
    (package / "evidence" / "a.json").write_text(json.dumps(shipped))
    (package / "evidence" / "b.json").write_text("{not json")
    (package / "evidence" / "c.json").write_text(json.dumps({**evidence_to_json(record()), "level": "perfect"}))
    (package / "evidence" / "d.json").write_text(json.dumps({**evidence_to_json(record()), "extra_field": 1}))
    entry.write_text("[rlctl.plugins]\ntoy = toypack.plugin\n")
    from dataclasses import replace

    mine = save_evidence(record(level=EvidenceLevel.BUILDABLE, backend="anything"), "mine")
    assert mine == here.root / "data" / "evidence" / "mine.json"
    found = load_evidence([replace(toy, target="toypack.plugin")])
    assert [(p.source, p.record.backend) for p in found.proofs] == [("rlctl-toy", "toy"), ("this machine", "anything")]
    assert len(found.problems) == 4
    assert "a.json: rlctl-toy ships a record of fsdp2, which it does not declare" in found.problems[0]
    assert all(f"{name}.json: not an evidence record" in p for name, p in zip("bcd", found.problems[1:], strict=True))


def test_records_survive_json():
    one = record(axes={"tp": 2, "sp": 1}, simulated=True, extra={"loss": "grpo"})
    assert evidence_from_json(json.loads(json.dumps(evidence_to_json(one)))) == one
    with pytest.raises(ValueError, match="not a valid Axis"):
        evidence_from_json({**evidence_to_json(one), "axes": {"fsdp": 2}})
