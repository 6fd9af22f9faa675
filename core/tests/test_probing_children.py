"""Children: their deaths, hangs, chatter and grandchildren."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path

from rlctl.discovery import Candidate
from rlctl.probing import Task, run_probes


def declare(name: str) -> Task:
    candidate = asdict(Candidate(name, f"rlctl-{name}", "1.0", f"{name}_light"))
    return Task("declare", f"importing {name}_light", {"candidate": candidate, "checks": False, "quick": True})


def test_outcomes_keep_their_order_and_a_hang_costs_the_others_nothing(here):
    here.add(
        "rlctl-stuck",
        "stuck",
        "stuck_light",
        stuck_light="import time\n\n\ndef wait():\n    time.sleep(60)\n\n\nwait()\n",
    )
    here.add_backend("fine")
    start = time.monotonic()
    stuck, fine = run_probes([declare("stuck"), declare("fine")], timeout_s=6.0)
    assert time.monotonic() - start < 30
    assert stuck.timed_out
    assert stuck.result is None
    assert stuck.trace[0].endswith("stuck_light.py:5 in wait")
    assert stuck.trace[1].endswith("stuck_light.py:8 in <module>")
    assert fine.result is not None
    assert [b["name"] for b in fine.result["backends"]] == ["fine"]


def test_the_whole_process_group_is_killed(here, tmp_path):
    pid_file = tmp_path / "pid"
    source = f"""
        import subprocess, time
        child = subprocess.Popen(["sleep", "120"])
        open({str(pid_file)!r}, "w").write(str(child.pid))
        time.sleep(120)
    """
    here.add("rlctl-parent", "parent", "parent_light", parent_light=source)
    (outcome,) = run_probes([declare("parent")], timeout_s=6.0)
    assert outcome.timed_out
    pid = int(pid_file.read_text())
    end = time.monotonic() + 5
    while _alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_grandchild_that_keeps_the_pipe_open_does_not_hold_us(here):
    source = "import subprocess\nsubprocess.Popen(['sleep', '120'], start_new_session=True)\n"
    here.add("rlctl-daemon", "daemon", "daemon_light", daemon_light=source)
    start = time.monotonic()
    (outcome,) = run_probes([declare("daemon")], timeout_s=20.0)
    assert outcome.result is not None
    assert time.monotonic() - start < 15


def test_megabytes_of_chatter_neither_block_nor_pile_up(here):
    source = "import os\nfor _ in range(200):\n    os.write(2, b'x' * 65536)\n"
    here.add("rlctl-noisy", "noisy", "noisy_light", noisy_light=source)
    (outcome,) = run_probes([declare("noisy")], timeout_s=20.0)
    assert outcome.result is not None
    assert 0 < len(outcome.stderr) <= 32 * 1024


def test_no_core_file_and_no_working_directory_litter(here, tmp_path, monkeypatch):
    empty = tmp_path / "cwd"
    empty.mkdir()
    monkeypatch.chdir(empty)
    here.add("rlctl-core1", "core1", "core1_light", core1_light="import os\nos.abort()\n")
    (outcome,) = run_probes([declare("core1")], timeout_s=20.0)
    assert outcome.died == "killed by SIGABRT"
    assert list(empty.iterdir()) == []


def test_a_module_in_the_working_directory_shadows_nothing(here, tmp_path, monkeypatch):
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("json", "pluggy", "torch", "rlctl"):
        (trap / f"{name}.py").write_text("raise SystemExit('trapped')")
    monkeypatch.chdir(trap)
    here.add_backend("untrapped")
    (outcome,) = run_probes([declare("untrapped")], timeout_s=20.0)
    assert outcome.result is not None
    assert "error" not in outcome.result


def test_children_do_not_autoload_device_extensions(here):
    here.add_backend("autol")
    with (here.path / "autol_light.py").open("a") as file:
        file.write("\nimport os\nassert os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] == '0'\n")
    before = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    (outcome,) = run_probes([declare("autol")], timeout_s=20.0)
    assert outcome.result is not None
    assert "error" not in outcome.result
    assert os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == before


def test_no_tasks_start_no_child():
    assert run_probes([], timeout_s=1.0) == []
