"""docs/plan.md against the plan's JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlctl.config.schema import RunConfig
from rlctl.evidence import EvidenceBook
from rlctl.plan.planner import make_plan
from rlctl.plan.report import plan_to_json
from rlctl.plan.request import Request
from rlctl.plan.shapes import FAMILIES
from rlctl.plugins import PluginSet

PAGE = (Path(__file__).parents[1] / "docs" / "plan.md").read_text(encoding="utf-8")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def planned(**sections: Any) -> dict[str, Any]:
    values = {
        "model": {"config": LLAMA, "tokenizer": "unused"},
        "data": {"task": {"name": "sort_digits"}},
        "runtime": {"nproc": 2},
        **sections,
    }
    request = Request(RunConfig.model_validate(values), "x", (), (), "cpu", None, "a test")
    return plan_to_json(make_plan(request, PluginSet(), EvidenceBook()), 80.0)


def rows() -> dict[str, str]:
    """First column of the JSON table -> second."""
    table = PAGE.partition("## JSON")[2]
    return {m[1]: m[2] for m in re.finditer(r"^\| (`.+?`) \| (.+) \|$", table, re.MULTILINE)}


def names_in(text: str) -> list[str]:
    """The keys in ``{a, b: [...], c}``, those inside inner brackets left out."""
    inside = text[text.index("{") + 1 : text.rindex("}")]
    while "[" in inside:
        inside, found = re.subn(r"(: )?\[[^\[\]]*\]", "", inside)
        assert found, text
    return inside.split(", ")


def test_every_key_is_documented() -> None:
    data, documented = planned(), rows()
    top = [name for column in documented for name in re.findall(r"`([a-z_]+)`", column)]
    assert sorted(top) == sorted(data)
    for key, found in (
        ("`model`", data["model"]),
        ("`memory`", data["memory"]),
        ("`memory.checkpointing`", data["memory"]["checkpointing"]),
        ("`memory.pools`", data["memory"]["pools"][0]),
        ("`roles`", data["roles"][0]),
        ("`roles[].groups`", data["roles"][0]["groups"][0]),
        ("`roles[].ranks`", data["roles"][0]["ranks"][0]),
        ("`batch`", data["batch"][0]),
        ("`backends`", data["backends"][0]),
    ):
        assert names_in(documented[key]) == list(found), key
    phase = data["memory"]["pools"][0]["phases"][0]
    assert "phases: [{phase, bytes, items: [{name, role, bytes, formula}]}]" in documented["`memory.pools`"]
    assert (list(phase), list(phase["items"][0])) == (["phase", "bytes", "items"], ["name", "role", "bytes", "formula"])


def test_every_line_of_the_batch_is_documented() -> None:
    text = PAGE.partition("Keys of `batch`")[2]
    documented = set(re.findall(r"`([a-z_]+)`", text))
    warm = {"steps": 1}
    keys: set[str] = set()
    critic = {"algorithm": {"adv_estimator": "gae"}, "critic": {}}
    rows = {"actor": {"micro_batch_size_per_device": 4}}
    for more in ({}, {"warm_start": warm}, {"trainer": {"type": "sft"}}, rows, critic):
        keys |= {line["key"] for line in planned(**more)["batch"]}
    assert documented == keys


def test_the_families_that_are_counted_are_named() -> None:
    words = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE",
             "mixtral": "Mixtral", "gemma3_text": "Gemma 3", "gpt_neox": "GPT-NeoX"}  # fmt: skip
    assert set(words) == set(FAMILIES)
    assert all(word in PAGE for word in words.values())
