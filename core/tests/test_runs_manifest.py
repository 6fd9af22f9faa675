"""What is recorded of a run, and that nothing secret is."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from rlctl.config.load import ResolvedConfig
from rlctl.config.schema import RunConfig
from rlctl.device import Device
from rlctl.errors import DataError
from rlctl.manifest import REDACTED, build_manifest, git_state, redact, versions
from rlctl.rundir import RunDirectory


def resolved(tmp_path: Path, **more: object) -> ResolvedConfig:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    values = {"model": {"path": "tiny"}, "data": {"train_files": ["train.jsonl"]}, **more}
    config = RunConfig.model_validate(values)
    return ResolvedConfig(
        config, {"model.path": "override model.path=hf_abcdefghijklmnop1234"}, tmp_path, "my/quick.yaml"
    )


def test_a_guard_that_cannot_look_is_named_with_its_reason(tmp_path: Path) -> None:
    filtered = resolved(tmp_path, rollout={"top_p": 0.9, "top_k": 5})
    guards = build_manifest(filtered, None, device=Device("cpu"), argv=[], cwd=tmp_path)["guards"]
    assert "top_p=0.9 and rollout.top_k=5" in guards["inactive"]["rollout_logprob_check"]
    off = resolved(tmp_path, rollout={"top_p": 0.9}, guards={"rollout_logprob_check": False})
    guards = build_manifest(off, None, device=Device("cpu"), argv=[], cwd=tmp_path)["guards"]
    assert (guards["off"], guards["inactive"]) == (["rollout_logprob_check"], {})


def test_a_manifest_is_complete_and_writable(tmp_path: Path) -> None:
    config = resolved(
        tmp_path,
        trainer={"seed": 7},
        guards={"weight_fingerprint": False, "nonfinite_step_budget": 9},
        actor={"parallel": {"tp": 1}},
    )
    argv = ["rlctl", "train", "quick", "actor.optim.lr=1e-5"]
    manifest = build_manifest(config, None, device=Device("cpu"), argv=argv, cwd=tmp_path)
    content = (tmp_path / "train.jsonl").read_bytes()
    assert manifest["data"] == [
        {"path": str(tmp_path / "train.jsonl"), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    ]
    assert manifest["seeds"] == {"trainer": 7}
    assert manifest["guards"] == {
        "off": ["weight_fingerprint"],
        "changed": {"nonfinite_step_budget": 9},
        "inactive": {},
    }
    assert manifest["command_line"] == "rlctl train quick actor.optim.lr=1e-5"
    assert manifest["topology"]["actor"]["world_size"] == 1
    assert manifest["device"]["type"] == "cpu"
    assert (manifest["recipe"], manifest["kind"], manifest["algorithm"]) == ("quick", "rl", "grpo")
    assert manifest["versions"]["rlctl-core"]
    assert manifest["python"].startswith("3.")
    assert manifest["git"] is None
    run = RunDirectory.create(tmp_path, "r", config.to_yaml(), manifest)
    assert json.loads(run.manifest_path.read_text())["seeds"] == {"trainer": 7}


def test_a_task_is_recorded_by_name_and_seed(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"task": {"name": "sort", "seed": 3}}})
    manifest = build_manifest(ResolvedConfig(config, {}, tmp_path, "quickstart"), device=Device("cpu"), argv=["rlctl"])
    assert manifest["task"] == "sort"
    assert manifest["seeds"] == {"trainer": 0, "task": 3}
    assert manifest["data"] == []


def test_a_missing_data_file_is_a_plain_error(tmp_path: Path) -> None:
    config = resolved(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match="no data file"):
        build_manifest(config, device=Device("cpu"))


SECRETS = [
    "hf_AbCdEfGhIjKlMnOpQrSt",
    "sk-proj-abcdefghijklmnop",
    "ghp_0123456789abcdefghij",
    "0123456789abcdef0123456789abcdef01234567",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "AKIAIOSFODNN7EXAMPLE",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("form", ["{}", "model.path={}", "--hf-token={}", "x={}"])
def test_credentials_are_replaced_wherever_they_stand(secret: str, form: str) -> None:
    out = redact(["rlctl", "train", form.format(secret), "--flag", secret])
    assert secret not in " ".join(out)
    assert REDACTED in out[2]


def test_values_of_secret_keys_and_logins_in_addresses_are_replaced() -> None:
    argv = ["--hf-token", "short", "--password=pw", "wandb.api_key=x1", "model.path=https://me:pw@host/repo", "-x"]
    assert redact(argv) == [
        "--hf-token", REDACTED, f"--password={REDACTED}", f"wandb.api_key={REDACTED}",
        f"model.path=https://{REDACTED}@host/repo", "-x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "argument",
    [
        "actor.max_tokens_per_device=4096",
        "actor.loss_agg_mode=token-mean",
        "model.tokenizer=./my-tokenizer",
        "model.config.eos_token_id=2",
        "model.revision=0123456789abcdef0123456789abcdef01234567",
        "trainer.experiment_name=gsm8k-smollm2-135m-grpo-lr1e5-seed0-second-attempt",
        "package:smollm2",
        "/data/runs/2026/experiment-number-12345678901234567890/train.jsonl",
        "reward.components.0.name=rewards/my_file.py:score_answer_with_2_parts",
    ],
)
def test_what_makes_a_run_repeatable_is_kept(argument: str) -> None:
    assert redact(["rlctl", "train", argument])[2] == argument


def test_no_environment_value_and_no_secret_reaches_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_fromtheenvironment123456")
    monkeypatch.setenv("MY_SETTING", "a-value-of-the-environment")
    argv = ["rlctl", "train", "quick", "--hf-token", "hf_onthecommandline1234567"]
    text = json.dumps(build_manifest(resolved(tmp_path), device=Device("cpu"), argv=argv, cwd=tmp_path))
    for secret in ("fromtheenvironment", "a-value-of-the-environment", "onthecommandline", "hf_abcdefghijklmnop1234"):
        assert secret not in text


def test_git_state_sees_commit_branch_and_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = {
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@b",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@b",
        }
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *arguments],
            env=os.environ | identity,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-q", "-b", "trunk")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "a.txt").write_text("1")
    git("add", "a.txt")
    git("commit", "-qm", "first")
    (tmp_path / "untracked").write_text("")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "branch": "trunk", "dirty": False}
    (tmp_path / "a.txt").write_text("2")
    state = git_state(tmp_path)
    assert state is not None
    assert state["dirty"] is True


def test_git_state_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_versions_are_of_installed_dists_only() -> None:
    found = versions()
    assert {"rlctl-core", "pydantic", "pluggy"} <= set(found)
    assert "npu" not in " ".join(found)
