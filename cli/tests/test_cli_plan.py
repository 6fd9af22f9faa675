"""`rlctl plan` as a user types it. A tiny backend is installed; no first-party plugin is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "numpy", "safetensors", "pyarrow", "matplotlib"}
MODEL = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CELLS = (
    "tuple(Capability(axis, support, reason, device=device, constraint=rule) for device in ('cpu', 'cuda')"
    " for axis, support, reason, rule in ("
    "(Axis.DP_SHARD, Support.SUPPORTED, 'shards', None), (Axis.DP_REPLICATE, Support.SUPPORTED, 'replicas', None),"
    " (Axis.USP, Support.SUPPORTED, 'heads', 'heads_divisible_by_usp'),"
    " (Axis.PP, Support.UNSUPPORTED, 'all layers on every rank; take megatron', None)))"
)


@pytest.fixture
def run(site, tmp_path: Path):
    """Runs the command in a directory with ``run.yaml``, whose backends are the tiny ones."""
    site.add_backend("trainer1", capabilities=CELLS, devices="(('cpu', None), ('cuda', None))")
    site.add_backend("roller1", "", "rollout", capabilities=CELLS, devices="(('cpu', None), ('cuda', None))")
    (tmp_path / "run.yaml").write_text(
        f"model: {{config: {json.dumps(MODEL)}, tokenizer: unused}}\n"
        "data: {task: {name: sort_digits, train_size: 320}, train_batch_size: 32}\n"
        "actor: {backend: trainer1}\nrollout: {backend: roller1, n: 4}\n"
    )

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlctl_cli.main", "plan", *arguments]
        return subprocess.run(
            command, env=site.env(), capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
        )

    return call


def test_a_plan_reads_from_ranks_to_backends(run) -> None:
    done = run("run.yaml", "--world-size", "8", "actor.parallel.usp=2", "--device-memory", "80")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    order = [
        "run.yaml: rl, 8 ranks on cpu",
        "Ranks",
        "Batch",
        "Memory of one rank",
        "Training backends",
        "Rollout backends",
    ]
    places = [text.index(word) for word in order]
    assert places == sorted(places)
    assert "dp_shard=4, usp=2" in text
    assert "usp: 4 x 2 (0-1; 2-3, ...)" in text
    assert "128 / dp 4" in text
    assert "fits: " in text
    assert "of 80 GiB" in text
    assert "follows its documentation" in text  # a backend that nobody checked
    assert "Traceback" not in done.stderr


def test_every_rank_is_written_out_on_demand(run) -> None:
    short, long = run("run.yaml", "--world-size", "4"), run("run.yaml", "--world-size", "4", "--ranks")
    assert "Every rank of actor" not in short.stdout
    assert "--ranks" in short.stdout
    assert "Every rank of actor" in long.stdout
    assert "dp_shard: 0 1 2 3" in long.stdout


def test_json_is_one_object(run) -> None:
    done = run("run.yaml", "--world-size", "4", "--device", "cuda", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["schema"] == 1
    assert (data["device"], data["vendor"], data["refused"]) == ("cuda", "nvidia", [])
    assert [r["role"] for r in data["roles"]] == ["actor", "rollout"]
    assert data["roles"][0]["ranks"][3] == {
        "rank": 3, "coordinates": [0, 0, 3, 0, 0, 0], "dp_rank": 3, "is_collector": True,
    }  # fmt: skip
    assert data["roles"][0]["groups"] == [
        {
            "axis": "dp_shard", "size": 4, "count": 1, "members": [[0, 1, 2, 3]],
            "words": "ranks of one replica with other rows",
        }
    ]  # fmt: skip
    assert data["batch"][0] == {
        "key": "prompts", "value": 32, "unit": "prompts a step", "how": "data.train_batch_size", "note": "",
    }  # fmt: skip
    assert data["memory"]["verdict"] == "unknown"
    first = data["backends"][0]
    assert (first["name"], first["state"], first["fits"]) == ("trainer1", "installed", True)


def test_what_is_refused_has_the_nearest_choice_and_exit_code_1(run) -> None:
    done = run("run.yaml", "--world-size", "6", "actor.parallel.usp=3")
    assert done.returncode == 1
    assert "actor.parallel.usp=3: attention heads must divide by tp x usp" in done.stdout
    assert "nearest that fits: usp=2" in done.stdout
    assert "Traceback" not in done.stderr
    needs = run("run.yaml", "--world-size", "6", "actor.parallel.pp=2", "--device", "cuda")
    assert needs.returncode == 1
    assert "needs pp=2: all layers on every rank; only megatron has it" in " ".join(needs.stdout.split())
    data = json.loads(run("run.yaml", "--world-size", "6", "actor.parallel.usp=3", "--json").stdout)
    assert data["refused"][0]["where"] == "actor"
    assert data["refused"][0]["nearest"][0] == "usp=2"


def test_a_device_that_is_too_small_is_exit_code_1(run) -> None:
    done = run("run.yaml", "--device-memory", "0.0001")
    assert done.returncode == 1
    assert "does not fit" in done.stdout


def test_a_backend_that_is_not_installed_is_planned_and_named(run) -> None:
    done = run("run.yaml", "--world-size", "4", "--device", "cuda", "--backend", "megatron", "actor.parallel.tp=2")
    assert done.returncode == 1
    assert "pip install rlctl-plugin-megatron" in done.stdout
    assert "dp_shard=2, tp=2" in done.stdout
    assert "float32 master copy" in done.stdout


def test_a_critic_that_nobody_has(run) -> None:
    done = run("run.yaml", "--device", "cuda", "--critic")
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "trainer1 has no value_model: it cannot train a critic" in text
    assert "needs a critic: torchtitan has no value_model; only fsdp2, megatron, veomni have it" in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "rlctl plan needs a recipe or a YAML file"),
        (["actor.parallel.usp=2"], 2, "rlctl plan needs a recipe or a YAML file"),
        (["nothing-there"], 1, "there is no recipe called 'nothing-there'"),
        (["run.yaml", "actor.bakend=x"], 1, "actor.bakend"),
        (["run.yaml", "--world-size", "0"], 2, "--world-size"),
        (["run.yaml", "--device-memory", "-1"], 2, "--device-memory"),
        (["run.yaml", "--device", "abacus"], 2, "--device"),
    ],
)
def test_mistakes_are_said_without_a_traceback(run, arguments, code, words) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_command_imports_nothing_heavy(site, run, tmp_path: Path) -> None:
    code = f"""
        import atexit, sys
        atexit.register(lambda: print("MODULES", *sorted({{m.partition('.')[0] for m in sys.modules}}), file=sys.stderr))
        from rlctl_cli.main import main
        main(["plan", {str(tmp_path / "run.yaml")!r}, "--world-size", "16384", "--device", "cuda", "--json"])
    """
    done = site.python(code)
    assert done.returncode == 0, done.stderr
    line = next(x for x in done.stderr.splitlines() if x.startswith("MODULES"))
    loaded = set(line.split()[1:])
    assert "pydantic" in loaded
    assert loaded & HEAVY == set()
    assert len(json.loads(done.stdout)["roles"][0]["ranks"]) == 16384
