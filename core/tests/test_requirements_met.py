"""Stage 3: PEP 508 strings against installed metadata, with made-up dists."""

from __future__ import annotations

import sys

import pytest

from rlctl.requirements import pip_install, required_dist, unmet_requirements


@pytest.fixture
def installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delenv("RLCTL_ALLOW_VERSIONS", raising=False)

    def add(name: str, version: str) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return add


@pytest.mark.parametrize(
    ("version", "requirement", "met"),
    [
        ("2.11.0", ">=2.11,<2.15", True),
        ("2.13.0+cpu", ">=2.11,<2.15", True),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.11.0a0+5228986c39.nv25.06", ">=2.11,<2.15", True),
        ("2.12.0.dev20260101", ">=2.11", True),
        ("2.10.9", ">=2.11", False),
        ("2.15.0", ">=2.11,<2.15", False),
        ("2.10.0a0+nv", ">=2.11", False),
    ],
)
def test_versions_local_and_vendor_builds(installed, version, requirement, met):
    installed("tinytorch", version)
    unmet = unmet_requirements([f"tinytorch{requirement}"])
    assert (unmet == ()) is met
    if not met:
        assert unmet[0].found == version
        assert unmet[0].problem == f"tinytorch {version} is installed, tinytorch{requirement} is required"


def test_absent_marked_and_unreadable(installed):
    assert [u.problem for u in unmet_requirements(["tinyabsent"])] == [
        "tinyabsent is not installed, tinyabsent is required"
    ]
    assert unmet_requirements(["tinyabsent; sys_platform == 'plan9'"]) == ()
    (unmet,) = unmet_requirements(["not a requirement !!"])
    assert "cannot be read" in unmet.problem


def test_alternatives_need_one(installed):
    text = "tinyvllm>=0.24 | tinyvllm-cpu>=0.24"
    assert len(unmet_requirements([text])) == 1
    assert required_dist(text) is None
    installed("tinyvllm-cpu", "0.20")
    (unmet,) = unmet_requirements([text])
    assert unmet.dist == "tinyvllm-cpu", "the one that is there is the one to speak of"
    installed("tinyvllm", "0.32")
    assert unmet_requirements([text]) == ()
    assert required_dist(text) == "tinyvllm"


def test_people_who_build_their_own_may_say_so(installed, monkeypatch):
    installed("tinytorch", "3.0")
    assert unmet_requirements(["tinytorch<3"])
    monkeypatch.setenv("RLCTL_ALLOW_VERSIONS", "other, TinyTorch")
    assert unmet_requirements(["tinytorch<3"]) == ()
    assert unmet_requirements(["tinyabsent"]), "it must still be there"


def test_commands_are_quoted_for_a_shell():
    assert pip_install("a>=1,<2", "b") == "pip install 'a>=1,<2' b"
