"""rlctl config show, schema and migrate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

RUN = """\
# A run.
model: {path: org/tiny}
data: {task: {name: sort_digits}}
actor: {backend: clitrain, optim: {lr: 1e-5}}
rollout: {backend: cliroll}
"""

Call = Callable[..., Any]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def test_show_prints_yaml_that_can_be_run_again(rlctl: Call, run_file: Path, tmp_path: Path) -> None:
    done = rlctl("config", "show", "run.yaml", "actor.optim.lr=2e-6", "--backend", "clitrain-alias", "--nproc", 1)
    assert done.code == 0
    assert done.err == "actor.backend: clitrain-alias is another name of clitrain, which is used\n"
    values = yaml.safe_load(done.out)
    assert values["actor"]["optim"]["lr"] == 2e-6
    assert values["actor"]["engine"] == {"chunk": 4}
    (tmp_path / "again.yaml").write_text(done.out)
    assert rlctl("config", "show", "again.yaml").out == done.out
    assert run_file.read_text() == RUN


def test_show_says_where_each_value_came_from(rlctl: Call, run_file: Path) -> None:
    done = rlctl("config", "show", "run.yaml", "rollout.n=3", "--algorithm", "grpo", "--origins")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.out.splitlines()[1:]}
    assert done.code == 0
    assert [text.strip() for text in rows["actor.optim.lr"]] == ["1.0e-05", "run.yaml:4"]
    assert [text.strip() for text in rows["rollout.n"]] == ["3", "override rollout.n=3"]
    assert [text.strip() for text in rows["algorithm.adv_estimator"]] == ["grpo", "flag --algorithm"]
    assert rows["actor.optim.eps"][1].strip() == "default"
    assert len(rows) > 80
    changed = rlctl("config", "show", "run.yaml", "--changed").out
    assert "default" not in changed
    assert "actor.optim.lr" in changed


def test_show_as_one_json_object(rlctl: Call, run_file: Path, tmp_path: Path) -> None:
    done = rlctl("config", "show", run_file, "trainer.seed=4", "--json", "--backend", "clitrain-alias")
    payload = json.loads(done.out)
    assert payload["schema"] == 1
    assert payload["config"]["trainer"]["seed"] == 4
    assert payload["origins"]["trainer.seed"] == "override trainer.seed=4"
    assert payload["origins"]["model.path"] == f"{run_file}:2"
    assert payload["base_dir"] == str(tmp_path)
    assert len(payload["notices"]) == 1


def test_show_reports_every_problem_and_exits_with_1(rlctl: Call, run_file: Path) -> None:
    done = rlctl("config", "show", "run.yaml", "actor.optim.lrr=1", "actor.engine.chnk=2", "rollout.n=x")
    assert done.code == 1
    assert done.out == ""
    lines = done.err.splitlines()
    assert lines[0] == "error: 3 problems in the configuration run.yaml"
    assert sum("Did you mean actor.optim.lr?" in line for line in lines) == 1
    assert sum("Did you mean actor.engine.chunk?" in line for line in lines) == 1
    assert lines[-1].strip().startswith("next:")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("config", "show"), 2, "Missing argument"),
        (("config", "show", "run.yaml", "--nproc", "0"), 2, "--nproc"),
        (("config", "show", "run.yaml", "--nonsense"), 2, "No such option"),
        (("config", "show", "runn.yaml"), 1, "did you mean run.yaml?"),
        (("config", "show", "run.yaml", "--backend", "megatron"), 1, "megatron"),
        (("config", "show", "run.yaml", "--backend", "cliroll"), 1, "cliroll"),
        (("config", "migrate", "nothing.yaml"), 1, "there is no configuration file nothing.yaml"),
        (("config", "schema", "--backend", "nothing"), 1, "nothing"),
    ],
)
def test_what_is_wrong_is_said_with_the_right_exit_code(
    args: tuple[str, ...], code: int, words: str, rlctl: Call, run_file: Path
) -> None:
    done = rlctl(*args)
    assert (done.code, done.out) == (code, "")
    assert words in done.err


def test_schema_has_the_engine_section_and_never_overwrites(rlctl: Call, tmp_path: Path) -> None:
    done = rlctl("config", "schema", "--backend", "clitrain")
    schema = json.loads(done.out)
    assert schema["$defs"]["Settings"]["properties"]["chunk"]["default"] == 4
    assert schema["$defs"]["ActorConfig"]["properties"]["engine"]["$ref"] == "#/$defs/Settings"
    assert schema["additionalProperties"] is False
    assert rlctl("config", "schema", "--output", "s.json").code == 0
    written = (tmp_path / "s.json").read_text()
    assert json.loads(written)["title"] == "rlctl run"
    again = rlctl("config", "schema", "--backend", "clitrain", "--output", "s.json")
    assert again.code == 1
    assert "is left as it is" in again.err
    assert (tmp_path / "s.json").read_text() == written


def test_migrate_prints_the_new_file_and_what_is_lost(rlctl: Call, tmp_path: Path) -> None:
    old = "actor_rollout_ref:\n  model: {path: org/tiny}\n  rollout: {n: 5, enforce_eager: true}\ndata: {train_files: a.jsonl}\n"
    (tmp_path / "verl.yaml").write_text(old)
    done = rlctl("config", "migrate", "verl.yaml")
    assert done.code == 1
    assert yaml.safe_load(done.out) == {
        "model": {"path": "org/tiny"},
        "data": {"train_files": ["a.jsonl"]},
        "rollout": {"n": 5},
    }
    assert "not translated:\n  verl.yaml:3 actor_rollout_ref.rollout.enforce_eager (true): " in done.err
    assert "3 values translated, 1 not" in done.err
    payload = json.loads(rlctl("config", "migrate", "verl.yaml", "--json").out)
    assert [item["line"] for item in payload["not_translated"]] == [3]
    assert payload["config"]["rollout"] == {"n": 5}
    (tmp_path / "verl.yaml").write_text(old.replace(", enforce_eager: true", ""))
    done = rlctl("config", "migrate", "verl.yaml", "--output", "new.yaml")
    assert (done.code, done.out) == (0, "")
    assert yaml.safe_load((tmp_path / "new.yaml").read_text())["rollout"] == {"n": 5}
    assert rlctl("config", "migrate", "verl.yaml", "--output", "new.yaml").code == 1


CODE = """
import sys
from rlctl_cli.main import main
try:
    main(sys.argv[2:])
except SystemExit:
    pass
print("heavy:", sorted(set(sys.argv[1].split(",")) & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "args", [("config", "show", "quickstart"), ("config", "schema"), ("config", "migrate", "run.yaml"), ("recipes",)]
)
def test_nothing_heavy_is_imported(args: tuple[str, ...], run_file: Path) -> None:
    command = [sys.executable, "-c", CODE, "torch,transformers,numpy,pyarrow,matplotlib", *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=run_file.parent, timeout=60)
    assert done.stderr.splitlines()[-1] == "heavy: []", done.stderr
