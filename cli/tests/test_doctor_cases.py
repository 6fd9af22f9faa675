"""`rlctl doctor` on hostile plugins: the JSON, the text and the exit code, with real tiny dists in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TIMEOUT = "8"

# name -> (source that the engine module starts with, words of the cause, words of the next command)
ENGINES = {
    "importerror": (
        "raise ImportError('libfrob.so.3: cannot open shared object file: No such file or directory')",
        ["ImportError: libfrob.so.3: cannot open shared object file"],
        "pip install --upgrade rlctl-importerror",
    ),
    "chained": (
        "try:\n    raise ImportError('libhccl.so: cannot open shared object file')\n"
        "except ImportError as error:\n    raise RuntimeError('Failed to load the backend extension') from error",
        ["RuntimeError: Failed to load the backend extension", "ImportError: libhccl.so"],
        "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
    ),
    "missing": (
        "import frobnicate.core",
        ["ModuleNotFoundError: No module named 'frobnicate'"],
        "pip install 'frobnicate>=3'",
    ),
    "exits": (
        "import sys\nsys.exit(5)",
        ["SystemExit: the module called exit(5)"],
        "pip install --upgrade rlctl-exits",
    ),
    "leaves": (
        "import os\nos._exit(0)",
        ["Crash: ended with exit code 0 before it was done while importing leaves_engine:Engine"],
        "pip install --upgrade rlctl-leaves",
    ),
    "aborts": (
        "import os\n\n\ndef deep():\n    os.abort()\n\n\ndeep()",
        ["Crash: killed by SIGABRT while importing aborts_engine:Engine", "aborts_engine.py:5 in deep"],
        "pip install --upgrade rlctl-aborts",
    ),
    "segfaults": (
        "import ctypes\nctypes.string_at(0)",
        ["Crash: killed by SIGSEGV", "segfaults_engine.py:2 in <module>"],
        "pip install --upgrade rlctl-segfaults",
    ),
    "hangs": (
        "import time\n\n\ndef wait():\n    time.sleep(60)\n\n\nwait()",
        [f"TimeLimit: no end after {TIMEOUT} s while importing hangs_engine:Engine", "hangs_engine.py:5 in wait"],
        "rlctl doctor hangs --timeout 60",
    ),
}
LIGHT = {
    "lraises": ("raise OSError('no disk')", ["OSError: no disk"], "pip install --upgrade rlctl-lraises"),
    "lexits": ("raise SystemExit(1)", ["SystemExit: the module called exit(1)"], "rlctl-lexits"),
    "laborts": ("import os\nos.abort()", ["killed by SIGABRT", "laborts_light.py:2"], "rlctl-laborts"),
    "lsegfaults": ("import ctypes\nctypes.string_at(0)", ["killed by SIGSEGV"], "rlctl-lsegfaults"),
    "lhangs": ("import time\ntime.sleep(60)", [f"no end after {TIMEOUT} s", "lhangs_light.py:2"], "--timeout 60"),
}
OTHERS = {
    "toonew": ["was written for a newer rlctl", "hook API 1.99"],
    "twice": ["rlctl-one 1.0 (one_light) and rlctl-two 1.0 (two_light)"],
    "stale": ["No module named 'stale_light'"],
}


def fill(site) -> None:
    site.add_backend("healthy")
    site.add_backend("healthyroll", "", "rollout")
    for name, (source, _, _) in ENGINES.items():
        more = {"requirements": "('frobnicate>=3 | pluggy',)"} if name == "missing" else {}
        site.add_backend(name, source, **more)
    for name, (source, _, _) in LIGHT.items():
        site.add(f"rlctl-{name}", name, f"{name}_light", **{f"{name}_light": source})
    site.add_backend(
        "chatty", "import os\nprint('{\"not\": \"yours\"}')\nos.write(1, b'raw\\n')\nos.system('echo shell')"
    )
    site.add("rlctl-lchatty", "lchatty", "lchatty_light", lchatty_light="print('good morning')")
    site.add_backend("toonew", api_version="(1, 99)")
    site.add("rlctl-one", "twice", "one_light", one_light="")
    site.add("rlctl-two", "twice", "two_light", two_light="")
    site.add("rlctl-stale", "stale", "stale_light.plugin")


FIRST_PARTY = "rlctl-plugin-fsdp,rlctl"
QUIET = {"RLCTL_DISABLE_PLUGINS": f"{FIRST_PARTY},lhangs"}


def rlctl(site, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command; the light module that hangs is left out unless ``env`` says otherwise, to save its time limit."""
    command = [sys.executable, "-m", "rlctl_cli.main", *arguments]
    env = site.env(**{**QUIET, **env})
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture(scope="module")
def site(shared_site):
    fill(shared_site)
    return shared_site


