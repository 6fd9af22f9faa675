"""Three hundred broken configurations: never a traceback, always a place and a remedy, nothing written or lost."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rlctl.config.load import load_config
from rlctl.config.migrate import migrate
from rlctl.config.problems import InvalidConfigError
from rlctl.config.schema_paths import walk
from rlctl.config.yaml_dump import dump
from rlctl.config.yaml_source import read
from rlctl.errors import RlctlError
from rlctl.plugins import PluginSet

VALID: dict[str, Any] = {
    "model": {"path": "org/tiny", "dtype": "bfloat16"},
    "data": {
        "train_files": ["rows.jsonl"],
        "train_batch_size": 8,
        "columns": {"prompt": "question"},
        "prompt_template": "Q: {prompt}",
    },
    "actor": {
        "backend": "plain",
        "engine": {"kernel": "fast", "inner": {"depth": 2}},
        "parallel": {"dp_shard": -1},
        "optim": {"lr": 1e-5, "betas": [0.9, 0.95], "lr_scheduler_type": "cosine"},
        "policy_loss": {"clip_ratio_low": 0.2},
        "ppo_mini_batch_size": 4,
        "use_kl_loss": True,
    },
    "ref": {"engine": {"param_offload": True}},
    "rollout": {"backend": "sampler", "n": 4, "stop": ["END"], "val_kwargs": {"n": 2}},
    "reward": {"components": [{"name": "exact_match", "weight": 1.0}, {"name": "regex", "args": {"pattern": "a"}}]},
    "trainer": {"seed": 3, "logger": ["jsonl"], "device": "cpu"},
    "warm_start": {"steps": 5},
}

Place = tuple[Any, ...]


def places(tree: Any, loc: Place = ()) -> list[Place]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [p for key, item in items for p in ((*loc, key), *places(item, (*loc, key)))]


PLACES = places(VALID)
KEYS = [p for p in PLACES if isinstance(p[-1], str) and p[:3] != ("reward", "components", 1)]
ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.sampled_from([0, -1, 2**31, 2**63, 10**30, -(2**63), 1e308, -1e308, 1e-320, float("inf"), float("nan")]),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    st.sampled_from(
        ["", " ", "\x00", "é", "数据", "\u202eabc", "😀" * 30, "../..", "~", "~x", "/", "a:b", "x" * 3000, "${data.x}"]
    ),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers() | st.none() | st.text(max_size=3), max_size=3),
    st.just([[[{}]]]),
)


def parent(tree: Any, loc: Place) -> Any:
    for part in loc[:-1]:
        tree = tree[part]
    return tree


@st.composite
def misspelt(draw: st.DrawFn) -> tuple[str, bytes]:
    """A key with a letter dropped, doubled, swapped or in another case: must be refused, whatever it was."""
    tree = copy.deepcopy(VALID)
    loc = draw(st.sampled_from([p for p in KEYS if len(str(p[-1])) > 3]))
    key, holder = loc[-1], parent(tree, loc)
    at = draw(st.integers(1, len(key) - 2))
    new = draw(
        st.sampled_from(
            [key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:], key + "s", key.upper(), "ü" + key, key + "\u200b"]
        )
    )
    items = [(new if k == key else k, v) for k, v in holder.items()]
    holder.clear()
    holder.update(items)
    return "misspelt", dump(tree).encode()


@st.composite
def wrong_value(draw: st.DrawFn) -> tuple[str, bytes]:
    tree = copy.deepcopy(VALID)
    for loc in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
        try:
            parent(tree, loc)[loc[-1]] = draw(ODD_VALUES)
        except (TypeError, KeyError, IndexError):
            continue  # an earlier change took the section away
    return "wrong value", dump(tree).encode("utf-8", "surrogatepass")


@st.composite
def deleted(draw: st.DrawFn) -> tuple[str, bytes]:
    tree = copy.deepcopy(VALID)
    for loc in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=4, unique=True)):
        try:
            del parent(tree, loc)[loc[-1]]
        except (TypeError, KeyError, IndexError):
            continue
    return "deleted", dump(tree).encode()


@st.composite
def moved(draw: st.DrawFn) -> tuple[str, bytes]:
    """A section or key under another one."""
    tree = copy.deepcopy(VALID)
    source, target = (
        draw(st.sampled_from(KEYS)),
        draw(st.sampled_from([p for p in KEYS if isinstance(parent(VALID, p), dict)])),
    )
    value = copy.deepcopy(parent(VALID, source)[source[-1]])
    parent(tree, target)[source[-1]] = value
    return "moved", dump(tree).encode()


@st.composite
def broken_text(draw: st.DrawFn) -> tuple[str, bytes]:
    """Bytes put into, or cut out of, the text."""
    raw = dump(VALID).encode()
    at = draw(st.integers(0, len(raw)))
    piece = draw(
        st.sampled_from(
            [b"\t", b"\n\t", b"{", b"]", b": ", b"- ", b"'", b'"', b"&a ", b"*a ", b"!!set ", b"!!python/name:os.system ",
             b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\x00", b"\x1b", b"\n---\n", b"\n...\n", b"%YAML 9.9\n", b"<<: ", b"? ",
             b"|", b">", b"@", b"`", b"#", b"\r", b"\xc2\x85", b"\xe2\x80\xa8", b'"\\ud800"', b'"\\Uffffffff"', b"0x" + b"f" * 5000]
        )
        | st.binary(min_size=1, max_size=4)
    )  # fmt: skip
    end = at + draw(st.integers(0, 30))
    return "broken text", raw[:at] + piece + raw[end if draw(st.booleans()) else at :]


@st.composite
def duplicated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A line of the text twice: a key twice, an item twice, or broken nesting."""
    lines = dump(VALID).splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    return "duplicated", "\n".join([*lines[: at + 1], *lines[at:]]).encode()


