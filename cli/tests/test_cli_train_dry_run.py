"""`rlctl train --dry-run`: functions of one's own are loaded and tried, as a run does before it loads a model."""

from __future__ import annotations

import json
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


def test_pairs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What a run would refuse of its rows: which columns they have, and that they are fewer than a batch."""
    pytest.importorskip("rlctl_fsdp")
    monkeypatch.chdir(tmp_path)
    row = {"question": "2+2=", "good": "4", "bad": "5"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "good": str(i)}) + "\n" for i in range(6, 9)))
    named = ["data.columns.chosen=good", "data.columns.rejected=bad"]
    cases = {
        "no column of chosen responses": ["data.train_batch_size=2"],
        "data.train_batch_size": [*named, "data.train_batch_size=4"],
        "is complete: nothing was started": [*named, "data.train_batch_size=3"],
    }
    for kind in ("dpo", "rm"):
        for words, overrides in cases.items():
            with pytest.raises(SystemExit) as caught:
                main(["train", kind, "--data", "rows.jsonl", *overrides, "--dry-run"])
            error = capsys.readouterr().err
            assert words in error
            assert "Traceback" not in error
            assert caught.value.code == (0 if "complete" in words else 1), error
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