NAMES = ("healthy", "healthyroll", *ENGINES, *LIGHT, "chatty", "lchatty", *OTHERS)


@pytest.fixture(scope="module")
def done(site) -> subprocess.CompletedProcess[str]:
    return rlctl(site, "doctor", *NAMES, "--json", "--timeout", TIMEOUT, RLCTL_DISABLE_PLUGINS=FIRST_PARTY)


@pytest.fixture(scope="module")
def rows(done) -> dict[str, list[dict]]:
    report = json.loads(done.stdout)
    assert report["schema"] == 1
    out: dict[str, list[dict]] = {}
    for row in report["backends"]:
        assert {"name", "kind", "dist", "version", "stage", "status", "cause", "next"} <= set(row)
        out.setdefault(row["name"], []).append(row)
    return out


def test_the_json_is_alone_on_stdout_and_a_failure_exits_1(done, rows):
    assert done.returncode == 1
    assert done.stderr == ""
    assert set(rows) == set(NAMES)


def test_the_healthy_are_unharmed(rows):
    for name, kind in (("healthy", "train"), ("healthyroll", "rollout")):
        (row,) = rows[name]
        assert (row["kind"], row["stage"], row["status"], row["cause"]) == (kind, "registered", "ok", [])
        assert (row["dist"], row["version"]) == (f"rlctl-{name}", "1.0")


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_does_not_import(rows, name):
    _, words, mend = ENGINES[name]
    (row,) = rows[name]
    assert (row["kind"], row["stage"], row["status"]) == ("train", "registered", "fail")
    text = "\n".join(row["cause"])
    for word in words:
        assert word in text
    assert row["next"].startswith(mend)


def test_the_chain_is_whole_and_in_order(rows):
    cause = rows["chained"][0]["cause"]
    assert len(cause) == 2
    assert "while importing chained_engine:Engine" in cause[0]
    assert cause[1].startswith("ImportError")


@pytest.mark.parametrize("name", LIGHT)
def test_a_light_module_that_does_not_import(rows, name):
    _, words, mend = LIGHT[name]
    (row,) = rows[name]
    assert (row["kind"], row["stage"], row["status"]) == (None, "declared", "fail")
    text = "\n".join(row["cause"])
    for word in words:
        assert word in text
    assert mend in row["next"]


@pytest.mark.parametrize(("name", "said"), [("chatty", '{"not": "yours"}'), ("lchatty", "good morning")])
def test_chatter_is_a_warning_and_spoils_nothing(rows, name, said):
    (row,) = rows[name]
    assert row["status"] == "warn"
    assert "prints to stdout" in row["cause"][0]
    assert said in row["cause"][0]
    assert row["next"].startswith(f"pip install --upgrade rlctl-{name}")


def test_api_too_new(rows):
    (row,) = rows["toonew"]
    assert (row["stage"], row["status"]) == ("declared", "fail")
    for word in OTHERS["toonew"]:
        assert word in row["cause"][0]
    assert row["next"] == "pip install --upgrade rlctl-core"


def test_two_dists_of_one_name(rows):
    both = rows["twice"]
    assert [r["dist"] for r in both] == ["rlctl-one", "rlctl-two"]
    for row in both:
        assert (row["stage"], row["status"]) == ("discovered", "fail")
        assert OTHERS["twice"][0] in row["cause"][0]
        assert row["next"] == "pip uninstall rlctl-one or pip uninstall rlctl-two"


def test_stale_entry_point(rows):
    (row,) = rows["stale"]
    assert (row["stage"], row["status"]) == ("declared", "fail")
    assert OTHERS["stale"][0] in row["cause"][0]
    assert row["next"].startswith("pip install --force-reinstall rlctl-stale")


def test_the_text_says_the_same(site):
    done = rlctl(site, "doctor", *NAMES, "--timeout", TIMEOUT, RLCTL_DISABLE_PLUGINS=FIRST_PARTY)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    said = [w for _, words, _ in (*ENGINES.values(), *LIGHT.values()) for w in words]
    for word in [*said, *(w for words in OTHERS.values() for w in words), '{"not": "yours"}']:
        assert word in done.stdout
    for _, _, mend in ENGINES.values():
        assert f"next:   {mend}" in done.stdout


