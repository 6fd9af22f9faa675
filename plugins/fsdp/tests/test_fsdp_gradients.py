"""The packed, accumulated path against plain padded Hugging Face: same loss, same gradients."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import batch_of, build_engine, gradients, model_section, nll, padded_log_probs, ppo_like, rows

from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer import item_weights
from rlctl.parts.reader import FullReader

LENGTHS = (9, 4, 13, 9, 2, 7)
FAMILIES = ["llama", "llama-tied", "qwen2", "qwen2-window", "qwen3", "gemma3", "gemma2", "mistral", "gpt-neox", "olmo2"]
FAMILIES += ["qwen3-moe", "cohere", "granite", "gpt2"]


class _Reference:
    """A reader over the full padded logits, for the same loss functions."""

    def __init__(self, log_p: torch.Tensor, batch) -> None:
        positions = batch.items["loss_mask"].nonzero()[:, 0]
        self.reader = FullReader(log_p[positions], positions, batch.items["input_ids"], 1.0)


def _reference(model, batch, loss_fn) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = loss_fn(_Reference(padded_log_probs(model, batch), batch).reader, batch)
    out.loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(out.loss.detach()), found


def _assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        worst = float((got[name] - value).abs().max())
        assert worst <= tolerance * max(1.0, float(value.abs().max())), f"{name}: {worst:.2e}"


@pytest.mark.parametrize("loss_fn", [nll, ppo_like], ids=["nll", "ppo"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_accumulated_gradient_equals_padded_gradient(family, loss_fn) -> None:
    engine = build_engine(model_section(family))
    assert engine.info is not None
    assert engine.info.notes["attention"].startswith("packed"), engine.info.notes
    assert engine.info.notes["logits"].startswith("chunked"), engine.info.notes
    batch = batch_of(rows(LENGTHS))
    batch = batch.with_items(item_weight=item_weights(batch, "seq-mean-token-mean"))
    loss, wanted = _reference(engine.local_module(), batch, loss_fn)
    for plan in (MicroBatchPlan(max_tokens=16), MicroBatchPlan(max_rows=1), MicroBatchPlan(max_rows=6)):
        micro_batches, _ = engine.micro_batches(batch, plan)
        outputs = engine.forward_backward(micro_batches, loss_fn, forward_only=False)
        assert sum(o.loss for o in outputs) == pytest.approx(loss, rel=1e-5, abs=1e-6)
        _assert_close(gradients(engine), wanted)
        engine.local_module().zero_grad()


def test_activation_checkpointing_changes_nothing() -> None:
    batch = batch_of(rows(LENGTHS))
    batch = batch.with_items(item_weight=item_weights(batch, "token-mean"))
    found = []
    for checkpointing in (False, True):
        engine = build_engine(model_section("qwen2-window"), activation_checkpointing=checkpointing)
        engine._hooks.rlctl_set_mode(train=True)
        engine.forward_backward([batch], nll, forward_only=False)
        switches = [getattr(m, "gradient_checkpointing", False) for m in engine.local_module().modules()]
        assert any(switches) is checkpointing
        found.append(gradients(engine))
    _assert_close(found[1], found[0], 0.0)


def test_rows_never_see_each_other() -> None:
    """Bitwise: whatever the neighbours are, a row's log-probs and gradients stay the same."""
    engine = build_engine(model_section("llama"))
    mine = rows((9,), seed=1)[0]
    seen = []
    for seed in (2, 3):
        before, after = rows((9, 9), seed=seed)
        batch = batch_of([before, mine, after])
        weight = torch.zeros(27)
        weight[9:18] = batch.items["loss_mask"][9:18].float()
        out = engine.forward_backward([batch.with_items(item_weight=weight)], nll, forward_only=False)
        seen.append((out[0].items["log_probs"][9:18], gradients(engine)))
        engine.local_module().zero_grad()
    assert torch.equal(seen[0][0], seen[1][0])
    # The embedding's gradient is zero at rows of tokens that only neighbours use, and equal elsewhere.
    _assert_close(seen[0][1], seen[1][1], 1e-7)


def test_bfloat16_computation_stays_near_float32_and_keeps_float32_masters() -> None:
    batch = batch_of(rows(LENGTHS))
    exact = build_engine(model_section("llama")).infer_batch(batch, MicroBatchPlan(max_rows=6))["log_probs"]
    engine = build_engine(model_section("llama"), param_dtype="bfloat16")
    coarse = engine.infer_batch(batch, MicroBatchPlan(max_rows=6))["log_probs"]
    assert 0 < float((exact - coarse).abs().max()) < 0.05
    out = engine.train_batch(batch, nll, MicroBatchPlan(max_rows=2))
    assert out.step.grad_norm > 0
    assert {p.dtype for p in engine.local_module().parameters()} == {torch.float32}
