"""What light commands import, and what `capabilities` and `completion` print."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "pydantic", "numpy", "matplotlib", "pyarrow")


def modules_of(site, *arguments: str) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """The top-level modules that one command had imported when it ended."""
    code = f"""
        import atexit, sys
        atexit.register(lambda: print("MODULES", *sorted({{m.partition('.')[0] for m in sys.modules}}), file=sys.stderr))
        from rlctl_cli.main import main
        main({list(arguments)!r})
    """
    done = site.python(code)
    line = next(x for x in done.stderr.splitlines() if x.startswith("MODULES"))
    return set(line.split()[1:]), done


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], (*HEAVY, "rich", "yaml", "importlib_metadata")),
        (["--version"], (*HEAVY, "rich")),
        (["doctor", "--quick", "--json"], HEAVY),
        (["doctor", "--quick"], HEAVY),
        (["plugins", "--json"], HEAVY),
        (["capabilities", "--json"], HEAVY),
        (["completion", "bash"], HEAVY),
    ],
)
def test_light_commands_import_nothing_heavy(site, arguments, absent):
    site.add_backend("light1")
    found, done = modules_of(site, *arguments)
    assert "rlctl" in found
    assert sorted(found & set(absent)) == [], done.stderr
    assert "Traceback" not in done.stderr


def test_importing_rlctl_is_light(site):
    done = site.python("import rlctl, sys; print(sorted(set(sys.modules) & {'torch', 'pydantic', 'pluggy', 'yaml'}))")
    assert done.stdout.strip() == "[]"


def rlctl(site, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlctl_cli.main", *arguments]
    return subprocess.run(command, env=site.env(**env), capture_output=True, text=True, timeout=120, check=False)


def test_capabilities_json_has_every_cell_with_reason_and_evidence(site):
    site.add_backend("mine")
    done = rlctl(site, "capabilities", "--json")
    assert done.returncode == 0
    payload = json.loads(done.stdout)
    assert payload["schema"] == 1
    keys = {"backend", "model_type", "device", "vendor", "axis", "support", "reason", "evidence"}
    for cell in payload["cells"]:
        assert keys <= set(cell)
        assert set(cell["evidence"]) >= {"level", "stale", "record"}
        assert cell["reason"]
    mine = [c for c in payload["cells"] if c["backend"] == "mine"]
    assert [c["axis"] for c in mine] == [
        "dp_shard", "dp_replicate", "tp", "sp", "pp", "vpp", "cp", "ep", "etp", "usp", "dcp",
    ]  # fmt: skip
    assert mine[0]["state"] == "installed"
    assert {c["backend"] for c in payload["cells"]} >= {
        "fsdp2",
        "hf",
        "megatron",
        "veomni",
        "vllm",
        "sglang",
        "torchtitan",
    }


def test_capabilities_text_shows_the_matrix_and_the_reasons(site):
    site.add_backend("mine")
    done = rlctl(site, "capabilities")
    assert done.returncode == 0
    overview = [x for x in done.stdout.splitlines() if x.startswith(("megatron", "veomni"))]
    for backend, device, built in (("megatron", "cpu", True), ("megatron", "npu", True), ("veomni", "cuda", True)):
        line = next(x for x in overview if x.startswith(backend) and device in x)
        assert ("not built (plugin not released)" in line) is not built, line
        assert ("not installed" in line) is built, line
    assert "mine (rlctl-mine): language_model on cpu" in done.stdout
    detail = rlctl(site, "capabilities", "--backend", "vllm", "--device", "cpu")
    assert "segmentation fault" in detail.stdout
    assert "on cuda" not in detail.stdout
    wrong = rlctl(site, "capabilities", "--backend", "vlm")
    assert wrong.returncode == 1
    assert "next:    rlctl capabilities --backend vllm" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_capabilities_show_an_installed_backend_in_one_table(site):
    cells = (
        "tuple(Capability(Axis.DP_SHARD, Support.SUPPORTED, 'shards', device=d) for d in ('cpu', 'cuda'))"
        " + (Capability(Axis.TP, Support.SUPPORTED, 'splits', device='cpu'),"
        " Capability(Axis.TP, Support.UNSUPPORTED, 'no kernel; take megatron', device='cuda'))"
    )
    site.add_backend("mine", capabilities=cells, devices="(('cpu', None), ('cuda', None))")
    folder = site.root / "data" / "evidence"
    folder.mkdir(parents=True)
    record = {
        "backend": "mine", "model_type": "language_model", "device": "cpu", "vendor": None, "axes": {"dp_shard": 2},
        "level": "parity", "model_family": "llama", "what": "w", "versions": {}, "world_size": 2, "deltas": {}, "date": "d",
    }  # fmt: skip
    (folder / "one.json").write_text(json.dumps(record))
    lines = [" ".join(line.split()) for line in rlctl(site, "capabilities", COLUMNS="160").stdout.splitlines()]
    assert lines.count("mine (rlctl-mine): language_model on cpu, cuda") == 1
    assert "dp_shard supported parity on cpu; declared on cuda shards" in lines
    assert "tp supported on cpu declared splits" in lines
    assert "tp unsupported on cuda no kernel; take megatron" in lines
    assert [line for line in lines if "language_model on" in line] == ["mine (rlctl-mine): language_model on cpu, cuda"]
    in_full = rlctl(site, "capabilities", "--backend", "mine").stdout
    assert in_full.count("mine (rlctl-mine): language_model on") == 2


def test_capabilities_show_evidence_and_name_broken_records(site):
    site.add_backend("mine")
    folder = site.root / "data" / "evidence"
    folder.mkdir(parents=True)
    record = {
        "backend": "mine", "model_type": "language_model", "device": "cpu", "vendor": None, "axes": {"dp_shard": 2},
        "level": "parity", "model_family": "llama", "what": "w", "versions": {}, "world_size": 2, "deltas": {}, "date": "d",
    }  # fmt: skip
    (folder / "one.json").write_text(json.dumps(record))
    (folder / "two.json").write_text("{")
    done = rlctl(site, "capabilities", "--backend", "mine")
    assert "parity (dp_shard=2, llama, cpu)" in done.stdout
    assert "two.json" in done.stderr
    payload = json.loads(rlctl(site, "capabilities", "--backend", "mine", "--json").stdout)
    evidence = payload["cells"][0]["evidence"]
    assert (evidence["level"], evidence["stale"], evidence["record"]["source"]) == ("parity", False, "this machine")
    assert len(payload["problems"]) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script_of_each_shell(site, shell):
    done = rlctl(site, "completion", shell)
    assert done.returncode == 0
    assert "_RLCTL_COMPLETE" in done.stdout
    assert rlctl(site, "completion", SHELL=f"/usr/bin/{shell}").stdout == done.stdout


def test_completion_completes_commands(site):
    done = rlctl(site, _RLCTL_COMPLETE="bash_complete", COMP_WORDS="rlctl do", COMP_CWORD="1")
    assert "doctor" in done.stdout


def test_completion_of_an_unknown_shell_is_a_usage_error(site):
    done = rlctl(site, "completion", SHELL="/bin/nosh")
    assert done.returncode == 2
    assert "next:    rlctl completion bash" in done.stderr
