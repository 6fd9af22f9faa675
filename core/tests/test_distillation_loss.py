"""The distillation loss on a plain reader: what it adds up to, what it leaves alone, what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.algorithms.distillation import sampled_divergence, topk_divergence
from rlctl.algorithms.distillation_loss import TEACHER_TEMPERATURE, DistillationLoss
from rlctl.batch import PackedBatch, pack, padding_like
from rlctl.config.schema import ActorConfig
from rlctl.config.schema_distillation import DistillationConfig
from rlctl.errors import BatchError
from rlctl.logits import LossOutput
from rlctl.readers import DenseReader

V, K = 12, 4
MODES = ("k1", "k2", "k3", "abs", "forward_kl_topk", "reverse_kl_topk", "jsd_topk")


def table(batch: PackedBatch, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(batch.num_items, V, generator=generator) * 2).requires_grad_()


def scored(temperature: float = 1.0, mode: str = "forward_kl_topk", teacher_seed: int = 2) -> PackedBatch:
    """Two rows with prompts, annotated by a table of logits as a teacher's."""
    ids = [[1, 5, 7, 2, 9], [3, 3, 8, 0]]
    mask = [[False, False, True, True, True], [False, True, True, True]]
    batch = pack(
        {"input_ids": ids, "loss_mask": mask},
        meta={"temperature": temperature, TEACHER_TEMPERATURE: temperature},
        dtypes={"loss_mask": torch.bool},
    )
    keep = batch.items["loss_mask"].float()
    teacher = DenseReader(table(batch, teacher_seed), batch)
    owner = teacher if mode != "reverse_kl_topk" else DenseReader(table(batch, 1), batch)
    picked = owner.topk(K)[1]
    weights = torch.linspace(0.05, 0.4, batch.num_items) * keep
    return batch.with_items(
        item_weight=weights,
        advantages=torch.linspace(-1, 1, batch.num_items) * keep,
        teacher_log_probs=teacher.log_prob().detach(),
        teacher_topk_ids=picked,
        teacher_topk_log_probs=teacher.log_prob_at(picked).detach(),
    )


def run(
    batch: PackedBatch, logits: torch.Tensor, mode: str, actor: ActorConfig | None = None, **settings: object
) -> LossOutput:
    config = DistillationConfig.model_validate({"loss_mode": mode, "topk": K, **settings})
    return DistillationLoss(actor or ActorConfig(), config)(DenseReader(logits, batch), batch)


