"""The doctor as a function: what stays out of this process, names, and its own failure."""

from __future__ import annotations

import sys

import pytest

from rlctl import doctor
from rlctl.doctor import DoctorError, run_doctor
from rlctl.doctor.run import default_timeout
from rlctl.errors import UsageError
from rlctl.records import CheckStatus


def test_no_plugin_code_runs_in_this_process(here):
    here.add_backend("apart")
    report = run_doctor(["apart"], timeout_s=60)
    (row,) = report.backends
    assert (row.name, row.stage, row.status) == ("apart", "registered", CheckStatus.OK)
    assert not {"apart_light", "apart_engine", "apart_config"} & set(sys.modules)


def test_a_row_is_selected_by_backend_plugin_dist_or_alias(here):
    here.add_backend("many", name="'real'", aliases="('nick',)")
    for name in ("real", "many", "rlctl-many", "nick"):
        assert [r.name for r in run_doctor([name], quick=True, timeout_s=60).backends] == ["real"]


def test_names_choose_checks_too(here):
    report = run_doctor(["disk", "python"], quick=True, timeout_s=60)
    assert sorted(c.name for c in report.checks) == ["disk", "python"]
    assert report.backends == ()


def test_everything_without_names(here):
    here.add_backend("all1")
    report = run_doctor(quick=True, timeout_s=60)
    assert {c.name for c in report.checks} == set(doctor.run.environment.NAMES)
    assert "all1" in {r.name for r in report.backends}
    assert {i["name"] for i in report.installable} >= {"fsdp2", "veomni", "vllm"}
    assert next(i for i in report.installable if i["name"] == "mindspeed_megatron")["state"] == "released"


def test_a_light_module_that_imports_more_than_it_may_is_a_warning(here):
    here.add("rlctl-fatlib", "fatlib", "fatlib_light", fatlib_light="import heavylib1\n", heavylib1="")
    (row,) = run_doctor(["fatlib"], quick=True, timeout_s=60).backends
    assert row.status is CheckStatus.WARN
    assert "its light module imports heavylib1" in row.cause[0]


def test_two_dists_of_one_key_fail_without_being_imported(here):
    here.add_backend("keya", name="'samekey'")
    here.add_backend("keyb", "raise SystemExit('must not run')", name="'samekey'")
    rows = run_doctor(["samekey"], timeout_s=60).backends
    assert [(r.dist, r.stage, r.status) for r in rows] == [
        ("rlctl-keya", "compatible", CheckStatus.FAIL),
        ("rlctl-keyb", "compatible", CheckStatus.FAIL),
    ]
    assert "is claimed by rlctl-keya and rlctl-keyb" in rows[0].cause[0]


def test_a_process_is_prepared_before_the_libraries_are_imported(here):
    here.add_backend("prep", "import os\nassert os.environ['TINY_PREP'] == '1'\n")
    with (here.path / "prep_light.py").open("a") as file:
        file.write(
            "\nimport os\n\n\n@hookimpl\ndef rlctl_prepare_process(backend, config):\n"
            "    os.environ['TINY_PREP'] = str(config['size'])\n"
        )
    (row,) = run_doctor(["prep"], timeout_s=60).backends
    assert row.status is CheckStatus.OK, row.cause


def test_a_config_model_that_does_not_import_is_placed(here):
    here.add_backend("badcfg")
    (here.path / "badcfg_config.py").write_text("raise ValueError('no settings')")
    (row,) = run_doctor(["badcfg"], timeout_s=60).backends
    assert "ValueError: no settings [while importing badcfg_config:Config (its config model)]" in row.cause[0]


def test_an_unknown_name_is_a_usage_error_with_a_near_one(here):
    here.add_backend("nearby")
    with pytest.raises(UsageError) as caught:
        run_doctor(["neerby"], quick=True, timeout_s=60)
    assert caught.value.next == "rlctl doctor nearby"


def test_a_doctor_that_cannot_start_children_says_so(here, monkeypatch):
    def refuse(*args, **more):
        raise OSError("no more processes")

    monkeypatch.setattr(doctor.run, "run_probes", refuse)
    with pytest.raises(DoctorError, match="cannot start its probes") as caught:
        run_doctor(quick=True)
    assert caught.value.exit_code == 2
    assert "no more processes" in str(caught.value)


def test_time_limit_of_the_environment(monkeypatch):
    monkeypatch.setenv("RLCTL_DOCTOR_TIMEOUT", "120")
    assert default_timeout() == 120
    monkeypatch.setenv("RLCTL_DOCTOR_TIMEOUT", "soon")
    assert default_timeout() == doctor.DEFAULT_TIMEOUT_S
