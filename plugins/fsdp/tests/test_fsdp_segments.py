"""Prompts laid out once: the plan itself, and the numbers it gives against separate rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fsdp_helpers import (
    CONFIGS,
    VOCAB,
    build_engine,
    gradients,
    model_section,
    nll,
    padded_log_probs,
    ppo_like,
    rows,
)

from rlctl.batch import PackedBatch, pack, padding_like
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer import item_weights
from rlctl.parts.attention import packed_attention
from rlctl.parts.layout import lay_out
from rlctl.parts.reader import FullReader
from rlctl.parts.segments import plan_segments


def _group_batch() -> PackedBatch:
    """Two prompts with three answers each (lengths 1 to 9), a row of its own, a row that scores nothing, a gap."""
    first, second, lone, silent = rows((5, 8, 6, 4), seed=3)
    answers = rows((3, 9, 1, 3, 7, 3), seed=4)
    tokens = [torch.cat([p, a]) for p, a in zip([first, second] * 3, answers, strict=True)]
    starts = [5, 8] * 3
    tokens[2:2] = [lone, silent]
    starts[2:2] = [2, 4]
    masks = [torch.arange(len(t)) >= s for t, s in zip(tokens, starts, strict=True)]
    masks[1][10] = False  # an unscored token inside an answer, as tool output is
    return pack({"input_ids": tokens, "loss_mask": masks})


def _plan(batch: PackedBatch, lean: bool = True, share: bool = True):
    ids, mask = batch.items["input_ids"].numpy(), batch.items["loss_mask"].numpy()
    return plan_segments(ids, mask, batch.cu_seqlens.numpy(), lean=lean, share=share)


def test_prompts_are_laid_out_once_and_unneeded_tokens_not_at_all() -> None:
    batch = _group_batch()
    plan = _plan(batch)
    ids = batch.items["input_ids"].numpy()
    # Prompts 5 and 8 once each, the lone row but its last token; answers but their last tokens (3+9+1+3+7+3 - 6).
    assert plan.lengths.sum() == len(plan.take) == 5 + 8 + 5 + 20
    assert (plan.parents >= 0).sum() == 5, "an answer of one token needs nothing but its prompt"
    assert list(plan.lengths[plan.parents < 0]) == [5, 5, 8], "roots by ascending length"
    starts = batch.cu_seqlens.numpy()
    for row in range(batch.num_rows):
        span = np.arange(starts[row], starts[row + 1])
        scored = batch.items["loss_mask"].numpy()[span]
        needed = span[: np.flatnonzero(scored)[-1]] if scored.any() else span[:0]
        where = plan.where[needed]
        assert (plan.take[where] == needed).all() or (ids[plan.take[where]] == ids[needed]).all()
        assert (plan.positions[where] == np.arange(len(needed))).all()
    bare = _plan(batch, lean=False, share=False)
    assert len(bare.take) == batch.num_items
    assert not bare.shares
    assert sorted(bare.take) == list(range(batch.num_items))


def test_keys_of_a_tail_are_its_prompts_and_its_own() -> None:
    plan = _plan(_group_batch())
    index, starts = plan.keys()
    bounds = plan.bounds
    for s, parent in enumerate(plan.parents):
        mine = list(range(bounds[s], bounds[s + 1]))
        before = list(range(bounds[parent], bounds[parent + 1])) if parent >= 0 else []
        assert list(index[starts[s] : starts[s + 1]]) == before + mine


def test_a_batch_that_scores_nothing_still_runs() -> None:
    padding = padding_like(_group_batch())
    assert _plan(padding).lengths.tolist() == [1]
    engine = build_engine(model_section("llama"))
    padding = padding.with_items(item_weight=torch.zeros(padding.num_items))
    out = engine.forward_backward([padding], nll, forward_only=False)
    assert out[0].loss == 0.0
    assert all(float(g.abs().max()) == 0.0 for g in gradients(engine).values())
    assert len(gradients(engine)) == len(list(engine.local_module().parameters()))


@pytest.mark.parametrize("loss_fn", [nll, ppo_like], ids=["nll", "ppo"])
@pytest.mark.parametrize("family", CONFIGS)
def test_shared_prompts_give_the_gradients_of_separate_rows(family, loss_fn) -> None:
    batch = _group_batch()
    batch = batch.with_items(item_weight=item_weights(batch, "seq-mean-token-mean"))
    engine = build_engine(model_section(family))
    assert engine.info is not None
    assert engine.info.notes["shared_prompts"].startswith("equal to rows alone"), engine.info.notes
    model = engine.local_module()
    positions = batch.items["loss_mask"].nonzero()[:, 0]
    reference = FullReader(padded_log_probs(model, batch)[positions], positions, batch.items["input_ids"], 1.0)
    wanted_out = loss_fn(reference, batch)
    wanted_out.loss.backward()
    wanted = gradients(engine)
    model.zero_grad()
    for plan in (MicroBatchPlan(max_rows=8), MicroBatchPlan(max_tokens=40)):
        micro_batches, groups = engine.micro_batches(batch, plan)
        outputs = engine.forward_backward(micro_batches, loss_fn, forward_only=False)
        assert sum(o.loss for o in outputs) == pytest.approx(float(wanted_out.loss.detach()), rel=1e-5, abs=1e-6)
        for name, grad in gradients(engine).items():
            worst = float((grad - wanted[name]).abs().max())
            assert worst <= 1e-6 * max(1.0, float(wanted[name].abs().max())), f"{name}: {worst:.2e}"
        model.zero_grad()
        for name, value in wanted_out.items.items():
            whole = torch.cat([batch.split_items(value)[r] for g in groups for r in g])
            got = torch.cat([o.items[name] for o in outputs])
            torch.testing.assert_close(got, whole.detach(), atol=2e-6, rtol=1e-5)


def test_sharing_can_be_turned_off() -> None:
    batch = _group_batch()
    on, off = build_engine(model_section("qwen3")), build_engine(model_section("qwen3"), share_prompts=False)
    assert off.info is not None
    assert off.info.notes["shared_prompts"] == "off: asked for"
    seen: dict[int, list[int]] = {0: [], 1: []}
    for i, engine in enumerate((on, off)):
        engine.local_module().model.layers[0].register_forward_pre_hook(
            lambda _m, args, i=i: seen[i].append(args[0].shape[1])
        )
    scores = [e.infer_batch(batch, MicroBatchPlan(max_rows=8))["log_probs"] for e in (on, off)]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-6, rtol=1e-6)
    assert seen == {0: [38], 1: [3 * 5 + 3 * 8 + 5 + 20]}, "38 instead of 64 tokens"


def test_many_random_groups() -> None:
    """Random batches of groups, whatever their shapes: log-probs equal those of rows alone."""
    engine = build_engine(model_section("qwen2-window"))
    alone = build_engine(model_section("qwen2-window"), attention="per_row")
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    for _ in range(12):
        tokens, masks = [], []
        for _ in range(number(1, 4)):
            prompt = torch.randint(2, VOCAB, (number(1, 8),), generator=generator)
            for _ in range(number(1, 5)):
                row = torch.cat([prompt, torch.randint(2, VOCAB, (number(1, 8),), generator=generator)])
                mask = torch.rand(len(row), generator=generator) < 0.7
                mask[: len(prompt)] = False
                tokens.append(row)
                masks.append(mask)
        batch = pack({"input_ids": tokens, "loss_mask": masks})
        got, want = (e.infer_batch(batch, MicroBatchPlan(max_rows=99))["log_probs"] for e in (engine, alone))
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers here")


@on_cuda
@pytest.mark.parametrize("window", [None, 6])
def test_the_varlen_kernel_sees_the_shared_prompt(window) -> None:
    """The flash kernel on gathered keys against exact attention in float64, gradients too."""
    device = torch.device("cuda")
    inputs = lay_out(_group_batch(), device, packed=True).inputs
    boundaries = {k: v for k, v in inputs.items() if k not in ("input_ids", "position_ids", "use_cache")}
    assert "key_index" in boundaries
    tokens = inputs["input_ids"].shape[1]
    shapes = [(1, 8, tokens, 64), (1, 2, tokens, 64), (1, 2, tokens, 64)]
    exact = [torch.randn(s, device=device, dtype=torch.float64, requires_grad=True) for s in shapes]
    fast = [t.detach().to(torch.bfloat16).requires_grad_() for t in exact]
    module = torch.nn.Module()
    outs = [packed_attention(module, *t, None, sliding_window=window, **boundaries)[0] for t in (exact, fast)]
    assert float(((outs[1].double() - outs[0]).norm() / outs[0].norm()).detach()) < 1e-2
    for out in outs:
        (out * torch.linspace(-1, 1, out.shape[-1], device=device, dtype=out.dtype)).sum().backward()
    for a, b in zip(fast, exact, strict=True):
        assert float((a.grad.double() - b.grad).norm() / b.grad.norm()) < 2e-2


@on_cuda
def test_shared_prompts_in_bfloat16_on_cuda() -> None:
    batch = _group_batch()
    config = {**CONFIGS["qwen3"], "head_dim": 32, "hidden_size": 128}
    found = []
    for settings in ({}, {"share_prompts": False}, {"param_dtype": "float32"}):
        engine = build_engine({"config": config, "tokenizer": "unused"}, device="cuda", **settings)
        assert engine.info is not None
        out = engine.train_batch(batch, nll, MicroBatchPlan(max_rows=8))
        found.append((out.loss, out.step.grad_norm, engine.info.notes))
    assert "varlen" in found[0][2]["attention"]
    assert found[0][2]["shared_prompts"].startswith("equal to rows alone"), found[0][2]
    for other in found[1:]:
        assert found[0][0] == pytest.approx(other[0], rel=5e-3)
        assert found[0][1] == pytest.approx(other[1], rel=3e-2)
