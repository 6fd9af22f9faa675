"""What is asked of another interpreter: its faults in words, its backends, their settings, whether they load; and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from other_pythons import another_rlctl, answering, script, with_packages

from rlctl import __version__
from rlctl.config.load import ResolvedConfig, load_config
from rlctl.config.problems import InvalidConfigError
from rlctl.doctor.elsewhere import run_doctor_there
from rlctl.errors import BackendUnavailableError, RlctlError, UsageError
from rlctl.evidence import EvidenceBook
from rlctl.interpreters import asking
from rlctl.interpreters.faults import InterpreterError
from rlctl.plan.planner import make_plan
from rlctl.plan.report import plan_to_json
from rlctl.plan.request import read_request
from rlctl.plugins import PluginSet
from rlctl.records import BackendKind, CheckStatus

RUN = """
model: {path: org/tiny}
data: {task: {name: sort_digits}}
actor: {backend: fsdp2}
rollout: {backend: distant}
"""
There = tuple[Any, str]
"""A directory of tiny distributions (see conftest), and an interpreter that has them."""
VLLM = ("vllm", BackendKind.ROLLOUT)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("RLCTL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RLCTL_DISABLE_PLUGINS", "rlctl-plugin-megatron,rlctl")
    monkeypatch.setattr(asking, "_kept", {})


@pytest.fixture
def there(site: Any, tmp_path: Path) -> There:
    """An interpreter with a rollout backend that this one has not."""
    site.add_backend("distant", "import json", "rollout", install_hint="'pip install rlctl-distant[cpu]'")
    strict = "from pydantic import BaseModel\n\n\nclass Config(BaseModel, extra='forbid'):\n    size: int = 1\n"
    (site.path / "distant_config.py").write_text(strict)
    return site, with_packages(tmp_path / "there" / "bin" / "python", site.path)


def refused(python: str) -> InterpreterError:
    with pytest.raises(InterpreterError) as caught:
        asking.look(python, VLLM)
    assert python in caught.value.what
    assert all((caught.value.found, caught.value.wanted, caught.value.next))
    return caught.value


# ---- faults of an interpreter ---------------------------------------------------------------------------------------
def test_what_is_no_python_says_what_it_did(tmp_path: Path) -> None:
    error = refused(script(tmp_path / "no", "echo cannot run >&2; exit 3"))
    assert "exit code 3" in str(error.found)
    assert "cannot run" in str(error.found)
    assert "an answer that says nothing of its version" in str(refused(answering(tmp_path / "odd", '{"a": 1}')).found)


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01\x01 no more of it", b"#!/no/such/interpreter\n"])
def test_a_file_that_the_system_cannot_start_is_no_python(content: bytes, tmp_path: Path) -> None:
    """Executable by its mode alone. The doctor of another environment says the same as a run."""
    file = tmp_path / "bad" / "bin" / "python"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    file.chmod(0o755)
    error = refused(str(file))
    assert error.what == f"{file} does not answer as a Python interpreter does"
    assert "cannot be started" in str(error.found)
    assert error.exit_code == 1
    with pytest.raises(InterpreterError, match="does not answer as a Python interpreter"):
        run_doctor_there(file.parent.parent, (), quick=True, timeout_s=5.0)


def test_one_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LIGHT_S", 1.0)
    assert "no end after 1 s" in str(refused(script(tmp_path / "stuck", "exec sleep 60")).found)


def test_an_old_python_is_named(tmp_path: Path) -> None:
    error = refused(answering(tmp_path / "old", json.dumps({"python": [3, 9, 18]})))
    assert (error.found, error.wanted) == ("Python 3.9.18", "Python 3.11 or newer")


def test_one_without_rlctl_says_how_it_gets_it_with_the_plugin(tmp_path: Path) -> None:
    python = script(tmp_path / "bare", 'exec "$PYTHON" -I -S "$@"')
    error = refused(python)
    assert error.found == "ModuleNotFoundError: No module named 'rlctl'"
    assert str(error.next).startswith(f"{python} -m pip install 'rlctl-plugin-vllm[cuda]'")
    with pytest.raises(InterpreterError) as caught:
        asking.look(python)
    assert caught.value.next == f"{python} -m pip install 'rlctl-core=={__version__}'"


@pytest.mark.parametrize(("version", "api"), [("9.9.9", (1, 0)), (__version__, (2, 0))])
def test_one_with_another_rlctl_is_refused(version: str, api: tuple[int, int], tmp_path: Path) -> None:
    folder = another_rlctl(tmp_path / "theirs", version, api)
    error = refused(script(tmp_path / "newer", f'PYTHONPATH={folder} exec "$PYTHON" "$@"'))
    assert error.found == f"rlctl {version} (hook API {api[0]}.{api[1]})"
    assert error.next == f"{tmp_path}/newer -m pip install 'rlctl-core=={__version__}'"


def test_a_rlctl_that_lacks_what_it_requires_is_told_by_its_causes(tmp_path: Path) -> None:
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    (lacking / "pluggy.py").write_text("import no_such_thing\n")
    error = refused(with_packages(tmp_path / "python", lacking))
    assert "does not work" in error.what
    assert str(error.found).startswith("ModuleNotFoundError: No module named 'no_such_thing'")
    assert f"({lacking}/pluggy.py:1)" in str(error.found)
    assert error.next == f"{tmp_path}/python -m pip install no_such_thing"


# ---- its backends ---------------------------------------------------------------------------------------------------
def test_its_backends_are_records_here(there: There) -> None:
    found = asking.look(there[1])
    (record,) = [r for r in found.plugins.backends() if r.spec.name == "distant"]
    assert (record.dist, record.version, record.problems) == ("rlctl-distant", "1.0", ())
    assert (record.spec.engine, str(record.spec.kind)) == ("distant_engine:Engine", "rollout")
    assert asking.require_import(there[1], record) == {}


def test_requirements_are_those_that_are_met_there(there: There) -> None:
    site, python = there
    site.add_backend("needy", requirements="('no-such-dist>=2',)")
    (record,) = [r for r in asking.look(python).plugins.backends() if r.spec.name == "needy"]
    assert record.problems == ("no-such-dist is not installed, no-such-dist>=2 is required",)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "try:\n    import no_such_lib\nexcept ImportError as e:\n    raise RuntimeError('wrapped') from e",
            "no_such_lib",
        ),
        ("import os\nos.abort()", "killed by SIGABRT while importing distant_engine:Engine"),
        ("import time\ntime.sleep(60)", "no end after 8 s while importing distant_engine:Engine"),
    ],
)
def test_one_that_does_not_load_there_says_its_whole_chain(source: str, words: str, there: There) -> None:
    site, python = there
    (site.path / "distant_engine.py").write_text(f"{source}\n\n\nclass Engine:\n    pass\n")
    record = next(r for r in asking.look(python).plugins.backends() if r.spec.name == "distant")
    with pytest.raises(BackendUnavailableError) as caught:
        asking.require_import(python, record, 8.0 if "sleep" in source else 60.0)
    text = str(caught.value)
    assert words in text
    assert f"backend 'distant' of rlctl-distant 1.0 does not load in {python}" in text
    if words == "no_such_lib":
        assert "RuntimeError: wrapped" in caught.value.details[0]
        assert "because ModuleNotFoundError" in caught.value.details[-1]
        assert caught.value.next == f"{python} -m pip install no_such_lib"


# ---- a configuration ------------------------------------------------------------------------------------------------
def load(run: Path, python: str, *overrides: str) -> ResolvedConfig:
    return load_config(str(run), [f"rollout.python={python}", *overrides])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return file


def test_a_backend_that_is_only_there_is_taken(run: Path, there: There) -> None:
    with pytest.raises(BackendUnavailableError, match="no rollout backend is called 'distant'"):
        load_config(str(run))
    found = load(run, there[1])
    config = found.config
    assert config.rollout.engine == {"size": 1}, "complete, by the model that is there"
    assert (config.rollout.pool, config.rollout.python) == ("rollout", there[1])
    assert config.runtime.pools["rollout"].model_dump() == {"nproc": 1, "python": there[1]}
    assert config.runtime.chosen_launcher() == "process"
    assert config.roles_used() == {"actor": "main", "rollout": "rollout"}


def test_its_section_is_checked_there_and_told_as_here(run: Path, there: There) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load(run, there[1], "rollout.engine={size: big, sise: 2}", "actor.engine.no_such=1")
    problems = {p.path: str(p) for p in caught.value.problems}
    assert set(problems) == {"rollout.engine.size", "rollout.engine.sise", "actor.engine.no_such"}
    assert "override rollout.engine={size: big, sise: 2}" in problems["rollout.engine.size"]
    assert "found the text 'big', wanted a whole number" in problems["rollout.engine.size"]
    assert "Did you mean rollout.engine.size?" in problems["rollout.engine.sise"]


def test_axes_are_checked_with_the_record_that_is_there(run: Path, there: There) -> None:
    with pytest.raises(InvalidConfigError, match=r"rollout\.parallel\.tp"):
        load(run, there[1], "rollout.parallel.tp=2")


def test_what_is_not_there_says_what_is(run: Path, there: There) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        load(run, there[1], "rollout.backend=vllm")
    assert caught.value.what == f"the rollout backend 'vllm' is not installed, in {there[1]}"
    assert "distant (rlctl-distant 1.0)" in str(caught.value)
    assert str(caught.value.next).startswith(f"{there[1]} -m pip install 'rlctl-plugin-vllm[cuda]'")


def test_the_first_fault_of_an_interpreter_is_the_only_one(run: Path, tmp_path: Path) -> None:
    broken = script(tmp_path / "no" / "python", "exit 3")
    with pytest.raises(InterpreterError, match="does not answer"):
        load(run, broken, "actor.use_kl_loss=true", f"ref.python={broken}")
    with pytest.raises(InvalidConfigError) as caught:
        load(run, str(tmp_path / "nowhere"))
    (problem,) = caught.value.problems
    assert (problem.path, problem.what) == ("rollout.python", "there is no such environment")
    assert "python3 -m venv" in problem.hint
    with pytest.raises(InvalidConfigError, match="there is no Python interpreter"):
        load(run, str(tmp_path))


def test_nobody_is_asked_for_a_role_that_takes_no_part(run: Path, tmp_path: Path) -> None:
    broken = script(tmp_path / "no" / "python", "exit 3")
    config = load(run, broken, "rollout.backend=hf", "trainer.type=sft").config
    assert config.pools_used() == {"main": 1}
    said: list[str] = []
    load_config(str(run), ["rollout.backend=hf", f"ref.python={broken}"], notice=said.append)
    assert [text for text in said if text.startswith("ref.python does nothing: there is no KL to a reference")]


def test_a_plan_speaks_of_the_environment_where_a_role_lives(run: Path, there: There) -> None:
    request = read_request(str(run), [f"rollout.python={there[1]}"], PluginSet())
    plan = plan_to_json(make_plan(request, PluginSet(), EvidenceBook()), None)
    assert not [r for r in plan["refused"] if "distant" in r["what"]]
    rollout = next(role for role in plan["roles"] if role["role"] == "rollout")
    assert (rollout["backend"], rollout["pool"], rollout["python"]) == ("distant", "rollout", there[1])
    assert ("distant", "installed") in [(b["name"], b["state"]) for b in plan["backends"]]


# ---- the doctor -----------------------------------------------------------------------------------------------------
def test_the_doctor_runs_there(there: There) -> None:
    site, python = there
    site.add_backend("sick", "import no_such_lib")
    report = run_doctor_there(Path(python), ["distant", "sick"], False, 60.0)
    rows = {row.name: row for row in report.backends}
    assert (rows["distant"].status, rows["sick"].status) == (CheckStatus.OK, CheckStatus.FAIL)
    assert "No module named 'no_such_lib'" in rows["sick"].cause[-1]
    assert rows["sick"].next == f"{python} -m pip install no_such_lib"
    assert report.to_json()["python"] == python
    assert report.exit_code() == 1
    with pytest.raises(UsageError, match="called 'nobody'"):
        run_doctor_there(Path(python), ["nobody"], True, 60.0)
    with pytest.raises(UsageError, match="no Python interpreter at"):
        run_doctor_there(Path(python) / "no", [], True, 60.0)


# ---- what is kept ---------------------------------------------------------------------------------------------------
def test_a_good_answer_stands_until_a_file_changes(there: There, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, python = there
    asked: list[str] = []
    put = asking.put
    monkeypatch.setattr(asking, "put", lambda p, action, *a, **k: asked.append(action) or put(p, action, *a, **k))
    load(run, python)
    assert asked == ["plugins", "section"]
    for kept in (asking._kept, {}):  # in this process, and on disk
        monkeypatch.setattr(asking, "_kept", dict(kept))
        load(run, python)
    assert asked == ["plugins", "section"]
    config = site.path / "distant_config.py"
    config.write_text(config.read_text().replace("size: int = 1", "size: int = 22"))
    assert load(run, python).config.rollout.engine == {"size": 22}
    assert asked == ["plugins", "section"] * 2
    site.add_backend("later")
    assert "later" in [r.spec.name for r in asking.look(python).plugins.backends()]
    monkeypatch.setenv("RLCTL_DISABLE_PLUGINS", "distant,rlctl-plugin-megatron,rlctl")
    with pytest.raises(RlctlError, match="'distant'"):
        load(run, python)


def test_a_fault_is_asked_about_again(tmp_path: Path) -> None:
    python = Path(script(tmp_path / "there" / "python", "exit 3"))
    refused(str(python))
    with_packages(python)
    assert asking.look(str(python)).version


def test_a_home_that_cannot_be_written_costs_time_only(
    there: There, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("RLCTL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert asking.look(there[1]).version


def test_a_configuration_that_is_written_down_loads_back_as_it_was(run: Path, there: There, tmp_path: Path) -> None:
    """The pool that a role has for its interpreter alone is not written: another interpreter can be named on a resume."""
    first = load(run, there[1])
    written = tmp_path / "again.yaml"
    written.write_text(first.to_yaml())
    assert "pools: {}" in first.to_yaml()
    assert load_config(str(written)).config == first.config
    other = with_packages(tmp_path / "moved" / "bin" / "python", there[0].path)
    moved = load(written, other).config
    assert moved.runtime.pools["rollout"].python == moved.rollout.python == other
    sized = load(run, there[1], "runtime.pools.rollout.nproc=1")
    written.write_text(sized.to_yaml())
    assert "nproc: 1" in sized.to_yaml().partition("pools:")[2]
    assert load_config(str(written)).config == sized.config
