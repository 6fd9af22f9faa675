"""Stages 1 to 3 in this process, with real tiny dists."""

from __future__ import annotations

import os
import sys

import pytest

from rlctl.plugins import PluginEntry, Stage, load_plugins
from rlctl.records import CheckStatus


def entries(*names: str) -> dict[str, PluginEntry]:
    """The entries of the tiny site by name, without the first-party ones."""
    found = {e.name: e for e in load_plugins().entries if e.dist not in ("rlctl", "rlctl-plugin-fsdp")}
    assert set(names) <= set(found)
    return found


def test_sound_plugin_reaches_compatible(here):
    here.add_backend("sound1")
    entry = entries("sound1")["sound1"]
    assert (entry.stage, entry.status, entry.cause, entry.next) == (Stage.COMPATIBLE, CheckStatus.OK, (), "")
    assert (entry.dist, entry.version, entry.target) == ("rlctl-sound1", "1.0", "sound1_light")
    assert [s.name for s in entry.backends] == ["sound1"]
    assert "sound1_engine" not in sys.modules, "stage 3 imports no engine"


BROKEN = {
    "raises": ("raise ImportError('no such thing') from OSError('the disk is gone')", "OSError: the disk is gone"),
    "exits": ("raise SystemExit(3)", "SystemExit: the module called exit(3)"),
    "cancels": ("import asyncio\nraise asyncio.CancelledError('gone')", "CancelledError: gone"),
    "syntax": ("def broken(:\n", "SyntaxError: invalid syntax"),
    "unprintable": (
        "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd()",
        "(its text cannot be printed)",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_light_module_keeps_its_cause_and_costs_the_others_nothing(here, name):
    source, wanted = BROKEN[name]
    here.add(f"rlctl-{name}", name, f"{name}_light", **{f"{name}_light": source})
    here.add_backend("bystander")
    found = entries(name, "bystander")
    assert found["bystander"].status is CheckStatus.OK
    broken = found[name]
    assert (broken.stage, broken.status) == (Stage.DECLARED, CheckStatus.FAIL)
    assert wanted in broken.cause[-1]
    assert f"rlctl-{name}" in broken.next
    assert [r.spec.name for r in load_plugins().backends()] == ["bystander"]


def test_a_failing_plugin_is_said_once_with_its_remedy(here):
    here.add("rlctl-loud", "loud", "loud_light", loud_light="raise RuntimeError('boom')")
    (line,) = load_plugins().warnings()
    assert "'loud' of rlctl-loud 1.0" in line
    assert "RuntimeError: boom" in line
    assert "pip install --upgrade rlctl-loud" in line


def test_ctrl_c_is_let_through(here, monkeypatch):
    here.add("rlctl-ctrlc", "ctrlc", "ctrlc_light", ctrlc_light="raise KeyboardInterrupt")
    monkeypatch.setattr("rlctl.plugins.vetting.vet", lambda candidates: {})
    with pytest.raises(KeyboardInterrupt):
        load_plugins()


def test_prints_while_importing_are_caught_below_python_too(here, capfd):
    source = "import os, subprocess, sys\nprint('one')\nos.write(1, b'two\\n')\nsubprocess.run(['echo', 'three'])\n"
    here.add("rlctl-chatty", "chatty", "chatty_light", chatty_light=source)
    found = entries("chatty")["chatty"]
    assert capfd.readouterr().out == ""
    assert found.status is CheckStatus.WARN
    assert "prints to stdout" in found.cause[0]
    assert "'one' and 2 more lines" in found.cause[0]
    print("still works", end="")
    assert capfd.readouterr().out == "still works"


def test_unknown_hook_and_wrong_argument_are_refused_and_unregistered(here):
    hook = "from rlctl.hookspecs import hookimpl\n\n\n@hookimpl\ndef {}:\n    return []\n"
    here.add("rlctl-hooky", "hooky", "hooky_light", hooky_light=hook.format("rlctl_no_such_hook()"))
    here.add("rlctl-arguy", "arguy", "arguy_light", arguy_light=hook.format("rlctl_prepare_process(nonsense)"))
    here.add_backend("beside")
    found = entries("hooky", "arguy", "beside")
    assert "rlctl_no_such_hook" in found["hooky"].cause[0]
    assert "nonsense" in found["arguy"].cause[0]
    assert found["hooky"].status is found["arguy"].status is CheckStatus.FAIL
    assert found["beside"].status is CheckStatus.OK
    assert load_plugins().records("rlctl_rewards") == []


@pytest.mark.parametrize(
    ("version", "words", "mend"),
    [
        ("(1, 99)", "a newer rlctl", "pip install --upgrade rlctl-core"),
        ("(2, 0)", "a newer rlctl", "pip install --upgrade rlctl-core"),
        ("(0, 1)", "an older rlctl", "pip install --upgrade rlctl-apiv"),
        ("'one'", "no readable api_version", "rlctl-apiv"),
    ],
)
def test_api_versions_that_do_not_fit(here, version, words, mend):
    here.add_backend("apiv", api_version=version)
    entry = entries("apiv")["apiv"]
    assert (entry.stage, entry.status) == (Stage.DECLARED, CheckStatus.FAIL)
    assert words in entry.cause[0]
    assert mend in entry.next


def test_records_of_another_type_are_refused(here):
    hook = "from rlctl.hookspecs import hookimpl\n\n\n@hookimpl\ndef rlctl_backends():\n    return {}\n"
    here.add("rlctl-texty", "texty", "texty_light", texty_light=hook.format("['fsdp2']"))
    here.add("rlctl-bare", "bare", "bare_light", bare_light=hook.format("3"))
    found = entries("texty", "bare")
    assert "returned a str" in found["texty"].cause[0]
    assert "returned int" in found["bare"].cause[0]


def test_unknown_constraint_is_refused_at_declaration(here):
    cell = "(Capability(Axis.TP, Support.SUPPORTED, constraint='heads_divisible_by_tp & moon_is_full'),)"
    here.add_backend("moony", capabilities=cell)
    assert "moon_is_full" in entries("moony")["moony"].cause[0]


def test_unmet_requirements_are_named_with_the_command(here):
    here.add_backend(
        "needy", requirements="('no-such-dist-here>=2', 'pluggy>=99', 'packaging', 'x; python_version < \"3\"')"
    )
    plugins = load_plugins()
    entry = next(e for e in plugins.entries if e.name == "needy")
    assert (entry.stage, entry.status) == (Stage.COMPATIBLE, CheckStatus.FAIL)
    assert "no-such-dist-here is not installed" in entry.cause[0]
    assert "pluggy" in entry.cause[1]
    assert ">=99 is required" in entry.cause[1]
    assert len(entry.cause) == 2
    assert entry.next == "pip install 'no-such-dist-here>=2' 'pluggy>=99'"
    (record,) = plugins.backends()
    assert len(record.problems) == 2


def test_one_name_of_two_dists_names_both(here):
    here.add("rlctl-first", "same", "first_light", first_light="")
    here.add("rlctl-second", "same", "second_light", second_light="")
    found = [e for e in load_plugins().entries if e.name == "same"]
    assert [e.dist for e in found] == ["rlctl-first", "rlctl-second"]
    for entry in found:
        assert (entry.stage, entry.status) == (Stage.DISCOVERED, CheckStatus.FAIL)
        assert "rlctl-first 1.0" in entry.cause[0]
        assert "rlctl-second 1.0" in entry.cause[0]
        assert entry.next == "pip uninstall rlctl-first or pip uninstall rlctl-second"
    assert not {"first_light", "second_light"} & set(sys.modules), "neither may be imported"


def test_leaving_one_of_two_claimants_out_by_dist_name_settles_it(here, monkeypatch):
    here.add("rlctl-keep", "pair", "keep_light", keep_light="")
    here.add("rlctl-drop", "pair", "drop_light", drop_light="")
    monkeypatch.setenv("RLCTL_DISABLE_PLUGINS", "RLCTL_Drop")
    found = {e.dist: e.status for e in load_plugins().entries if e.name == "pair"}
    assert found == {"rlctl-keep": CheckStatus.OK, "rlctl-drop": CheckStatus.SKIP}


def test_one_key_of_two_dists_names_both_and_spares_other_keys(here):
    here.add_backend("alpha", name="'shared'")
    here.add_backend("beta", name="'shared'")
    here.add_backend("gamma", name="'shared'", devices="(('npu', 'huawei'),)")
    records = {r.dist: r for r in load_plugins().backends()}
    for dist in ("rlctl-alpha", "rlctl-beta"):
        (problem,) = records[dist].problems
        assert "('language_model', 'shared', 'cpu', None)" in problem
        assert "rlctl-alpha and rlctl-beta" in problem
        assert records[dist].next == "pip uninstall rlctl-alpha or pip uninstall rlctl-beta"
    assert records["rlctl-gamma"].problems == (), "MindSpeed's case: one name, another device"


def test_stale_entry_point(here):
    here.add("rlctl-ghost", "ghost", "ghost_light.plugin")
    entry = entries("ghost")["ghost"]
    assert (entry.stage, entry.status) == (Stage.DECLARED, CheckStatus.FAIL)
    assert "No module named 'ghost_light'" in entry.cause[0]
    assert "pip install --force-reinstall rlctl-ghost" in entry.next


def test_disabled_plugins_are_not_imported(here, monkeypatch, tmp_path):
    mark = tmp_path / "imported"
    here.add("rlctl-quiet", "quiet", "quiet_light", quiet_light=f"open({str(mark)!r}, 'w')")
    monkeypatch.setenv("RLCTL_DISABLE_PLUGINS", " quiet , other")
    entry = entries("quiet")["quiet"]
    assert (entry.stage, entry.status) == (Stage.DISCOVERED, CheckStatus.SKIP)
    assert not mark.exists()
    monkeypatch.setenv("RLCTL_DISABLE_PLUGINS", "*")
    assert entries("quiet")["quiet"].status is CheckStatus.SKIP
    assert not mark.exists()
    monkeypatch.delenv("RLCTL_DISABLE_PLUGINS")
    assert entries("quiet")["quiet"].status is CheckStatus.OK
    assert mark.exists()


def test_star_keeps_first_party_dists(here, monkeypatch):
    here.add("rlctl-plugin-megatron", "fakemegatron", "fakemega_light", fakemega_light="")
    monkeypatch.setenv("RLCTL_DISABLE_PLUGINS", "*")
    assert entries("fakemegatron")["fakemegatron"].status is CheckStatus.OK


def test_broken_metadata_beside_does_not_matter(here):
    bad = here.path / "rotten-1.0.dist-info"
    bad.mkdir()
    (bad / "METADATA").write_bytes(b"\xff\xfe\x00")
    (bad / "entry_points.txt").write_bytes(b"\xff\xfe\x00[[[")
    here.add_backend("sound2")
    assert entries("sound2")["sound2"].status is CheckStatus.OK


def test_a_dist_without_a_name_is_listed_not_lost(here):
    info = here.path / "nameless-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\n")
    (info / "entry_points.txt").write_text("[rlctl.plugins]\nnameless = nameless_light\n")
    entry = entries("nameless")["nameless"]
    assert entry.status is CheckStatus.FAIL
    assert "nameless dist in" in entry.dist


def test_a_shadowed_older_dist_does_not_count(here, tmp_path, monkeypatch):
    older = tmp_path / "older"
    older.mkdir()
    info = older / "rlctl_twice-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlctl-twice\nVersion: 0.9\n")
    (info / "entry_points.txt").write_text("[rlctl.plugins]\ntwice = gone_light\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(older)])
    here.add_backend("twice")
    entry = entries("twice")["twice"]
    assert (entry.version, entry.status) == ("1.0", CheckStatus.OK)


def test_a_raising_hook_loses_no_other_record(here, caplog):
    reward = "from rlctl.hookspecs import hookimpl\nfrom rlctl.records import RewardSpec\n\n\n@hookimpl\ndef rlctl_rewards():\n    "
    here.add("rlctl-badr", "badr", "badr_light", badr_light=reward + "raise SystemExit('no')\n")
    here.add("rlctl-goodr", "goodr", "goodr_light", goodr_light=reward + "yield RewardSpec('r', 'm:f')\n")
    plugins = load_plugins()
    assert [(d, r.name) for d, r in plugins.records("rlctl_rewards")] == [("rlctl-goodr", "r")]
    assert plugins.records("rlctl_rewards")
    assert len([r for r in caplog.records if "rlctl-badr" in r.getMessage()]) == 1, "said once"


def test_prepare_process_reaches_the_owner_alone(here):
    source = (
        "\nimport os\n\n\n@hookimpl\ndef rlctl_prepare_process(backend, config):\n"
        "    os.environ['TINY_PREPARED'] = os.environ.get('TINY_PREPARED', '') + __name__ + backend + str(config) + ';'\n"
    )
    for name in ("owner", "other"):
        here.add_backend(name)
        with (here.path / f"{name}_light.py").open("a") as file:
            file.write(source)
    plugins = load_plugins()
    os.environ.pop("TINY_PREPARED", None)
    try:
        plugins.prepare_process("owner", {"a": 1})
        assert os.environ["TINY_PREPARED"] == "owner_lightowner{'a': 1};"
    finally:
        os.environ.pop("TINY_PREPARED", None)
