"""Light modules that would take the process down are met in a child first."""

from __future__ import annotations

import pytest

from rlctl import vetting
from rlctl.discovery import Candidate
from rlctl.plugins import load_plugins
from rlctl.records import CheckStatus


def test_deadly_light_modules_are_left_out_and_the_process_lives(here, monkeypatch):
    here.add("rlctl-abort", "abort", "abort_light", abort_light="import os\nos.abort()\n")
    here.add("rlctl-segv", "segv", "segv_light", segv_light="import ctypes\nctypes.string_at(0)\n")
    here.add("rlctl-leave", "leave", "leave_light", leave_light="import os\nos._exit(0)\n")
    here.add("rlctl-hang", "hang", "hang_light", hang_light="import time\ntime.sleep(60)\n")
    here.add_backend("alive")
    monkeypatch.setattr(vetting, "TIMEOUT_S", 6.0)
    found = {e.name: e for e in load_plugins().entries}
    assert found["alive"].status is CheckStatus.OK
    assert "killed by SIGABRT while importing abort_light" in found["abort"].cause[0]
    assert any("abort_light.py:2" in c for c in found["abort"].cause)
    assert "killed by SIGSEGV" in found["segv"].cause[0]
    assert "exit code 0 before it was done" in found["leave"].cause[0]
    assert "no end after 6 s" in found["hang"].cause[0]
    assert any("hang_light.py:2" in c for c in found["hang"].cause)


def test_what_passed_is_not_tried_again_until_a_file_changes(here, monkeypatch):
    here.add_backend("known")
    tried: list[str] = []
    real = vetting.declare_task
    monkeypatch.setattr(vetting, "declare_task", lambda c, *a: tried.append(c.name) or real(c, *a))
    for _ in range(2):
        assert {e.name: e.status for e in load_plugins().entries}["known"] is CheckStatus.OK
    assert tried == ["known"]
    module = here.path / "known_light.py"
    module.write_text(module.read_text() + "\nchanged = True\n")
    load_plugins()
    assert tried == ["known", "known"]


def test_a_failure_is_tried_again(here, monkeypatch):
    here.add("rlctl-flaky", "flaky", "flaky_light", flaky_light="import os\nassert 'TINY_OK' in os.environ\n")
    assert {e.name: e.status for e in load_plugins().entries}["flaky"] is CheckStatus.FAIL
    monkeypatch.setenv("TINY_OK", "1")
    assert {e.name: e.status for e in load_plugins().entries}["flaky"] is CheckStatus.OK


def test_first_party_modules_need_no_child(monkeypatch):
    monkeypatch.setattr("rlctl.probing.run_probes", lambda *a, **k: pytest.fail("a child was started"))
    assert vetting.vet([Candidate("fsdp", "rlctl-plugin-fsdp", "0.1.0", "rlctl_fsdp.plugin")]) == {}


def test_a_cache_that_cannot_be_written_costs_speed_only(here, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("RLCTL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    here.add_backend("uncached")
    assert {e.name: e.status for e in load_plugins().entries}["uncached"] is CheckStatus.OK


def test_sources_are_found_without_importing_a_package(here):
    package = here.path / "pack_light"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "plugin.py").write_text("")
    (package / "helper.py").write_text("")
    files = vetting._source_files("pack_light.plugin:obj")
    assert [f.name for f in files] == ["__init__.py", "helper.py", "plugin.py"]
    assert vetting._source_files("no_such_module_at_all.x") == []
