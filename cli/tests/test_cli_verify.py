"""`rlctl verify` at the command line: what it refuses, with which exit code, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest


def rlctl(site, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlctl_cli.main", "verify", *arguments]
    return subprocess.run(command, env=site.env(), capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "Missing option '--backend'"),
        (["--backend", "mine", "--dtype", "float64"], 2, "'float64' is not one of"),
        (["--backend", "mine", "--nproc", "0"], 2, "0 is not in the range"),
        (["--backend", "mine", "--all", "--topology", "dp_shard=2"], 2, "exclude each other"),
        (["--backend", "mine", "--topology", "dp_shard"], 2, "axis=size pairs"),
        (["--backend", "mine", "--topology", "dp_shrad=2"], 2, "--topology dp_shard=2"),
        (["--backend", "mine", "--topology", "dp_shard=2", "--nproc", "3"], 1, "multiply to the world size 3"),
        (["--backend", "mine", "--model", "tiny:lama"], 2, "--model tiny:llama"),
        (["--backend", "mine", "--models", "llama,nope"], 2, "'nope'"),
        (["--backend", "mine", "--model", "no/such/directory"], 1, "no directory no/such/directory"),
        (["--backend", "mine", "--engine", "size"], 2, "--engine size"),
        (["--backend", "mine", "--engine", "size=large"], 1, "size: "),
        (["--backend", "mein"], 1, "did you mean mine?"),
    ],
)
def test_cli_verify_refuses_before_it_starts(site, arguments: list[str], code: int, said: str) -> None:
    site.add_backend("mine")
    done = rlctl(site, *arguments, "--device", "cpu")
    assert said in done.stderr
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_cli_verify_help_is_light_and_shows_examples(site) -> None:
    done = rlctl(site, "--help")
    assert done.returncode == 0
    assert "rlctl verify --backend fsdp2 --topology dp_shard=2,usp=2" in done.stdout
    assert "Exit codes: 0" in done.stdout


def test_cli_verify_prints_a_line_a_quantity(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from rlctl.verify.compare import Delta
    from rlctl.verify.report import Case, Report
    from rlctl.verify.selection import LeftOut
    from rlctl_cli.verify_view import View

    good = Case(
        backend="mine",
        topology={"dp_shard": 2, "usp": 2},
        world_size=4,
        model="tiny:llama",
        model_family="llama",
        model_type="language_model",
        device="cpu",
        dtype="float32",
        deltas={"loss": Delta(1.25e-7, "sft-sgd, step 2"), "gradients": Delta(3e-3, "model.embed_tokens.weight")},
        tolerances={"loss": 1e-5, "gradients": 2e-5},
        skipped={"experts": "not exposed"},
        seconds=2.0,
        evidence="/somewhere.json",
    )
    bad = replace(good, failures=("gradients",), evidence=None)
    dead = replace(
        good,
        topology={},
        deltas={},
        error={"what": "rank 1 died", "details": ["rank 0: idle"], "found": "killed", "wanted": None, "next": "look"},
    )
    for quiet, shown in ((False, 3), (True, 2)):
        view = View(tables=True, quiet=quiet)
        with view:
            view.start(3)
            for case in (good, bad, dead):
                view.begin("next")
                view.end(case)
        left_out = (
            LeftOut("ep=2", "tiny:llama", "no experts"),
            LeftOut("tp=4", "tiny:qwen3", "no need", "value_model"),
        )
        view.finish(Report((good, bad, dead), left_out, ("took back x",), 61.0))
        out, err = capsys.readouterr()
        assert out.count(" on cpu: ") == shown
        assert "mine, dp_shard=2,usp=2, tiny:llama, float32 on cpu: FAILED in 2.0 s" in out
        assert "gradients       3.00e-03    2.0e-05  FAIL  model.embed_tokens.weight" in out
        assert "mine, one process, tiny:llama, float32 on cpu: FAILED" in out
        assert "ended early: rank 1 died" in out
        assert "next:    look" in out
        assert "left out: ep=2, tiny:llama: no experts" in out
        assert "left out: tp=4, tiny:qwen3 value_model: no need" in out
        assert "took back x" in out
        last = out.splitlines()[-1]
        assert last.startswith(
            "1 of 3 passed; dp_shard=2,usp=2 (tiny:llama) failed: gradients; one process (tiny:llama)"
        )
        assert last.endswith("(1m 01s)")
        assert ("[2/3] next, about" in err) is not quiet
    view = View(tables=True, quiet=True)
    view.end(replace(bad, model_type="value_model"))
    assert "mine, dp_shard=2,usp=2, tiny:llama value_model, float32 on cpu: FAILED" in capsys.readouterr().out
    view = View(tables=False, quiet=True)
    view.end(good)
    assert capsys.readouterr().out == ""


def test_cli_capabilities_and_doctor_show_a_failed_comparison(site) -> None:
    site.add_backend("mine")
    folder = site.root / "data" / "evidence"
    folder.mkdir(parents=True)
    record = {
        "backend": "mine", "model_type": "language_model", "device": "cpu", "vendor": None, "axes": {"dp_shard": 2},
        "level": "declared", "model_family": "llama", "what": "rlctl verify failed: gradients", "versions": {},
        "world_size": 2, "deltas": {}, "date": "2026-01-01", "extra": {"failed": True},
    }  # fmt: skip
    (folder / "one.json").write_text(json.dumps(record))

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "rlctl_cli.main", *arguments]
        done = subprocess.run(command, env=site.env(), capture_output=True, text=True, timeout=120, check=False)
        assert "Traceback" not in done.stderr
        return done.stdout

    text = run("capabilities", "--backend", "mine")
    assert "declared, 1 failed here (dp_shard=2, llama: rlctl verify failed: gradients)" in text
    assert "yes!" in run("capabilities")
    cells = json.loads(run("capabilities", "--backend", "mine", "--json"))["cells"]
    assert [len(c["evidence"]["failed"]) for c in cells if c["axis"] == "dp_shard"] == [1]
    found = json.loads(run("doctor", "evidence", "--json"))["checks"]
    assert [(c["name"], c["status"]) for c in found] == [("evidence", "warn")]
    assert found[0]["next"] == "rlctl verify --backend mine --topology dp_shard=2"
