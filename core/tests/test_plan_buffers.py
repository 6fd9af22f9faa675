"""Memory that one engine keeps while another one works."""

from __future__ import annotations

from rlctl.config.schema import RunConfig
from rlctl.evidence import EvidenceBook
from rlctl.plan.planner import make_plan
from rlctl.plan.request import Request
from rlctl.plugins import PluginSet

LLAMA = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip


def test_gradient_buffers_stay_while_others_work() -> None:
    def held(backend: str, **engine: object) -> dict[str, int]:
        config = {
            "model": {"config": LLAMA, "tokenizer": "unused"},
            "data": {"task": {"name": "sort_digits", "train_size": 640}},
            "runtime": {"nproc": 2},
            "actor": {"backend": backend, "engine": engine, "use_kl_loss": True},
        }
        request = Request(RunConfig.model_validate(config), "run.yaml", (), (), "cuda", "nvidia", "a test", False)
        [pool] = make_plan(request, PluginSet(), EvidenceBook()).memory.pools
        of_actor = [(p, [i for i in p.items if (i.name, i.role) == ("gradients", "actor")]) for p in pool.phases]
        return {p.name.partition(":")[0]: sum(i.num_bytes for i in items) for p, items in of_actor}

    elsewhere = ("generation", "scoring by the reference", "weight sync")
    buffers, parked = held("megatron"), held("megatron", param_offload=True)
    assert len({buffers[name] for name in elsewhere}) == 1
    assert buffers["generation"] == buffers["update of the actor"] > 0
    assert not any(parked[name] for name in elsewhere)
    assert parked["update of the actor"] == buffers["update of the actor"]
    assert not any(held("fsdp2")[name] for name in elsewhere)
