"""Does every layer but attention look at one token at a time? Found by running the model, never by its name.

Sequence parallelism hands each rank a slice of the sequence and lets only attention see beyond it. A convolution, a
recurrence or a pooling over neighbours would then silently lose what lies across the border. So the model runs with an
attention that mixes nothing (a function of each token's own query, key and value) and half of its tokens are exchanged:
the logits of the other half must stay what they were. That is sharper than comparing slices with the whole, because
nothing but rounding may differ, in half precision too.

Shapes: T probe tokens, V vocabulary, H query heads, G key/value heads, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rlctl_fsdp.attention import attention_set, strict_mask

NAME = "rlctl_token_local"
_TOKENS = 24
_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
_TOLERANCE_LOW = 8e-3
"""Two roundings of bfloat16: the experts of a mixture may add up in another order for other neighbours."""


def token_local_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` ``[1, H, T, E]``, ``key`` and ``value`` ``[1, G, T, E]`` -> ``[1, T, H, Ev]``, each token by itself."""
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    out = value + query.mean(-1, keepdim=True) + key.mean(-1, keepdim=True)
    return out.to(value.dtype).transpose(1, 2), None


@torch.no_grad()
def mixing_outside_attention(
    model: PreTrainedModel, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """What was seen when a token's logits change with its neighbours although attention mixes nothing; else None.

    Args:
        model: whole weights, in eval mode; run it inside the root's forward when sharded.
        dtype: dtype of the computation, which sets the tolerance.
    """
    AttentionInterface.register(NAME, token_local_attention)
    AttentionMaskInterface.register(NAME, strict_mask)
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(0, vocab_size, (2, _TOKENS), generator=generator)
    # At random, so that whatever distance a layer looks back, some kept token has an exchanged one there.
    kept = torch.rand(_TOKENS, generator=generator) < 0.5
    places = torch.arange(_TOKENS)
    runs = [(first, places), (torch.where(kept, first, second), torch.where(kept, places, _TOKENS + places))]
    logits = []
    with attention_set(model, NAME):
        for ids, positions in runs:
            bounds = torch.tensor([0, _TOKENS], dtype=torch.int32, device=device)
            out = model(
                input_ids=ids[None].to(device),
                position_ids=positions[None].to(device),
                use_cache=False,
                cu_seq_lens_q=bounds,
                cu_seq_lens_k=bounds,
                max_length_q=_TOKENS,
                max_length_k=_TOKENS,
            )
            logits.append(out.logits[0].float()[kept.to(device)])
    scale = float(logits[0].abs().max()) or 1.0
    change = float((logits[1] - logits[0]).abs().max()) / scale
    if change <= _TOLERANCE.get(dtype, _TOLERANCE_LOW):
        return None
    return f"a token's logits change by {change:.1e} of the largest with its neighbours while attention mixes nothing"
