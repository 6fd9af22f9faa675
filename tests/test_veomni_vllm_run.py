"""GRPO whose backends cannot share an environment: veomni trains in the controller's, vLLM generates in its own.

After every sync the weights are exported as they are, and what vLLM says greedily must be what Hugging Face's plain model says of
the export.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

if importlib.util.find_spec("veomni") is None:  # not imported here: it would log all it does
    pytest.skip("veomni is not installed (it has an environment of its own)", allow_module_level=True)
if not (Path(__file__).parents[1] / ".venvs" / "vllm" / "bin" / "python").exists():
    pytest.skip("there is no .venvs/vllm (make test-vllm makes it)", allow_module_level=True)

import torch
from transformers import AutoModelForCausalLM

from rlctl.config.load import load_config
from rlctl.generation import Completion, GenerateRequest, SamplingParams
from rlctl.plugins import load_plugins
from rlctl.roles.rollout import RolloutRole
from rlctl.runtime.remote import RemoteEngine
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner

pytestmark = pytest.mark.slow

VLLM = Path(__file__).parents[1] / ".venvs" / "vllm"
STEPS = 2
SETTINGS = [
    "actor.backend=veomni",
    "rollout.backend=vllm",
    f"rollout.python={VLLM}",
    "rollout.engine.kv_cache_mib=64",
    "rollout.engine.max_num_seqs=64",
    "rollout.n=4",
    "data.train_batch_size=4",
    "data.task.val_size=4",
    "data.task.train_size=64",
    "data.task.args={length: 3}",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "warm_start=null",
    # Large steps, so that stale weights would be seen.
    "actor.optim.lr=0.003",
    "actor.entropy_coeff=0.1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.save_best=false",
    "trainer.logger=[jsonl]",
    "trainer.num_threads=1",
]
PROMPTS = [[(i * 7 + j * 3) % 44 + 3 for j in range(3 + 2 * i)] for i in range(6)]
TOKENS = 12


def test_a_policy_trained_by_veomni_is_the_one_that_vllm_serves(tmp_path: Path) -> None:
    plugins = load_plugins()
    assert "vllm" not in {record.spec.name for record in plugins.backends()}, "it is in its own environment alone"
    resolved = load_config("quickstart", SETTINGS, plugins=plugins)
    synced: list[tuple[Path, list[Completion]]] = []
    sync = RolloutRole.sync

    def and_look(self: RolloutRole, source: RemoteEngine, *rest: Any) -> Any:
        report = sync(self, source, *rest)
        dest = tmp_path / f"sync_{len(synced)}"
        source.export_directory(dest, resolved.config.model)
        greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        synced.append((dest, self.engine.generate(GenerateRequest(PROMPTS, greedy))))
        return report

    with patch.object(RolloutRole, "sync", and_look):
        run = Runner(resolved, plugins, NullReporter(), run_dir=tmp_path / "run").execute()

    assert len(run.history) == STEPS
    gaps = [m["training/rollout_probs_diff_mean"] for m in run.history]
    assert all(0 <= gap < 1e-4 for gap in gaps), gaps
    assert all(m["actor/grad_norm"] > 0 and m["sync/bytes"] > 0 for m in run.history)
    assert len(synced) > STEPS, "before the first step, and after each"
    said = [hugging_face_agrees(*one) for one in synced]
    print(f"gaps {gaps}, greedy tokens equal {said} of {len(PROMPTS) * TOKENS}")
    assert said == [len(PROMPTS) * TOKENS] * len(synced)
    weights = [(folder / "model.safetensors").read_bytes() for folder, _ in synced]
    assert len(set(weights[: STEPS + 1])) == STEPS + 1, "each step changes them"

    manifest = json.loads((run.path / "manifest.json").read_text())
    engines, pools = manifest["engines"], manifest["runtime"]["pools"]
    assert (engines["actor"]["backend"], engines["rollout"]["backend"]) == ("veomni", "vllm")
    assert (pools["main"]["python"], pools["rollout"]["python"]) == (sys.executable, str(VLLM / "bin" / "python"))
    versions = [pools[name]["versions"]["transformers"] for name in ("main", "rollout")]
    assert versions[0] != versions[1], "which is why they have an environment each"


def hugging_face_agrees(export: Path, completions: list[Completion]) -> int:
    """How many greedy tokens are those of the plain model."""
    module = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    assert sorted(c.prompt_index for c in completions) == list(range(len(PROMPTS)))
    equal = 0
    for completion in completions:
        prompt = PROMPTS[completion.prompt_index]
        assert len(completion.token_ids) == TOKENS
        with torch.no_grad():
            logits = module(torch.tensor([[*prompt, *completion.token_ids]])).logits[0]
        best = logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
        equal += sum(a == b for a, b in zip(best, completion.token_ids, strict=True))
    return equal