@pytest.mark.parametrize(
    ("names", "flags", "code"),
    [
        (["healthy", "healthyroll"], ["--strict"], 0),
        (["healthy", "chatty"], [], 0),
        (["healthy", "chatty"], ["--strict"], 1),
        (["healthy", "stale"], [], 1),
        (["exits"], [], 1),
        (["helthy"], [], 2),
        (["healthy"], ["--timeout", "soon"], 2),
    ],
)
def test_exit_codes(site, names, flags, code):
    done = rlctl(site, "doctor", *names, "--json", *flags)
    assert done.returncode == code, done.stdout + done.stderr
    if code < 2:
        assert {r["name"] for r in json.loads(done.stdout)["backends"]} == set(names)
    else:
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
    if names == ["helthy"]:
        assert "rlctl doctor healthy" in done.stderr


def test_a_known_backend_that_is_not_installed(site):
    done = rlctl(site, "doctor", "veomni", "--json", "--quick")
    (row,) = json.loads(done.stdout)["backends"]
    assert (row["status"], row["version"], row["dist"]) == ("fail", None, "rlctl-plugin-veomni")
    assert "not released" not in " ".join(row["cause"])
    assert row["next"] == "pip install rlctl-plugin-veomni"
    assert done.returncode == 1


def test_quick_stops_before_the_engines(site):
    done = rlctl(site, "doctor", "aborts", "healthy", "laborts", "--quick", "--json")
    rows = {r["name"]: (r["stage"], r["status"]) for r in json.loads(done.stdout)["backends"]}
    assert rows == {
        "aborts": ("compatible", "ok"),
        "healthy": ("compatible", "ok"),
        "laborts": ("declared", "fail"),
    }


def test_ctrl_c_leaves_no_child_behind(site, tmp_path):
    mark = tmp_path / "pid"
    slow = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)"
    site.add_backend("slowpoke", slow)
    command = [sys.executable, "-m", "rlctl_cli.main", "doctor", "slowpoke"]
    process = subprocess.Popen(
        command, env=site.env(**QUIET), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    pid = int(mark.read_text())
    process.send_signal(2)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in stderr
    end = time.monotonic() + 5
    while _alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_plugin_checks_run_in_a_child_and_their_own_fault_is_a_failure(site):
    source = (
        "import os\nfrom rlctl.hookspecs import hookimpl\nfrom rlctl.records import Check, CheckResult, CheckStatus\n\n\n"
        "def good():\n    print('noise')\n    return CheckResult('disk of mine', CheckStatus.OK, str(os.getpid()))\n\n\n"
        "def bad():\n    raise SystemExit('oops')\n\n\n"
        "@hookimpl\ndef rlctl_checks():\n    return [Check('disk of mine', good), Check('oops', bad)]\n"
    )
    site.add("rlctl-checker", "checker", "checker_light", checker_light=source)
    done = rlctl(site, "doctor", "disk of mine", "oops", "--json", "--quick")
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert checks["disk of mine"]["status"] == "ok"
    assert int(checks["disk of mine"]["found"]) != os.getpid()
    assert checks["oops"]["status"] == "fail"
    assert "the check itself failed: SystemExit" in checks["oops"]["found"]
    assert done.returncode == 1


def test_plugins_lists_what_works_and_what_does_not(site):
    done = rlctl(site, "plugins", "--json")
    assert done.returncode == 1
    rows = {r["dist"]: r for r in json.loads(done.stdout)["plugins"]}
    assert rows["rlctl-healthy"]["status"] == "ok"
    assert rows["rlctl-healthy"]["backends"] == [{"name": "healthy", "kind": "train", "summary": ""}]
    assert rows["rlctl-laborts"]["status"] == "fail"
    assert rows["rlctl-lhangs"]["status"] == "skip"
    text = rlctl(site, "plugins")
    assert "train backend healthy" in text.stdout
    assert "killed by SIGABRT" in text.stdout
    assert "Traceback" not in text.stdout + text.stderr


def test_no_plugins_flag_acts_before_any_import(site, tmp_path):
    mark = tmp_path / "imported"
    site.add("rlctl-marker", "marker", "marker_light", marker_light=f"open({str(mark)!r}, 'w')")
    done = rlctl(site, "--no-plugins", "plugins", "--json")
    rows = json.loads(done.stdout)["plugins"]
    tiny = [
        r
        for r in rows
        if r["dist"] not in ("rlctl", "rlctl-plugin-fsdp", "rlctl-plugin-megatron", "rlctl-plugin-mindspeed")
    ]
    assert {r["status"] for r in tiny} == {"skip"}
    assert {r["stage"] for r in tiny} == {"discovered"}
    assert not mark.exists()
