"""Models that do not keep packed rows apart are found by running them, and then run in another way."""

from __future__ import annotations

import warnings

import pytest
import torch
from fsdp_helpers import VOCAB, batch_of, build_engine, gradients, model_section, nll, padded_log_probs, rows
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from rlctl.errors import EngineError
from rlctl.microbatch import MicroBatchPlan
from rlctl.normalizer import item_weights
from rlctl.parts import attention
from rlctl.parts.head import HeadSpec, probe_head

_SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip

UNPACKABLE = {
    "mamba": {
        "model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "mamba2": {
        "model_type": "mamba2", "vocab_size": VOCAB, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2,
        "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "lfm2": {"model_type": "lfm2", **_SMALL, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3-next": {
        "model_type": "qwen3_next", **_SMALL, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "falcon-h1": {
        "model_type": "falcon_h1", **_SMALL, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
        "mamba_d_state": 8, "mamba_chunk_size": 8,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", **_SMALL, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
    },
    "rwkv": {"model_type": "rwkv", "vocab_size": VOCAB, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    "recurrent-gemma": {
        "model_type": "recurrent_gemma", **_SMALL, "num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 32,
        "head_dim": 8, "attention_window_size": 8, "pad_token_id": 0,
    },
    "bloom": {"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", UNPACKABLE)
def test_unpackable_models_run_row_by_row_with_the_right_gradients(family) -> None:
    engine = build_engine({"config": dict(UNPACKABLE[family]), "tokenizer": "unused"})
    assert engine.info is not None
    note = engine.info.notes["attention"]
    assert note.startswith("per_row: "), note
    assert len(note) > len("per_row: ") + 10, "the reason is given"
    tokens = rows((9, 4, 9, 6))
    batch = batch_of(tokens)
    batch = batch.with_items(item_weight=item_weights(batch, "token-mean"))
    model = engine.local_module()
    wanted_loss = torch.zeros(())
    for row in tokens:
        one = batch_of([row])
        log_p = model(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1)[:-1]
        picked = log_p.gather(-1, row[1:, None])[:, 0][one.items["loss_mask"][1:]]
        wanted_loss = wanted_loss - picked.sum() / float(batch.items["loss_mask"].sum())
    wanted_loss.backward()
    wanted = gradients(engine)
    model.zero_grad()
    out = engine.forward_backward([batch], nll, forward_only=False)
    assert len(out) == 1
    assert out[0].loss == pytest.approx(float(wanted_loss.detach()), rel=1e-5)
    assert out[0].sums["tokens"] == float(batch.items["loss_mask"].sum())
    for name, grad in gradients(engine).items():
        assert float((grad - wanted[name]).abs().max()) <= 2e-6 * max(1.0, float(wanted[name].abs().max())), name
    # Per-item results come back in the batch's own order.
    scores = engine.infer_batch(batch, MicroBatchPlan(max_rows=4))["log_probs"]
    torch.testing.assert_close(out[0].items["log_probs"], scores, atol=1e-5, rtol=1e-5)
    with pytest.raises(EngineError) as refusal:
        build_engine({"config": dict(UNPACKABLE[family]), "tokenizer": "unused"}, attention="packed")
    assert refusal.value.found in note
    assert refusal.value.next is not None


class LeakyModel(LlamaModel):
    """Each hidden state takes a little of its left neighbour's, whoever that is."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        h = out.last_hidden_state
        out.last_hidden_state = h + 0.01 * torch.nn.functional.pad(h, (0, 0, 1, 0))[:, :-1]
        return out


class LeakyConfig(LlamaConfig):
    model_type = "rlctl_test_leaky"


class LeakyForCausalLM(LlamaForCausalLM):
    config_class = LeakyConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LeakyModel(config)
        self.post_init()


class OwnAttentionConfig(LlamaConfig):
    model_type = "rlctl_test_own_attention"


class OwnAttentionForCausalLM(LlamaForCausalLM):
    """Computes causal attention over the whole packed sequence by itself."""

    config_class = OwnAttentionConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.forward = self._attend(layer.self_attn)

    @staticmethod
    def _attend(attn):
        def forward(hidden_states, **_):
            shape = (*hidden_states.shape[:-1], -1, attn.head_dim)
            q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return attn.o_proj(out.transpose(1, 2).flatten(2)), None

        return forward


def _register(config_class, model_class) -> None:
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)


@pytest.mark.parametrize(
    ("config_class", "model_class"), [(LeakyConfig, LeakyForCausalLM), (OwnAttentionConfig, OwnAttentionForCausalLM)]
)
def test_a_model_that_looks_across_rows_is_found(config_class, model_class) -> None:
    _register(config_class, model_class)
    engine = build_engine({"config": {"model_type": config_class.model_type, **_SMALL}, "tokenizer": "unused"})
    assert engine.info is not None
    assert engine.info.notes["attention"].startswith("per_row: "), engine.info.notes
    first, second = rows((6, 8), seed=5)
    batch = batch_of([first, second])
    together = engine.infer_batch(batch, MicroBatchPlan(max_rows=2))["log_probs"]
    alone = engine.infer_batch(batch_of([second]), MicroBatchPlan(max_rows=1))["log_probs"]
    torch.testing.assert_close(together[6:], alone, atol=1e-6, rtol=1e-6)


def test_asking_for_per_row_is_honoured_and_equal() -> None:
    batch = batch_of(rows((5, 9, 5, 3)))
    packed = build_engine(model_section("qwen3"))
    single = build_engine(model_section("qwen3"), attention="per_row")
    assert single.info is not None
    assert single.info.notes["attention"] == "per_row: asked for"
    a = packed.infer_batch(batch, MicroBatchPlan(max_rows=4), ("log_probs", "entropy"))
    b = single.infer_batch(batch, MicroBatchPlan(max_rows=4), ("log_probs", "entropy"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-6, rtol=1e-6)


def test_a_window_that_only_masks_know_is_found() -> None:
    """Chunked attention (Llama 4) lives in masks; the probe's rows are shorter than real chunks."""
    attention.register()
    with attention.tracing() as trace:
        attention.strict_mask(local_size=8192, attention_mask=None)
    assert trace.mask_windows == {8192}
    assert trace.windows == set()
    config = {
        "model_type": "llama4_text", **_SMALL, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2,
        "num_experts_per_tok": 1, "moe_layers": [], "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 8192, "no_rope_layers": [1, 0],
    }  # fmt: skip
    engine = build_engine({"config": config, "tokenizer": "unused"})
    assert engine.info is not None
    assert (
        engine.info.notes["attention"]
        == "per_row: a local window (8192) is in the masks only, which packing does not build"
    )


def test_padding_masks_and_lost_boundaries_are_refused() -> None:
    engine = build_engine(model_section("llama"))
    model = engine.local_module()
    ids = torch.ones(1, 4, dtype=torch.long)
    with attention.attention_set(model, attention.NAME):
        with pytest.raises(EngineError, match="no padding mask"):
            model(input_ids=ids, attention_mask=torch.tensor([[0, 1, 1, 1]]), use_cache=False)
        with pytest.raises(EngineError, match="row boundaries"):
            model(input_ids=ids, use_cache=False)
    # Outside of the engine's calls the model has its own attention back, so generation works.
    assert model(input_ids=ids, attention_mask=torch.tensor([[0, 1, 1, 1]]), use_cache=False).logits.shape[1] == 4


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", HeadSpec()),
        ("gpt2", HeadSpec()),
        ("gemma2", HeadSpec(softcap=30.0)),
        ("cohere", HeadSpec(scale=0.0625)),
        ("granite", HeadSpec(scale=0.125)),
    ],
)
def test_the_head_is_found_by_trying_it(family, spec) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build_engine(model_section(family)).local_module()
    found, _ = probe_head(model, torch.device("cpu"))
    assert found == spec


class OddHeadConfig(LlamaConfig):
    model_type = "rlctl_test_odd_head"


class OddHeadForCausalLM(LlamaForCausalLM):
    config_class = OddHeadConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = torch.sign(out.logits) * out.logits.abs().sqrt()
        return out


def test_a_head_that_nothing_explains_falls_back_to_the_models_own_logits() -> None:
    _register(OddHeadConfig, OddHeadForCausalLM)
    for mode in ("auto", "per_row"):
        engine = build_engine(
            {"config": {"model_type": "rlctl_test_odd_head", **_SMALL}, "tokenizer": "unused"}, attention=mode
        )
        assert engine.info is not None
        assert engine.info.notes["logits"].startswith("the model's own forward: "), engine.info.notes
        batch = batch_of(rows((5, 9, 5, 3)))
        scores = engine.infer_batch(batch, MicroBatchPlan(max_rows=2), ("log_probs", "entropy"))
        log_p = padded_log_probs(engine.local_module(), batch).detach()
        mask = batch.items["loss_mask"]
        want = log_p.gather(-1, batch.items["input_ids"][:, None])[:, 0]
        torch.testing.assert_close(scores["log_probs"][mask], want[mask], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores["entropy"][mask], -(log_p.exp() * log_p).sum(-1)[mask], atol=1e-5, rtol=1e-5)
        assert engine.train_batch(batch, nll, MicroBatchPlan(max_rows=2)).step.grad_norm > 0