def gradient(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    [grad] = torch.autograd.grad(loss, logits, retain_graph=True)
    return grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_loss_is_the_weighted_sum_of_the_pure_functions(mode: str, temperature: float) -> None:
    batch = scored(temperature, mode)
    logits = table(batch, 1)
    out = run(batch, logits, mode, loss_coef=0.7)
    reader = DenseReader(logits, batch)
    weight, log_p, log_q = batch.items["item_weight"], reader.log_prob(), batch.items["teacher_log_probs"]
    if mode == "k1":
        # Exactly on policy the ratio is one: the gradient is that of -reward * log p, and the reported loss is -reward.
        want = (weight * 0.7 * (log_p - log_q).detach() * log_p).sum()
        reported = (weight * (log_p - log_q)).sum()
    elif mode.endswith("_topk"):
        at = reader.log_prob_at(batch.items["teacher_topk_ids"])
        per_token = topk_divergence(at, batch.items["teacher_topk_log_probs"], mode).loss
        want = 0.7 * (weight * torch.where(batch.items["loss_mask"], per_token, 0.0)).sum()
        reported = want / 0.7
    else:
        want = 0.7 * (weight * sampled_divergence(log_p, log_q, mode)).sum()
        reported = want / 0.7
    if mode != "k1":
        assert out.loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert (gradient(out.loss, logits) - gradient(want, logits)).abs().max() < 1e-6
    assert float(out.sums["distillation/loss"]) == pytest.approx(reported.item(), rel=1e-5)
    kl = (weight * (log_p - log_q)).sum().item()
    assert float(out.sums["distillation/kl"]) == pytest.approx(kl, rel=1e-4)
    assert gradient(out.loss, logits).abs().max() > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_infinities_where_nothing_is_scored_change_nothing(mode: str) -> None:
    batch = scored(mode=mode)
    batch = batch.with_items(old_log_probs=DenseReader(table(batch, 1), batch).log_prob().detach())
    hidden = ~batch.items["loss_mask"]
    dirty = dict(batch.items)
    for name in ("teacher_log_probs", "teacher_topk_log_probs", "old_log_probs", "advantages"):
        dirty[name] = batch.items[name].clone()
        dirty[name][hidden] = -math.inf
    logits = table(batch, 1)
    clean_out = run(batch, logits, mode, use_task_rewards=True)
    dirty_out = run(batch.with_items(**dirty), logits, mode, use_task_rewards=True)
    assert torch.equal(clean_out.loss, dirty_out.loss)
    assert torch.equal(gradient(clean_out.loss, logits), gradient(dirty_out.loss, logits))
    assert all(float(dirty_out.sums[name]) == float(value) for name, value in clean_out.sums.items())


@pytest.mark.parametrize("mode", MODES)
def test_task_rewards_are_added_with_weight_one(mode: str) -> None:
    batch = scored(mode=mode)
    logits = table(batch, 1)
    both = gradient(run(batch, logits, mode, use_task_rewards=True, loss_coef=0.3).loss, logits)
    alone = gradient(run(batch, logits, mode, loss_coef=0.3).loss, logits)
    log_p = DenseReader(logits, batch).log_prob()
    task = gradient(-(batch.items["item_weight"] * batch.items["advantages"] * log_p).sum(), logits)
    assert task.abs().max() > 1e-2
    assert (both - alone - task).abs().max() < 1e-6
    # Without them the rewards are not even read.
    bare = PackedBatch(
        batch.cu_seqlens, {k: v for k, v in batch.items.items() if k != "advantages"}, batch.rows, batch.meta
    )
    assert torch.equal(gradient(run(bare, logits, mode, loss_coef=0.3).loss, logits), alone)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "k1"])
def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient(mode: str) -> None:
    batch = scored(0.5, mode, teacher_seed=1)
    logits = table(batch, 1)
    out = run(batch, logits, mode)
    assert abs(out.loss.item()) < 1e-6
    assert gradient(out.loss, logits).abs().max() < 1e-6
    if mode in ("forward_kl_topk", "jsd_topk"):
        total = batch.items["item_weight"].sum().item()
        assert float(out.sums["distillation/overlap_ratio"]) == pytest.approx(total, rel=1e-5)


def test_a_teacher_at_another_temperature_is_refused() -> None:
    batch = scored(0.5)
    for wrong in (batch.with_meta(**{TEACHER_TEMPERATURE: 1.0}), PackedBatch(batch.cu_seqlens, batch.items)):
        with pytest.raises(BatchError, match="another temperature"):
            run(wrong, table(batch, 1), "k3")


@pytest.mark.parametrize("mode", MODES)
def test_padding_reports_the_same_names_and_a_zero_gradient(mode: str) -> None:
    batch = scored(mode=mode)
    padding = padding_like(batch)
    logits = table(padding, 1)
    out = run(padding, logits, mode)
    assert out.loss.item() == 0.0
    assert gradient(out.loss, logits).abs().max() == 0.0
    assert set(out.sums) == set(run(batch, table(batch, 1), mode).sums)


def test_an_entropy_bonus_acts_as_without_distillation() -> None:
    batch = scored()
    logits = table(batch, 1)
    bonus = gradient(run(batch, logits, "k3", ActorConfig(entropy_coeff=0.1)).loss, logits)
    entropy = (batch.items["item_weight"] * DenseReader(logits, batch).entropy()).sum()
    want = gradient(run(batch, logits, "k3").loss, logits) - 0.1 * gradient(entropy, logits)
    assert (bonus - want).abs().max() < 1e-6
