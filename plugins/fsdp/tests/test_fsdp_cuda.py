"""The CUDA paths: varlen kernel, autocast, offload, memory. Skipped where no CUDA device answers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlctl.algorithms.losses import CrossEntropyLoss
from rlctl.batch import PackedBatch, pack
from rlctl.engine import Engine
from rlctl.generation import GenerateRequest, SamplingParams
from rlctl.microbatch import MicroBatchPlan
from rlctl.parts.attention import packed_attention
from rlctl.records import BackendKind
from rlctl.topology import Topology
from rlctl_fsdp.engine import FSDPEngine
from rlctl_fsdp.rollout import HFRollout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers here")

VOCAB = 512
CONFIG = {
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = [7, 63, 1, 128, 30, 30, 30, 17]


@pytest.fixture(autouse=True)
def _exact_matmuls():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)


def batch(lengths: list[int] = LENGTHS) -> PackedBatch:
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, VOCAB, (n,), generator=g) for n in lengths]
    mask = [torch.tensor([False] + [True] * (n - 1)) for n in lengths]
    return pack({"input_ids": ids, "loss_mask": mask})


def engine(lr: float = 1e-3, **settings) -> Engine:
    out = Engine(FSDPEngine(), BackendKind.TRAIN, "fsdp2")
    optim = {"lr": lr, "weight_decay": 0.0, "clip_grad": 1.0}
    out.build(Topology(), {"device": "cuda", **settings}, {"config": CONFIG, "seed": 3, "dtype": "float32"}, optim)
    return out


def gradients(eng: Engine) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in eng.local_module().named_parameters() if p.grad is not None}


def accumulate(eng: Engine, data: PackedBatch, tokens: int = 200) -> dict[str, torch.Tensor]:
    from rlctl.normalizer import item_weights

    data = data.with_items(item_weight=item_weights(data, "token-mean"))
    micro, _ = eng.micro_batches(data, MicroBatchPlan(max_tokens=tokens))
    assert len(micro) > 1
    eng.forward_backward(micro, CrossEntropyLoss(), forward_only=False)
    return gradients(eng)


def padded_reference(data: PackedBatch) -> dict[str, torch.Tensor]:
    eng = engine(param_dtype="float32")
    model = AutoModelForCausalLM.from_config(Qwen3Config(**CONFIG), attn_implementation="sdpa").cuda()
    model.load_state_dict(eng.local_module().state_dict())
    rows = data.split_items(data.items["input_ids"])
    width = max(len(r) for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long, device="cuda")
    keep = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], keep[i, : len(row)] = row, 1
    logp = model(ids, attention_mask=keep).logits[:, :-1].float().log_softmax(-1)
    nll = -logp.gather(-1, ids[:, 1:, None])[..., 0] * keep[:, 1:]
    (nll.sum() / keep[:, 1:].sum()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    error = sum((a[k].double() - b[k].double()).square().sum() for k in a) ** 0.5
    return float(error / sum(b[k].double().square().sum() for k in b) ** 0.5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_kernel_equals_exact_attention(window, dtype):
    n, cu = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    q = torch.randn(1, 8, n, 64, device="cuda")
    k, v = torch.randn(1, 2, n, 64, device="cuda"), torch.randn(1, 2, n, 64, device="cuda")
    module = torch.nn.Module()
    args = {"cu_seq_lens_q": cu, "max_length_q": max(LENGTHS), "sliding_window": window}
    exact, _ = packed_attention(module, q.double(), k.double(), v.double(), None, **args)
    fast, _ = packed_attention(module, q.to(dtype), k.to(dtype), v.to(dtype), None, **args)
    error = (fast.double() - exact).norm() / exact.norm()
    assert error < 1e-2, error


def test_fp32_gradient_equals_the_padded_model():
    data = batch()
    assert relative(accumulate(engine(param_dtype="float32"), data), padded_reference(data)) < 1e-5


def test_bf16_gradient_is_near_the_fp32_one():
    data = batch()
    eng = engine()
    assert eng.info is not None
    assert eng.info.notes["compute_dtype"] == "bfloat16"
    assert relative(accumulate(eng, data), padded_reference(data)) < 3e-2


def test_offload_changes_nothing():
    results = []
    for settings in ({}, {"param_offload": True, "optimizer_offload": True}):
        eng = engine(**settings)
        for _ in range(3):
            out = eng.train_batch(batch(), CrossEntropyLoss(), MicroBatchPlan(max_tokens=200))
        results.append((out.step.grad_norm, {n: t.cpu().clone() for n, t in eng.export_weights(None)}))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for name, tensor in results[0][1].items():
        assert torch.allclose(tensor, results[1][1][name], atol=1e-5), name


def test_peak_memory_of_the_head_does_not_grow_with_tokens_times_vocabulary():
    vocab = 64_000
    config = {**CONFIG, "vocab_size": vocab, "num_hidden_layers": 1}
    eng = Engine(FSDPEngine(), BackendKind.TRAIN, "fsdp2")
    settings = {"device": "cuda", "logits_budget_mib": 64}
    eng.build(Topology(), settings, {"config": config, "seed": 3, "dtype": "float32"}, {"lr": 1e-4, "clip_grad": 1.0})

    def peak(rows: int) -> float:
        data = batch([512] * rows)
        eng.train_batch(data, CrossEntropyLoss(), MicroBatchPlan(max_tokens=512 * rows))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        eng.train_batch(data, CrossEntropyLoss(), MicroBatchPlan(max_tokens=512 * rows))
        return torch.cuda.max_memory_allocated() / 2**20

    small, large = peak(8), peak(64)
    full_logits = 4 * 512 * (64 - 8) * vocab / 2**20
    assert large - small < 0.25 * full_logits, (small, large, full_logits)


def test_rollout_and_trainer_agree_in_bf16():
    eng = engine()
    rollout = Engine(HFRollout(), BackendKind.ROLLOUT, "hf")
    rollout.build(Topology(), {"device": "cuda"}, {"config": CONFIG, "seed": 3, "dtype": "float32"}, None, True)
    assert rollout.attach_module(eng.local_module(), 1)
    prompts = [[5, 6, 7], [9], list(range(20))]
    done = rollout.generate(GenerateRequest(prompts, SamplingParams(n=4, max_tokens=16, seed=0, ignore_eos=True)))
    rows = [[*prompts[c.prompt_index], *c.token_ids] for c in done]
    mask = [[False] * len(prompts[c.prompt_index]) + [True] * len(c.token_ids) for c in done]
    scored = eng.infer_batch(pack({"input_ids": rows, "loss_mask": mask}), MicroBatchPlan(max_tokens=4096))
    flat = torch.tensor([p for c in done for p in c.log_probs])
    gap = (scored["log_probs"][torch.tensor([m for row in mask for m in row])].exp() - flat.exp()).abs().mean()
    assert gap < 0.005, gap


def test_a_rollout_that_rests_leaves_the_device_and_comes_back_as_it_was() -> None:
    rollout = Engine(HFRollout(), BackendKind.ROLLOUT, "hf")
    rollout.build(Topology(), {"device": "cuda"}, {"config": CONFIG, "seed": 3, "dtype": "float32"}, None)
    source = engine()
    rollout.load_weights(((n, t.clone()) for n, t in source.export_weights()), 1)
    source.shutdown()
    del source
    request = GenerateRequest([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=8, temperature=0.0))
    before = [c.token_ids for c in rollout.generate(request)]
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    assert rollout.release("weights", "kv")
    freed = held - torch.cuda.memory_allocated()
    assert rollout.info is not None
    assert freed >= 4 * rollout.info.num_parameters
    assert rollout.resume("weights", "kv")
    assert [c.token_ids for c in rollout.generate(request)] == before
    assert rollout.release("weights", "kv")
    rollout.shutdown()