LEVELS = "".join(f"{c}: &{c} [{','.join([f'*{p}'] * 8)}]\n" for p, c in ("ab", "bc", "cd", "de", "ef"))
WHOLE = st.sampled_from(
    [
        *(
            b"",
            b"\n",
            b"#\n",
            b"null\n",
            b"[]\n",
            b"{}\n",
            b"5\n",
            b"text\n",
            b"model:\n",
            b"model: {path: x}\n",
            b"\xff\xfe",
        ),
        b"\x00" * 10,
        "model: {path: x}\ndata: {train_files: [rows.jsonl]}\n".encode("utf-16"),
        "modèle: é\n".encode("latin-1"),
        b"a: &a [x,x,x,x,x,x,x,x]\n" + LEVELS.encode(),
        *(b"a: &a {b: *a}\n", b"&a [*a]\n", b"<<: &a {<<: *a}\n"),
        *(b"[" * 3000, b"{a: " * 3000, b"- " * 3000, b"? " * 500),
        b"a: 1\n" * 5_000,
        b"x: '" + b"y" * 600_000 + b"'\n",
        b"model: {path: " + b"p" * 20_000 + b"}\n",
    ]
).map(lambda raw: ("whole file", raw))

CONFIGS = misspelt() | wrong_value() | deleted() | moved() | broken_text() | duplicated() | WHOLE
OVERRIDE_KEYS = [
    *("actor.optim.lr", "rollout.n", "reward.components[0].name", "reward.components.7", "model", "data.train_files"),
    *("actor.engine.kernel", "a..b", "x", "[1]", "'a.b'.c", "warm_start.optim.lr", "model.config.a.b"),
]
OVERRIDES = st.lists(
    st.builds(
        "{}{}{}".format,
        st.sampled_from([*OVERRIDE_KEYS, ""]),
        st.sampled_from(["=", "=", "=", "", "==", "+="]),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
        | st.sampled_from(["[", "{a: ", "*a", "\udcff", "1e-6", "null", "[a, b]"]),
    ),
    max_size=2,
)


def check_refusal(error: RlctlError, path: Path) -> None:
    """A refusal is ours, says where and what to do, and no word of a library."""
    text = str(error)
    assert error.next, text
    if isinstance(error, InvalidConfigError):
        assert error.problems
        for problem in error.problems:
            assert problem.path or re.search(r":\d+$|^override|^flag", problem.origin), problem
            assert problem.origin, problem
            assert problem.what or (problem.found and problem.wanted), problem
            assert problem.hint or problem.wanted, problem
            assert "\n" not in str(problem), problem
            assert len(str(problem)) < 1500, problem
    else:
        assert str(path) in text or "backend" in text, text
    lowered = text.lower()
    for word in (
        "pydantic",
        "input should",
        "errors.",
        "traceback",
        "value_error",
        "branch",
        "valid dictionary",
        "object at 0x",
    ):
        assert word not in lowered, text


