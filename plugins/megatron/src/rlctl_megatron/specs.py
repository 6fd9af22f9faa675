"""The modules that a layer is made of, and the chunk of layers that a rank runs.

megatron-core's local modules, with three of ours in their places: RMSNorm that computes as Hugging Face does and works under
sequence parallel, core attention over packed rows (:mod:`rlctl_megatron.attention`), and a chunk that hands out hidden states,
since logits are the reader's matter.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from rlctl_megatron import compat
from rlctl_megatron.architecture import Architecture
from rlctl_megatron.attention import PackedAttention


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), in float32 whatever the input's dtype.

    Its gradient covers the tokens, or the heads, of one tp rank; megatron-core sums it over tp where the mark on the weight
    says so.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., D]`` -> ``[..., D]``."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(hidden.dtype)


def block_spec(config: TransformerConfig, vp_stage: int | None, *, engine: bool) -> TransformerBlockSubmodules:
    """The layers that this rank builds for one chunk; with ``engine`` as megatron-core makes them of Transformer Engine."""
    spec = compat.decoder_spec(config, vp_stage, engine=engine)
    if engine:
        return spec
    assert spec.layer_specs is not None
    for layer in spec.layer_specs:
        parts: Any = layer.submodules
        attention = parts.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec.layer_norm = RMSNorm  # type: ignore[assignment]
    return spec


class ChunkModel(GPTModel):
    """A chunk whose last stage returns hidden states ``[T, 1, D]`` after the final norm (of this rank's tokens under sp).

    Args:
        value: a value head ``[1, D]`` in place of the vocabulary's; the same on every tp rank.
        engine: layers of Transformer Engine's modules.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        padded_vocab: int,
        *,
        first: bool,
        last: bool,
        value: bool,
        engine: bool,
        vp_stage: int | None,
    ) -> None:
        tied = architecture.tied and not value
        super().__init__(
            config,
            block_spec(config, vp_stage, engine=engine),  # type: ignore[arg-type]
            padded_vocab,
            architecture.max_positions,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            **compat.stage_argument(vp_stage),
        )
        self.value_head: nn.Linear | None = None
        self.of_engine = engine
        if value and last:
            del self.output_layer
            self.value_head = nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        self._padding = architecture.padding
        if first and self._padding is not None:
            self.embedding.word_embeddings.register_forward_hook(self._keep_padding)
        # As the model's config says, scaled or not; kept in float32 beside weights of lower precision.
        self.rotary_pos_emb.inv_freq = architecture.inv_freq.to(self._device())

    def _keep_padding(self, module: Any, args: tuple[torch.Tensor, ...], found: torch.Tensor) -> torch.Tensor:
        """What was looked up for the padding token gives its row no gradient, as in transformers; a tied head still does.

        Without it a row with that token in it, as any sampled row may have, trains another embedding, without a word.
        """
        if not torch.is_grad_enabled():
            return found
        here = (args[0] == self._padding)[..., None]  # [1, T, 1], as found without sp
        if module.reduce_scatter_embeddings:  # found: [T / tp, 1, D]
            group = compat.embedding_group(module)
            here = here.transpose(0, 1).chunk(group.size())[group.rank()]
        return torch.where(here, found.detach(), found)

    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedSeqParams,
    ) -> torch.Tensor:
        """``[1, f]`` tokens of rows that lie end to end; what comes out is told by the class."""
        if compat.STAGE_BY_GLOBAL:
            return compat.hidden_states(self, input_ids, position_ids, packed_seq_params)
        return super().forward(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params)  # type: ignore[arg-type]

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        return hidden_states

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """As megatron-core's; its language module takes it for granted that the last stage has a vocabulary."""
        if self.value_head is None:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, compat.sharding_metadata(metadata))

    def head_weight(self) -> torch.Tensor:
        """``[V / tp, D]`` this rank's rows of the head (last stage only)."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None, "an untied head has rows of its own"
        return weight
