"""The planner's memory model against live bytes of the real engines, as torch counts them, within 15 %.

Every prediction comes from a configuration, as the command makes it; only rows of one length stand for the planner's rows of
any length.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes

from rlctl.algorithms.losses import CrossEntropyLoss, PolicyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.catalogue_memory import rollout_policy, train_policy
from rlctl.config.schema import RunConfig
from rlctl.engine import Engine
from rlctl.generation import GenerateRequest, SamplingParams
from rlctl.microbatch import MicroBatchPlan
from rlctl.parts import reader
from rlctl.plan.activations import Precision
from rlctl.plan.adapters import AdapterMemory, count_adapters
from rlctl.plan.engine_memory import engine_load, engine_setting
from rlctl.plan.generation import RolloutMemory
from rlctl.plan.parameters import count_parameters
from rlctl.plan.shapes import ModelShape, model_shape
from rlctl.plan.training import TrainMemory
from rlctl.records import BackendKind
from rlctl.topology import Topology
from rlctl_fsdp import place
from rlctl_fsdp.engine import FSDPEngine
from rlctl_fsdp.rollout import HFRollout
from rlctl_fsdp.runners import StaticRunner

WITHIN = 0.15
_IDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
_BASE = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8, **_IDS,
}  # fmt: skip
_GQA = {**_BASE, "num_key_value_heads": 4, "head_dim": 16}
_WIDE = {**_GQA, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_GQA},
    "llama-vocabulary": {"model_type": "llama", **_GQA, "vocab_size": 16384},
    "llama-weights": {"model_type": "llama", **_WIDE},
    "qwen3": {"model_type": "qwen3", **_GQA},
    "qwen3-tied": {"model_type": "qwen3", **_GQA, "vocab_size": 8192, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text", **_GQA, "pad_token_id": 0, "sliding_window": 64, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "gpt-neox": {"model_type": "gpt_neox", **_BASE},
    "qwen3-moe": {
        "model_type": "qwen3_moe", **_GQA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
    },
    "mixtral": {
        "model_type": "mixtral", **_BASE, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One engine and one rank's batch: ``rows`` rows of ``length`` tokens, ``micro`` micro-batches an optimizer step."""

    model: str
    rows: int = 4
    length: int = 256
    micro: int = 1
    dtype: str = "float32"
    rl: bool = False
    shards: int = 1
    replicas: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None

    def __str__(self) -> str:
        settings = [f"{k}={v}" for k, v in self.engine.items()] + [self.dtype] * (self.dtype != "float32")
        sizes = [f"{self.rows}x{self.length}", f"{self.micro}micro", f"{self.replicas}x{self.shards}"]
        return "-".join([self.model, *sizes, *settings, *["rl"] * self.rl, *["lora"] * (self.lora is not None)])

    def config(self) -> RunConfig:
        rl = self.rl
        return RunConfig.model_validate(
            {
                "model": {"config": MODELS[self.model], "tokenizer": "unused", "dtype": self.dtype, "lora": self.lora},
                "data": {
                    "task": {"name": "sort_digits"},
                    "train_batch_size": self.rows * self.topology.dp_size // (2 if rl else 1),
                    "max_prompt_length": 1,
                    "max_response_length": self.length - 1,
                },
                "actor": {"engine": self.engine, "micro_batch_size_per_device": self.rows // self.micro},
                "rollout": {"n": 2, "temperature": 0.7},
                "trainer": {"type": "rl" if rl else "sft"},
            }
        )

    @property
    def topology(self) -> Topology:
        ranks = self.shards * self.replicas
        return Topology(world_size=ranks, dp_shard=self.shards, dp_replicate=self.replicas)

    def batch(self) -> PackedBatch:
        vocab = int(MODELS[self.model]["vocab_size"])
        rows = list(torch.randint(2, vocab, (self.rows, self.length), generator=torch.Generator().manual_seed(0)))
        mask = [[False] + [True] * (self.length - 1)] * self.rows
        batch = pack({"input_ids": rows, "loss_mask": mask}, meta={"temperature": 0.7} if self.rl else {})
        return batch.with_items(advantages=torch.ones(batch.num_items)) if self.rl else batch


def predict(case: Case) -> TrainMemory:
    config = case.config()
    shape = shape_of(case.model)
    precision, setting = engine_setting(train_policy("fsdp2"), case.engine, case.topology, config, "cpu", shape)
    load = replace(engine_load(config.actor, case.topology, config), ragged=False)
    assert load.micro_batches == case.micro
    common = ("actor", shape, count_parameters(shape), precision, setting, load)
    if config.model.lora is not None:
        return AdapterMemory(*common, count_adapters(shape, config.model.lora))
    return TrainMemory(*common)


def shape_of(model: str) -> ModelShape:
    shape = model_shape(MODELS[model])
    assert shape is not None
    return shape


def peak_of(memory: TrainMemory) -> int:
    return max(moment.num_bytes for moment in memory.moments())


_measured: dict[str, LiveBytes] = {}


def measure(case: Case) -> LiveBytes:
    """Live bytes during the second training step, when the optimizer's state exists. Each case is run once."""
    if str(case) not in _measured:
        _measured[str(case)] = _measure(case)
    return _measured[str(case)]


def _measure(case: Case) -> LiveBytes:
    provider = FSDPEngine()
    engine = Engine(provider, BackendKind.TRAIN, "fsdp2")
    config = case.config()
    model = {**config.model.model_dump(), "seed": 0}
    engine.build(case.topology, {"device": "cpu", **case.engine}, model, {"lr": 1e-3})
    loss = PolicyLoss(config.actor) if case.rl else CrossEntropyLoss()
    batch, plan = case.batch(), MicroBatchPlan(max_rows=case.rows // case.micro)
    engine.train_batch(batch, loss, plan)
    gc.collect()
    live = LiveBytes()
    assert provider._root is not None
    assert provider._stepper is not None
    live.hold("weights", provider._root.parameters())
    state = provider._stepper.optimizer.state.values()
    live.hold("optimizer", (value for s in state for name, value in s.items() if name != "step"))
    with live:
        engine.train_batch(batch, loss, plan)
    engine.shutdown()
    return live


CK = {"activation_checkpointing": True}
ALONE = [
    Case("llama"),
    Case("llama", engine=CK),
    Case("llama", dtype="bfloat16"),
    Case("llama", engine={"param_dtype": "bfloat16"}),
    Case("llama", engine={"param_dtype": "bfloat16", **CK}),
    Case("llama", micro=2),
    Case("llama-vocabulary", rows=2),
    Case("llama-vocabulary", rows=2, rl=True),
    Case("llama-vocabulary", rows=2, dtype="bfloat16", rl=True),
    Case("llama-vocabulary", engine={"logits_budget_mib": 8}),
    Case("llama-vocabulary", rows=2, engine={"logits_budget_mib": 8, "param_dtype": "bfloat16"}, rl=True),
    Case("llama-weights", rows=2, length=24),
    Case("llama-weights", rows=2, length=24, engine=CK),
    Case("llama-weights", rows=2, length=24, micro=2),
    Case("qwen3", engine={"param_dtype": "bfloat16"}),
    Case("qwen3-tied", rows=2, length=64),
    Case("gemma3"),
    Case("gpt-neox"),
    Case("gpt-neox", engine={"param_dtype": "bfloat16", **CK}),
    Case("qwen3-moe"),
    Case("qwen3-moe", engine={"param_dtype": "bfloat16"}),
    Case("mixtral", engine=CK),
    Case("llama", lora={"rank": 8}),
    Case("llama-vocabulary", rows=2, lora={"rank": 8}, rl=True),
    Case("llama-weights", rows=2, length=24, lora={"rank": 8}, micro=2),
    Case("qwen3-tied", rows=2, length=64, dtype="bfloat16", lora={"rank": 8}),
    Case("gpt-neox", lora={"rank": 8}),
]
SHARDED = [
    Case("llama", shards=4),
    Case("llama", shards=4, engine=CK),
    Case("llama", shards=4, engine={"param_dtype": "bfloat16"}),
    Case("llama-vocabulary", rows=2, shards=4, rl=True),
    Case("llama-weights", rows=2, length=24, shards=4),
    Case("llama-weights", rows=2, length=24, shards=4, engine={"param_dtype": "bfloat16"}),
    Case("llama-weights", rows=2, length=24, shards=4, micro=2),
    Case("llama-weights", rows=2, length=24, shards=4, engine={"reshard_after_forward": False}),
    Case("qwen3-tied", rows=2, length=24, shards=4),
    Case("qwen3-moe", shards=4, engine=CK),
    Case("llama-weights", rows=2, length=24, shards=4, lora={"rank": 8}),
    Case("llama", shards=2, replicas=2, lora={"rank": 8}, engine=CK),
    Case("llama", shards=2, replicas=2),
    Case("llama-weights", rows=2, length=24, replicas=4, engine=CK),
]


def compare(case: Case) -> None:
    live, memory = measure(case), predict(case)
    moments = memory.moments()
    best = max(moments, key=lambda moment: moment.num_bytes)
    assert live.peak == pytest.approx(best.num_bytes, rel=WITHIN), (best.name, [(m.name, m.num_bytes) for m in moments])
    # Weights and moments are no estimate. (Shards are padded to equal sizes.)
    padding = 0.0 if case.shards == 1 else 0.01
    for item in (memory.state.weights(), memory.state.optimizer()):
        assert live.at_peak[item.name] == pytest.approx(item.num_bytes, rel=padding)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_the_peak_of_one_rank(case: Case) -> None:
    compare(case)


def test_frozen_experts_are_counted_as_trained_ones() -> None:
    """An upper bound: they keep less for a backward pass that makes no gradients of theirs."""
    case = Case("qwen3-moe", lora={"rank": 8}, engine=CK)
    assert 1.0 < peak_of(predict(case)) / measure(case).peak < 1.3


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[None]:
    """A process group of four ranks of which only this one exists: collectives do nothing, memory is all there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    place._grid.cache_clear()
    dist.destroy_process_group()


@pytest.mark.parametrize("case", SHARDED, ids=str)
@pytest.mark.usefixtures("four_ranks")
def test_the_peak_of_one_rank_of_four(case: Case) -> None:
    compare(case)


def _forget(**changes: Any) -> Callable[[TrainMemory], TrainMemory]:
    """The same engine, planned with a mistake in its settings."""

    def apply(m: TrainMemory) -> TrainMemory:
        setting = replace(m.s, **{k: v for k, v in changes.items() if k in vars(m.s)})
        load = replace(m.load, **{k: v for k, v in changes.items() if k in vars(m.load)})
        precision = replace(m.p, **{k: v for k, v in changes.items() if k in vars(m.p)})
        assert (setting, load, precision) != (m.s, m.load, m.p), "the mistake changes something"
        return TrainMemory("actor", m.shape, m.count, precision, setting, load)

    return apply


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        (Case("llama", engine=CK), _forget(checkpointing=False)),
        (Case("llama"), _forget(checkpointing=True)),
        (Case("llama-vocabulary", rows=2), _forget(scored=1)),
        (Case("llama-vocabulary", engine={"logits_budget_mib": 8}), _forget(logits_budget=1 << 30)),
        (Case("llama-weights", rows=2, length=24), _forget(moments=False)),
        (Case("llama", engine={"param_dtype": "bfloat16"}), _forget(compute="float32", autocast=False)),
        (Case("llama-weights", rows=2, length=24), _forget(shards=4)),
        (Case("llama-weights", rows=2, length=24), _forget(wrapped=True, micro_batches=2)),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
def test_a_mistaken_model_is_caught(case: Case, mistake: Callable[[TrainMemory], TrainMemory]) -> None:
    peak, memory = measure(case).peak, predict(case)
    assert peak == pytest.approx(peak_of(memory), rel=WITHIN)
    assert peak != pytest.approx(peak_of(mistake(memory)), rel=WITHIN)


def test_gradients_are_as_planned() -> None:
    case = Case("qwen3-tied", rows=2, length=16)
    engine = Engine(FSDPEngine(), BackendKind.TRAIN, "fsdp2")
    engine.build(case.topology, {"device": "cpu"}, {**case.config().model.model_dump(), "seed": 0}, {"lr": 1e-3})
    batch = case.batch()
    batch = batch.with_items(item_weight=torch.ones(batch.num_items))
    engine.set_mode(True)
    engine.forward_backward([batch], CrossEntropyLoss(), forward_only=False)
    grads = [p.grad for p in engine.local_module().parameters()]
    assert all(g is not None for g in grads)
    assert (
        sum(g.untyped_storage().nbytes() for g in grads if g is not None) == predict(case).state.gradients().num_bytes
    )
    engine.shutdown()


# ---- generation -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rollout:
    """One request: ``prompts`` prompts of ``prompt`` tokens, ``n`` samples of ``response`` tokens each."""

    model: str
    prompts: int
    prompt: int
    n: int
    response: int
    dtype: str = "float32"

    def config(self) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": {"config": MODELS[self.model], "tokenizer": "unused", "dtype": self.dtype},
                "data": {
                    "task": {"name": "sort_digits"}, "train_batch_size": self.prompts, "val_batch_size": 1,
                    "max_prompt_length": self.prompt, "max_response_length": self.response,
                },
                "rollout": {"n": self.n},
            }
        )  # fmt: skip

    def memory(self) -> RolloutMemory:
        shape = shape_of(self.model)
        return RolloutMemory(
            shape, count_parameters(shape).total, self.config(), rollout_policy("hf"),
            {"max_batch_rows": 512, "max_batch_tokens": 65536}, 1, 1, True, "cpu", Precision(self.dtype, self.dtype),
        )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        Rollout("llama", 8, 64, 4, 40),
        Rollout("llama", 8, 16, 4, 48, dtype="bfloat16"),
        Rollout("llama", 4, 512, 4, 32),
        Rollout("llama-vocabulary", 8, 16, 4, 16),
        Rollout("llama", 16, 128, 2, 40),
    ],
    ids=lambda c: f"{c.model}-{c.prompts}x{c.prompt}-n{c.n}-{c.response}-{c.dtype}",
)
def test_the_peak_of_generation(case: Rollout) -> None:
    engine = Engine(HFRollout(), BackendKind.ROLLOUT, "hf")
    model = {**case.config().model.model_dump(), "tokenizer": None, "seed": 0}
    engine.build(Topology(), {"device": "cpu"}, model, None, True)
    trainer = Engine(FSDPEngine(), BackendKind.TRAIN, "fsdp2")
    trainer.build(Topology(), {"device": "cpu"}, model, None, True)
    module = trainer.local_module()
    engine.attach_module(module, 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 500, (case.prompts, case.prompt), generator=generator).tolist()
    few = SamplingParams(n=1, max_tokens=2, seed=1, ignore_eos=True)
    engine.generate(GenerateRequest(ids[:1], few))  # the engine's own probe runs in the first call
    gc.collect()
    live = LiveBytes()
    live.hold("weights", module.parameters())
    params = SamplingParams(n=case.n, max_tokens=case.response, temperature=0.7, seed=1, ignore_eos=True)
    with live:
        engine.generate(GenerateRequest(ids, params))
    memory = case.memory()
    cache, prefill, logits = memory.cache(), memory.prefill(), memory.logits()
    assert cache is not None
    assert prefill is not None
    assert logits is not None
    planned = live.at_peak["weights"] + cache.num_bytes + max(prefill.num_bytes, logits.num_bytes)
    assert live.peak == pytest.approx(planned, rel=WITHIN), (cache, prefill, logits)
    engine.shutdown()
    trainer.shutdown()


# ---- what the model takes from the engine ---------------------------------------------------------------------------------
def test_constants_are_the_engine_s_own() -> None:
    case = Case("llama-vocabulary", rows=64, length=64)
    assert predict(case).head.rows == reader.chunk_rows(16384, "cpu")
    shape = shape_of(case.model)
    _, setting = engine_setting(train_policy("fsdp2"), {}, case.topology, case.config(), "cuda", shape)
    large = replace(predict(case).head, setting=setting, load=replace(predict(case).load, scored=10**6))
    assert large.rows == reader.chunk_rows(16384, "cuda")
    assert rollout_policy("hf").prefill_tokens == StaticRunner.prefill_tokens
