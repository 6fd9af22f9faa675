"""The memory arithmetic that users know, and what changes it. How right it is: tests/test_plan_memory.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlctl.catalogue_memory import MemoryPolicy, rollout_policy, train_policy
from rlctl.config.schema import RunConfig
from rlctl.plan.activations import Precision, layer_saved
from rlctl.plan.budget import MemoryPlan, PoolMemory, _with_value_head
from rlctl.plan.engine_memory import ModelSize, engine_load, engine_setting
from rlctl.plan.generation import RolloutMemory, sync_item
from rlctl.plan.memory import GIB, Item, Load, Moment, Setting, kv_bytes_a_token, state_bytes, tensor_bytes
from rlctl.plan.parameters import count_parameters
from rlctl.plan.shapes import ModelShape, model_shape
from rlctl.plan.training import StateMemory, TrainMemory
from rlctl.topology import Topology, resolve

GB = 10**9
LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def shape(config: dict[str, Any] = LLAMA_8B, **more: Any) -> ModelShape:
    found = model_shape({**config, **more})
    assert found is not None
    return found


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"config": LLAMA_8B, "tokenizer": "unused"},
        "data": {"task": {"name": "sort_digits"}, "max_prompt_length": 1024, "max_response_length": 3072},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return RunConfig.model_validate(base)


# ---- what users know by heart ----------------------------------------------------------------------------------------------
def test_eight_billion_weights_with_adam_are_96_gb_and_12_gb_a_rank_over_8() -> None:
    assert state_bytes(8 * GB, 2, 2, (4, 4)) == 96 * GB
    assert state_bytes(8 * GB, 2, 2, (4, 4), shards=8) == 12 * GB
    policy = MemoryPolicy(
        weights="bfloat16",
        gradients="bfloat16",
        optimizer=(("first Adam moment", "float32"), ("second Adam moment", "float32")),
    )
    for shards, wanted in ((1, 96 * GB), (8, 12 * GB)):
        memory = StateMemory("actor", 8 * GB, 8 * GB, Precision("float32", "bfloat16"), Setting(policy, shards=shards))
        assert sum(i.num_bytes for i in (memory.weights(), memory.gradients(), memory.optimizer())) == wanted


def test_a_tensor_of_2_by_4096_by_4096_in_bf16_is_64_mib() -> None:
    assert tensor_bytes((2, 4096, 4096), "bfloat16") == 64 * 2**20


def test_the_kv_cache_of_an_8b_model_is_128_kib_a_token() -> None:
    assert kv_bytes_a_token(32, 8, 128, "bfloat16") == 128 * 2**10
    assert 8192 * kv_bytes_a_token(32, 8, 128, "bfloat16") == 2**30
    run = config(
        model={"dtype": "bfloat16"}, rollout={"n": 2}, data={"train_batch_size": 1, "max_prompt_length": 2048,
        "max_response_length": 2049, "val_batch_size": 1},
    )  # fmt: skip
    rollout = RolloutMemory(
        shape(), 8 * GB, run, rollout_policy("vllm"), {}, 1, 1, False, "cuda", Precision("bfloat16", "bfloat16")
    )
    cache = rollout.cache()
    assert cache is not None
    assert cache.num_bytes == 2**30  # two rows of 2048 + 2048 tokens
    assert "131,072 bytes a token (32 layers x 8 heads x 128 x (2 + 2) bytes)" in cache.formula


def test_master_weights_of_the_checked_backend_have_moments_of_their_own_dtype() -> None:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        precision = Precision(dtype, "bfloat16", autocast=dtype == "float32")
        memory = StateMemory("actor", 1000, 1000, precision, Setting(train_policy("fsdp2")))
        items = [memory.weights(), memory.gradients(), memory.optimizer()]
        assert [i.num_bytes for i in items] == [1000 * size, 1000 * size, 2000 * size]


# ---- settings ---------------------------------------------------------------------------------------------------------------
def memory_of(
    engine: dict[str, Any], axes: dict[str, int], world: int, device: str = "cuda", **sections: Any
) -> TrainMemory:
    run = config(actor={"engine": engine}, **sections)
    topology = resolve(world, axes)
    precision, setting = engine_setting(train_policy("fsdp2"), engine, topology, run, device, shape())
    return TrainMemory(
        "actor", shape(), count_parameters(shape()), precision, setting, engine_load(run.actor, topology, run)
    )


def test_shards_are_dp_shard_and_usp_together_and_replicas_share_nothing() -> None:
    total = count_parameters(shape()).total
    for axes, shards in (({}, 16), ({"usp": 4}, 16), ({"dp_replicate": 4}, 4), ({"dp_replicate": 2, "usp": 2}, 8)):
        assert memory_of({}, axes, 16).state.weights().num_bytes == round(total * 4 / shards)


def test_ulysses_halves_the_tokens_of_a_rank() -> None:
    alone, halves = memory_of({}, {}, 2).load, memory_of({"x": 0}, {"usp": 2}, 2).load
    # The token budget is of a device: with twice the ranks a row, twice the tokens a micro-batch.
    assert halves.tokens == pytest.approx(alone.tokens, rel=0.01)
    rows = {"actor": {"micro_batch_size_per_device": 2}}
    two = config(**rows)
    one = engine_load(two.actor, resolve(2, {}), two)
    half = engine_load(two.actor, resolve(2, {"usp": 2}), two)
    assert (one.tokens, half.tokens) == (2 * 4095, 4095)


@pytest.mark.parametrize(
    ("engine", "world", "device", "compute", "autocast", "wrapped"),
    [
        ({}, 1, "cpu", "float32", False, False),
        ({}, 1, "cuda", "bfloat16", True, False),
        ({}, 2, "cuda", "bfloat16", False, True),
        ({"wrap": "always"}, 1, "cuda", "bfloat16", False, True),
        ({"param_dtype": "float32"}, 1, "cuda", "float32", False, False),
        ({"param_dtype": "bfloat16"}, 1, "cpu", "bfloat16", True, False),
    ],
)
def test_dtypes_and_wrapping(
    engine: dict[str, Any], world: int, device: str, compute: str, autocast: bool, wrapped: bool
) -> None:
    memory = memory_of(engine, {}, world, device)
    assert (memory.p.compute, memory.p.autocast, memory.s.wrapped) == (compute, autocast, wrapped)
    assert memory.s.flash == (device == "cuda" and compute == "bfloat16")


def names(moments: list[Moment]) -> list[str]:
    return [m.name for m in moments]


def test_moments_follow_the_step() -> None:
    assert names(memory_of({}, {}, 1).moments()) == [
        "loss", "head's backward", "first layer's backward", "first layer's end", "second layer's backward",
        "second layer's end", "last but one layer's backward", "last but one layer's end", "last layer's backward",
        "last layer's end", "embedding's backward", "optimizer step",
    ]  # fmt: skip
    assert names(memory_of({}, {}, 8).moments())[0] == "gathering"


def peak(memory: TrainMemory) -> int:
    return max(m.num_bytes for m in memory.moments())


def test_what_helps_helps() -> None:
    plain = memory_of({}, {}, 8)
    assert peak(memory_of({"activation_checkpointing": True}, {}, 8)) < 0.6 * peak(plain)
    assert plain.activations(checkpointing=True).num_bytes < 0.1 * plain.activations(checkpointing=False).num_bytes
    assert peak(memory_of({"logits_budget_mib": 64}, {}, 8)) <= peak(plain)
    assert peak(memory_of({}, {}, 8, data={"max_response_length": 1024})) <= peak(plain)
    offload = memory_of({"optimizer_offload": True}, {}, 8)
    step = offload.moments()[-1]
    assert "optimizer" in {i.name for i in step.items}
    assert all("optimizer" not in {i.name for i in m.items} for m in offload.moments()[:-1])
    sgd = config(actor={"optim": {"name": "sgd"}})
    _, setting = engine_setting(train_policy("fsdp2"), {}, Topology(), sgd, "cpu", shape())
    assert not setting.moments


def test_gradients_that_wait_for_the_last_micro_batch_are_whole_on_every_rank() -> None:
    one = memory_of({}, {}, 8, data={"train_batch_size": 8}, rollout={"n": 2})
    many = memory_of({}, {}, 8, data={"train_batch_size": 64}, rollout={"n": 8})
    assert (one.load.micro_batches, many.load.micro_batches) == (1, 16)
    assert many.state.waiting_gradients().num_bytes == many.count.total * 4
    assert many.state.gradients().num_bytes == many.count.total * 4 / 8
    assert "whole on each rank" in many.state.waiting_gradients().formula
    assert peak(many) > peak(one) + many.count.total * 3


def test_a_layer_keeps_what_autograd_keeps() -> None:
    """Llama in float32, by hand: 6 D of two norms, q, k, v, the result, its sums, and 4 F."""
    saved = layer_saved(shape(), Precision("float32", "float32"), moe=False, flash=True, ragged=False)
    width = 6 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336
    assert sum(s.bytes_a_token for s in saved) == 4 * width + 4 * 32


def test_tensor_parallel_ranks_share_the_inner_part_only() -> None:
    precision, load = Precision("bfloat16", "bfloat16"), Load(tokens=1000, scored=1000, longest=1000)
    count = count_parameters(shape())
    one, four = (TrainMemory("a", shape(), count, precision, Setting(tp=tp), load) for tp in (1, 4))
    saved = layer_saved(shape(), precision, moe=False, flash=False, ragged=True)
    inner = sum(s.bytes_a_token for s in saved if s.part == "inner") * 1000
    assert one.layer_bytes(count.layers[0]) - four.layer_bytes(count.layers[0]) == pytest.approx(inner * 3 / 4)
    assert four.state.weights().num_bytes * 4 == one.state.weights().num_bytes


def test_experts_are_shared_over_ep_where_layers_are_not_gathered() -> None:
    moe = shape({"model_type": "qwen3_moe", "num_hidden_layers": 4})
    count, policy = count_parameters(moe), train_policy("megatron")
    experts = 4 * 128 * 3 * 2048 * 768
    load, precision = Load(tokens=8, scored=8, longest=8), Precision("float32", "bfloat16")
    memory = TrainMemory("actor", moe, count, precision, Setting(policy, tp=2, ep=8), load)
    assert memory.state.weights().num_bytes == (count.total - experts) // 2 * 2 + experts // 8 * 2
    assert memory.state.optimizer().num_bytes == memory.state.weights().num_bytes * 6


def megatron(
    engine: dict[str, Any], axes: dict[str, int], world: int, device: str = "cuda", **optim: Any
) -> TrainMemory:
    run = config(actor={"engine": engine, "optim": optim})
    topology = resolve(world, axes)
    precision, setting = engine_setting(train_policy("megatron"), engine, topology, run, device, shape())
    load = engine_load(run.actor, topology, run)
    return TrainMemory("actor", shape(), count_parameters(shape()), precision, setting, load)


@pytest.mark.parametrize(
    ("engine", "axes", "world", "device", "bytes_a_parameter"),
    [
        ({}, {}, 4, "cuda", 12 / 4),
        ({}, {"tp": 2}, 4, "cuda", 12 / 2 / 2),
        # One replica: nothing to share the moments with.
        ({}, {"cp": 2, "tp": 2}, 4, "cuda", 12 / 2),
        ({"distributed_optimizer": "always"}, {"cp": 2, "tp": 2}, 4, "cuda", 12 / 2 / 2),
        ({"distributed_optimizer": "never"}, {}, 4, "cuda", 12),
        # Weights of float32 are main weights themselves.
        ({}, {}, 4, "cpu", 8 / 4),
        ({"param_dtype": "float32"}, {"tp": 4}, 4, "cuda", 8 / 4),
    ],
)
def test_megatron_keeps_main_weights_and_moments_over_replicas(
    engine: dict[str, Any], axes: dict[str, int], world: int, device: str, bytes_a_parameter: float
) -> None:
    memory = megatron(engine, axes, world, device)
    assert memory.state.optimizer().num_bytes == round(memory.count.total * bytes_a_parameter)


def test_megatron_recomputes_layers_by_its_own_setting() -> None:
    assert [megatron({"recompute": word}, {}, 1).s.checkpointing for word in ("full", "none")] == [True, False]
    assert not megatron({"activation_checkpointing": True}, {}, 1).s.checkpointing


def test_megatron_s_gradient_buffers_are_there_at_every_moment() -> None:
    for axes, world in (({}, 1), ({"tp": 2}, 4)):
        memory = megatron({}, axes, world)
        whole = memory.count.total * 4 // axes.get("tp", 1)
        for moment in memory.moments():
            assert [i.num_bytes for i in moment.items if i.name == "gradients"] == [whole], moment.name
    assert "buffers that stay" in megatron({}, {}, 1).state.gradients().formula


def test_megatron_s_new_gradients_are_those_of_one_weight() -> None:
    memory = megatron({"param_dtype": "bfloat16"}, {}, 1)
    fresh = {m.name: i.num_bytes for m in memory.moments() for i in m.items if i.name == "new gradients"}
    assert fresh["last layer's backward"] == 4096 * 14336 * 2
    assert fresh["last layer's end"] == 0


# ---- rollout ----------------------------------------------------------------------------------------------------------------
def rollout(run: RunConfig, name: str = "hf", section: dict[str, Any] | None = None, **more: Any) -> RolloutMemory:
    values: dict[str, Any] = {"dp_size": 1, "ranks": 1, "shared": False, "device": "cuda", **more}
    precision = Precision("float32", "bfloat16", autocast=True)
    return RolloutMemory(shape(), 8 * GB, run, rollout_policy(name), section or {}, precision=precision, **values)


def test_the_bounds_of_an_engine_bound_its_cache() -> None:
    run = config(data={"train_batch_size": 64}, rollout={"n": 8})
    assert rollout(run).rows()[0] == 512
    assert rollout(run, dp_size=4).rows()[0] == 128
    bounds = {"max_batch_rows": 100, "max_batch_tokens": 1 << 30}
    assert rollout(run, section=bounds).rows()[0] == 100
    bounds = {"max_batch_rows": 512, "max_batch_tokens": 65536}
    assert rollout(run, section=bounds).rows()[0] == 16
    assert rollout(run, "vllm", bounds).rows()[0] == 512
    validation = config(data={"train_batch_size": 4, "val_batch_size": 256}, rollout={"n": 2})
    assert rollout(validation).rows() == (256, "256 rows of a validation batch on this engine")


def test_a_shared_module_has_no_copy_and_no_sync() -> None:
    run = config()
    assert rollout(run, shared=True).weights().num_bytes == 0
    assert rollout(run).weights().num_bytes == 32 * GB
    assert rollout(run, "vllm", {"dtype": "bfloat16"}, ranks=4).weights().num_bytes == 4 * GB
    aside = [rollout(run, "vllm", section, device="cpu").cache() for section in ({}, {"kv_cache_mib": 64})]
    assert [item.num_bytes for item in aside if item is not None] == [256 << 20, 64 << 20]
    assert sync_item(None, None, 8 * GB, 4, shared=True).num_bytes == 0
    count = count_parameters(shape())
    assert sync_item(count, shape(), count.total, 4, shared=False).num_bytes == 2 * 128256 * 4096 * 4
    moe = shape({"model_type": "qwen3_moe"})
    found = sync_item(count_parameters(moe), moe, 0, 2, shared=False)
    assert found.num_bytes == 2 * 128 * 3 * 2048 * 768 * 2
    assert found.formula.startswith("experts of one layer")


# ---- verdict ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("gib", "device", "verdict"),
    [(10, None, "unknown"), (10, 80.0, "fits"), (75, 80.0, "tight"), (81, 80.0, "too_large")],
)
def test_the_verdict(gib: int, device: float | None, verdict: str) -> None:
    phases = (Moment("update", (Item("weights", "actor", gib * GIB, ""),)), Moment("generation", ()))
    plan = MemoryPlan((PoolMemory("main", ("actor",), phases), PoolMemory("gen", ("rollout",), phases[1:])))
    found, words = plan.verdict(device)
    assert found == verdict
    assert f"{gib}.00 GiB a rank in pool main, at update" in words
    assert MemoryPlan(missing="the number of weights").verdict(80.0) == ("unknown", "the number of weights")


def test_a_value_head_costs_one_row_instead_of_a_vocabulary() -> None:

    count = count_parameters(shape())
    critic = _with_value_head(ModelSize(shape(), count, count.total, ""))
    assert critic.total == count.total - 128256 * 4096 + 4096
    tied = shape(tie_word_embeddings=True)
    critic = _with_value_head(ModelSize(tied, count_parameters(tied), 1, ""))
    assert critic.total == count_parameters(tied).total + 4096
    assert replace(tied, vocab_size=1, tied=False) == critic.shape