def snapshot(directory: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in sorted(directory.rglob("*"))
    }


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_configuration_that_is_broken_below_is_valid(workplace: Path, plugins: PluginSet) -> None:
    (workplace / "run.yaml").write_text(dump(VALID))
    assert load_config("run.yaml", plugins=plugins).config.actor.ppo_mini_batch_size == 4


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(CONFIGS, OVERRIDES)
def test_three_hundred_broken_configurations(
    workplace: Path, plugins: PluginSet, config: tuple[str, bytes], overrides: list[str]
) -> None:
    kind, raw = config
    path = workplace / "run.yaml"
    path.write_bytes(raw)
    before = snapshot(workplace)
    try:
        resolved = load_config(str(path), overrides, plugins=plugins)
    except RlctlError as error:
        event(f"{kind}: {type(error).__name__}")
        check_refusal(error, path)
    else:
        event(f"{kind}: taken")
        again = workplace / "again.yaml"
        again.write_text(resolved.to_yaml())
        assert load_config(str(again), plugins=plugins).to_yaml() == resolved.to_yaml()
        again.unlink()
    assert snapshot(workplace) == before
    assert Path.cwd() == workplace


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(misspelt())
def test_a_misspelt_key_is_never_ignored(workplace: Path, plugins: PluginSet, config: tuple[str, bytes]) -> None:
    path = workplace / "run.yaml"
    path.write_bytes(config[1])
    with pytest.raises(RlctlError) as caught:
        load_config(str(path), plugins=plugins)
    assert isinstance(caught.value, InvalidConfigError)
    assert any(problem.what == "unknown key" and problem.hint for problem in caught.value.problems)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(CONFIGS)
def test_broken_files_of_other_projects_do_not_break_migrate(workplace: Path, config: tuple[str, bytes]) -> None:
    path = workplace / "old.yaml"
    path.write_bytes(config[1])
    try:
        result = migrate(read(path, str(path)), str(path))
    except RlctlError as error:
        check_refusal(error, path)
    else:
        assert isinstance(result.to_yaml(), str)
    assert path.read_bytes() == config[1]


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda p: p.symlink_to(p), lambda p: p.symlink_to("/nowhere/x"), lambda p: os.mkfifo(p)]
)
def test_a_path_that_is_no_plain_file(make: Callable[[Path], None], workplace: Path, plugins: PluginSet) -> None:
    path = workplace / "run.yaml"
    make(path)
    if path.is_fifo():
        # A pipe is read as a file would be: `rlctl config show <(...)`.
        import threading

        writer = threading.Thread(target=lambda: path.write_bytes(dump(VALID).encode()))
        writer.start()
        assert load_config(str(path), plugins=plugins).config.model.path == "org/tiny"
        writer.join()
        return
    with pytest.raises(RlctlError) as caught:
        load_config(str(path), plugins=plugins)
    assert str(path) in str(caught.value)
    assert caught.value.next


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(workplace: Path, plugins: PluginSet) -> None:
    path = workplace / "run.yaml"
    path.write_text(dump(VALID))
    path.chmod(0)
    with pytest.raises(RlctlError, match="cannot be read"):
        load_config(str(path), plugins=plugins)


def test_a_working_directory_that_has_gone(
    workplace: Path, plugins: PluginSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workplace / "run.yaml").write_text(dump(VALID))
    gone = workplace / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    shutil.rmtree(gone)
    with pytest.raises(RlctlError, match="working directory is not there"):
        load_config("run.yaml", plugins=plugins)
    monkeypatch.chdir(workplace)


def test_every_key_of_the_schema_survives_every_odd_value(workplace: Path, plugins: PluginSet) -> None:
    """Not random: each key once with each kind of value that has broken something somewhere."""
    path = workplace / "run.yaml"
    odd = [None, -(10**30), "é\n", [{}]]
    for loc, _ in walk():
        if loc[:2] == ("reward", "components") and len(loc) > 2:
            continue
        for value in odd:
            tree = copy.deepcopy(VALID)
            here = tree
            for part in loc[:-1]:
                here = here.setdefault(part, {})
            here[loc[-1]] = value
            path.write_text(dump(tree))
            try:
                load_config(str(path), plugins=plugins)
            except RlctlError as error:
                check_refusal(error, path)
