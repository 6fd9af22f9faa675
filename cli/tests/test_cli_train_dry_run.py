"""`rlctl train --dry-run`: functions of one's own are loaded and tried, as a run does before it loads a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl_cli.main import main

OWN = """
def flat(scores, groups):
    return scores - scores.mean()


def shaped(scores, groups):
    return scores[:1]


def ones(solution_str):
    return 1.0


class Talk:
    def __init__(self, broken=""):
        self.broken = broken

    def reset(self, row):
        self.wanted = row["answer"]

    def step(self, text):
        if self.broken:
            raise ValueError(self.broken)
        return "more", float(text == self.wanted), False
"""
TALK = "rollout.environment={name: own.py:%s}"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.adv_estimator=own.py:flat", ""),
        ("algorithm.adv_estimator=own.py:nope", "nope"),
        ("algorithm.adv_estimator=own.py:shaped", "shaped"),
        ("actor.policy_loss.loss_mode=own.py:nope", "nope"),
        ("reward.components=[{name: own.py:nope}]", "nope"),
        (TALK % "Talk", ""),
        (TALK % "Talc", "Talc"),
        (TALK % "Talk, args: {broken: it is}", "it is"),
    ],
)
def test_functions_of_ones_own_are_tried(
    override: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rlctl_fsdp")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(SystemExit) as caught:
        also = ["reward.components=[{name: environment}]"] if override.startswith("rollout") else []
        main(["train", "quickstart", override, *also, "--dry-run"])
    code = caught.value.code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    if words:
        assert code == 1, error
        assert words in error
        assert "is complete" not in error
    else:
        assert code == 0, error
        assert "is complete: nothing was started" in error
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["own.py"]
