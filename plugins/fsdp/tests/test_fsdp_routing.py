"""What the experts were, as the engine reports it, against the model's own router logits."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import batch_of, build_engine, model_section, rows

from rlctl.batch import PackedBatch
from rlctl.engine import Engine
from rlctl.errors import EngineError
from rlctl.microbatch import MicroBatchPlan

LENGTHS = (7, 3, 11, 5)


def chosen_by_the_model(engine: Engine, batch: PackedBatch) -> torch.Tensor:
    """``[N, L, K]`` sorted choices at the position before each scored token, -1 elsewhere; row by row, unpacked."""
    model = engine.local_module()
    parts = []
    for ids, mask in zip(
        batch.split_items(batch.items["input_ids"]), batch.split_items(batch.items["loss_mask"]), strict=True
    ):
        with torch.no_grad():
            logits = model(input_ids=ids[None], output_router_logits=True, use_cache=False).router_logits
        found = torch.stack([x.topk(2, -1).indices for x in logits], 1).sort(-1).values
        part = torch.full((len(ids), *found.shape[1:]), -1)
        at = mask.nonzero()[:, 0]
        part[at] = found[at - 1]
        parts.append(part)
    return torch.cat(parts)


@pytest.mark.parametrize("plan", [MicroBatchPlan(max_rows=4), MicroBatchPlan(max_tokens=16)], ids=["one", "several"])
@pytest.mark.parametrize("settings", [{}, {"attention": "per_row"}, {"share_prompts": False}], ids=str)
def test_routing_is_that_of_the_model(plan: MicroBatchPlan, settings: dict[str, object]) -> None:
    engine = build_engine(model_section("qwen3-moe"), **settings)
    assert engine.info is not None
    assert engine.info.notes["experts"] == "choices of 2 layers are reported, 2 experts a token"
    prompt = rows((4,), seed=3)[0]
    batch = batch_of([torch.cat([prompt, r]) for r in rows(LENGTHS)], prompt=4)
    found = engine.infer_batch(batch, plan, ("log_probs", "experts"))
    assert found["experts"].shape == (batch.num_items, 2, 2)
    scored = batch.items["loss_mask"]
    wanted = chosen_by_the_model(engine, batch)
    assert torch.equal(found["experts"][scored].long().sort(-1).values, wanted[scored])
    assert bool((found["experts"][~scored] == -1).all())
    # Asking for it changes nothing else.
    assert torch.equal(found["log_probs"], engine.infer_batch(batch, plan)["log_probs"])


def test_routing_of_a_dense_model_is_refused() -> None:
    engine = build_engine(model_section("llama"))
    assert engine.info is not None
    assert "experts" not in engine.info.notes
    with pytest.raises(EngineError, match="does not report what its experts were"):
        engine.infer_batch(batch_of(rows(LENGTHS)), MicroBatchPlan(max_rows=4), ("experts",))
