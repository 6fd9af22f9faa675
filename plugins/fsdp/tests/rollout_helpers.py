"""Tiny models under the embedded rollout engine; what its tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import CONFIGS, VOCAB
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlctl.engine import Engine
from rlctl.generation import Completion, GenerateRequest, SamplingParams, ScoreRequest
from rlctl.parts.job import Root
from rlctl.records import BackendKind
from rlctl.sync import fingerprint_tensor
from rlctl.topology import Topology
from rlctl_fsdp.rollout import HFRollout
from rlctl_fsdp.shard import shard

PROMPTS = [[5, 9, 2, 30, 11, 7, 8], [3, 4], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30], [6], [9, 8, 7, 6]]

# Families whose state is more than keys and values, or whose attention is their own.
OTHERS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "model_type": "lfm2", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    },
    "bloom": {
        "model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "eos_token_id": 1,
        "bos_token_id": None, "pad_token_id": 0,
    },
    "openai-gpt": {
        "model_type": "openai-gpt", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model whose logits spread enough that samples tell weights and positions apart."""
    values = dict({**CONFIGS, **OTHERS}[name])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4.0)
    return module


def attached(module: PreTrainedModel, name: str, **settings: Any) -> tuple[Engine, HFRollout]:
    provider = HFRollout()
    engine = Engine(provider, BackendKind.ROLLOUT, "hf")
    engine.build(Topology(), {"device": "cpu", **settings}, {"config": dict({**CONFIGS, **OTHERS}[name])})
    assert engine.attach_module(module, 0)
    return engine, provider


def generate(engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> list[Completion]:
    settings: dict[str, Any] = {"max_tokens": 8, "seed": 3, "ignore_eos": True, **params}
    return engine.generate(GenerateRequest(prompts, SamplingParams(**settings)))


@torch.no_grad()
def plain_log_probs(
    module: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float
) -> list[float]:
    """One row through a plain forward pass, no cache, no padding."""
    training = module.training
    module.eval()
    ids = torch.tensor([[*prompt, *tokens]])
    logits = module(input_ids=ids, use_cache=False).logits[0].float() / temperature
    module.train(training)
    scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return scores.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()


def _fully_sharded(module: PreTrainedModel, mesh: Any) -> PreTrainedModel:
    for layer in module.model.layers:  # pyright: ignore[reportGeneralTypeIssues, reportAttributeAccessIssue]
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _in_root(module: PreTrainedModel, mesh: Any) -> Root:
    root = Root(module)
    shard(root, mesh, torch.float32, torch.float32, reshard=True)
    return root


def check_sharded(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    reference = make_model("llama")
    # Ranks generate for prompts of their own, of other lengths and counts.
    mine = PROMPTS[rank:] if rank else PROMPTS[:2]
    wanted = generate(attached(reference, "llama")[0], mine, n=2 + rank, max_tokens=5 + 3 * rank)
    for make in (_fully_sharded, _in_root):
        sharded = make(make_model("llama"), mesh)
        engine, _ = attached(sharded, "llama")  # pyright: ignore[reportArgumentType]
        # A rank without prompts takes part in gathering the weights all the same: the others would wait for it.
        assert len(generate(engine, [] if rank else PROMPTS[:2])) == (0 if rank else 2)
        assert len(engine.score(ScoreRequest(PROMPTS if rank else []))) == (len(PROMPTS) if rank else 0)
        for _ in range(2):
            out = generate(engine, mine, n=2 + rank, max_tokens=5 + 3 * rank)
            assert [c.token_ids for c in out] == [c.token_ids for c in wanted]
            for a, b in zip(out, wanted, strict=True):
                assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
            ids = torch.tensor([PROMPTS[0]])
            model = sharded.model if isinstance(sharded, Root) else sharded
            job = lambda m, ids=ids: m(ids, labels=ids).loss
            loss = sharded(job) if isinstance(sharded, Root) else job(model)
            loss.backward()
            plain = reference(ids, labels=ids).loss
            plain.backward()
            for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert isinstance(p, DTensor), f"{name} is sharded again"
                assert p.grad is not None
                whole = p.grad.full_tensor() / (world if isinstance(sharded, Root) else 1)  # pyright: ignore[reportAttributeAccessIssue]
                assert torch.allclose(whole, q.grad, atol=1e-6), name  # pyright: ignore[reportArgumentType]
                p.grad = q.grad = None
        layer = model.model.layers[0]  # pyright: ignore[reportIndexIssue, reportAttributeAccessIssue, reportPossiblyUnboundVariable]
        assert isinstance(layer, FSDPModule)
        assert all(g.post_forward_mesh_info is not None for g in layer._get_fsdp_state()._fsdp_param_groups)
        prints = engine.weight_fingerprint(["model.norm.weight", "lm_head.weight"])
        assert prints["lm_head.weight"] == fingerprint_tensor(reference.lm_head.weight)  # pyright: ignore[reportArgumentType]


def sharded_rank(rank: int, world: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    check_sharded(rank, world)
    dist.destroy_process_group()
