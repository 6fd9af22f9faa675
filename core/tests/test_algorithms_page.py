"""docs/algorithms.md lists the algorithms that there are, with their defaults, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from rlctl.algorithms.calling import call_advantages, call_policy_loss
from rlctl.algorithms.lookup import builtin
from rlctl.algorithms.table import ADVANTAGES, POLICY_LOSSES
from rlctl.config.schema import RunConfig
from rlctl.records import AlgorithmKind
from rlctl.trainers.algorithms import find_algorithms

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
pytestmark = pytest.mark.skipif(
    not PAGE.is_file(), reason="the pages are not here: an installed core without its source tree"
)


def test_the_page_lists_every_algorithm() -> None:
    tables: dict[str, list[tuple[str, str, str]]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith(("| `algorithm.", "| `actor.")):
            rows = tables.setdefault(cells[0].strip("`"), [])
        elif line.startswith("| `"):
            assert len(cells) == 4, line
            assert cells[3], line
            rows.append((cells[0].strip("`"), cells[1], cells[2]))
    assert tables == {
        "algorithm.adv_estimator": [(s.name, s.summary, s.paper) for s in ADVANTAGES.values()],
        "actor.policy_loss.loss_mode": [(s.name, s.summary, s.paper) for s in POLICY_LOSSES.values()],
    }


def test_the_page_says_the_defaults_of_the_bounds() -> None:
    text = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))
    sentence = text.partition("Defaults of `clip_ratio_low` and `clip_ratio_high`:")[2].partition(
        "(of the divergence)"
    )[0]
    said: dict[str, tuple[float, float]] = {}
    for names, low, high in re.findall(r"((?:\w+(?:, )?)+?) (\d[\d.]*), (\d[\d.]*)", sentence):
        said |= dict.fromkeys(re.findall(r"[a-z]\w+", names.removeprefix("and ")), (float(low), float(high)))
    wanted = {}
    for name, spec in POLICY_LOSSES.items():
        if "clip_ratio_low" in spec.settings:
            found = builtin(AlgorithmKind.POLICY_LOSS, name).parameters()
            wanted[name] = (found["clip_ratio_low"].default, found["clip_ratio_high"].default)
    assert said == wanted


def test_the_example_of_ones_own_runs(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Your own")[2]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    settings = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert settings is not None
    assert len(code[1].splitlines()) <= 20
    own = tmp_path / "own.py"
    own.write_text(code[1])
    values = yaml.safe_load(settings[1].replace("own.py", str(own)))
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"task": {"name": "sum"}}, **values})
    found = find_algorithms(config, None)
    rows, mask = torch.tensor([0, 1, 2, 3]), torch.ones(4, dtype=torch.bool)
    inputs = {"scores": torch.tensor([0.0, 2.0, 1.0, 5.0]).double(), "groups": torch.tensor([0, 0, 0, 1])}
    advantages = call_advantages(found[AlgorithmKind.ADVANTAGE], config.algorithm, inputs, rows, mask)["advantages"]
    assert advantages.tolist() == [-1.0, 1.0, 0.0, 0.0]
    old = torch.full((4,), -1.0)
    offered = {"log_probs": old + 0.5, "old_log_probs": old, "advantages": advantages}
    out = call_policy_loss(found[AlgorithmKind.POLICY_LOSS], config.actor.policy_loss, offered, 4)
    torch.testing.assert_close(out.loss, 0.5 * advantages + 0.25)


def test_the_example_of_dapo_is_a_configuration() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## DAPO\n")[2].partition("\n## ")[0]
    settings = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert settings is not None
    base = {"model": {"path": "m"}, "data": {"task": {"name": "sum"}}}
    config = RunConfig.model_validate({**base, **yaml.safe_load(settings[1])})
    assert config.algorithm.filter_groups is not None
    assert config.reward.overlong_buffer is not None
    assert config.actor.policy_loss.clip_ratio_high == 0.28
