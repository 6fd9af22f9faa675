"""Which tokens can a module's output for a token depend on? Found by running the model, never by its name.

Rows lie end to end, so nothing may look across their borders. Under sequence parallelism each rank holds a slice of the
sequence, and nothing but attention may look beyond a token at all: a convolution, a recurrence or a pooling over
neighbours would silently lose what lies across the border of a slice. So the model runs twice, with some tokens
exchanged, and what every module makes of the others must stay what it was.

Modules are compared one by one, each by its own scale. In the logits a convolution of small weights drowns beside the
residual stream, and in half precision it vanishes, until training has made it large.

Shapes: T probe tokens, V vocabulary, H query heads, G key/value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from rlctl.parts import attention

NAME = "rlctl_token_local"
_TOKENS = 29
"""A prime, so that hardly another dimension of a model has this size."""
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}
_TOLERANCE_LOW = 1e-2
"""Two roundings of bfloat16: the experts of a mixture may add up in another order for other neighbours."""


def token_local_attention(
    module: nn.Module,
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


def leak_between_rows(model: PreTrainedModel, vocab_size: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """The first module, in words, whose output for one packed row changes with the row before it; None when none does.

    Args:
        model: whole weights, in eval mode; run it inside the root's forward when sharded.
        dtype: dtype of the computation, which sets the tolerance.
    """
    start = _TOKENS // 2
    places = torch.cat([torch.arange(start), torch.arange(_TOKENS - start)])
    kept = torch.arange(_TOKENS) >= start
    found = _first_change(model, attention.NAME, vocab_size, device, dtype, [0, start, _TOKENS], kept, [places] * 2)
    return found and f"{found} with the tokens of another row"


def mixing_outside_attention(
    model: PreTrainedModel, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The first module, in words, that looks at more than one token although attention mixes nothing; None when none does.

    Attention is replaced by a function of each token's own query, key and value.

    Args:
        model: whole weights, in eval mode; run it inside the root's forward when sharded.
        dtype: dtype of the computation, which sets the tolerance.
    """
    AttentionInterface.register(NAME, token_local_attention)
    AttentionMaskInterface.register(NAME, attention.strict_mask)
    # At random, so that whatever distance a layer looks back, some kept token has an exchanged one there.
    kept = torch.rand(_TOKENS, generator=torch.Generator().manual_seed(1)) < 0.5
    places = torch.arange(_TOKENS)
    both = [places, torch.where(kept, places, places.flip(0))]
    found = _first_change(model, NAME, vocab_size, device, dtype, [0, _TOKENS], kept, both)
    return found and f"{found} with its neighbours, and it is no attention"


@torch.no_grad()
def _first_change(
    model: PreTrainedModel,
    attention_name: str,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    bounds: list[int],
    kept: torch.Tensor,
    places: list[torch.Tensor],
) -> str | None:
    """Run twice, with other tokens where ``kept`` ``[T]`` is False; ``places`` are the positions in each run."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(0, vocab_size, (2, _TOKENS), generator=generator)
    starts = torch.tensor(bounds, dtype=torch.int32, device=device)
    longest = int((starts[1:] - starts[:-1]).max())
    seen: list[list[tuple[str, torch.Tensor]]] = []
    with attention.attention_set(model, attention_name):
        for ids, positions in zip((first, torch.where(kept, first, second)), places, strict=True):
            with _watching(model, kept.to(device)) as outputs:
                model(
                    input_ids=ids[None].to(device),
                    position_ids=positions[None].to(device),
                    use_cache=False,
                    cu_seq_lens_q=starts,
                    cu_seq_lens_k=starts,
                    max_length_q=longest,
                    max_length_k=longest,
                )
            seen.append(outputs)
    tolerance = _TOLERANCE.get(dtype, _TOLERANCE_LOW)
    for (name, before), (again, after) in zip(*seen, strict=False):
        if name != again or before.shape != after.shape:
            return f"{name} runs or not"
        scale = float(before.abs().max()) or 1.0
        change = float((after - before).abs().max()) / scale
        if not change <= tolerance:
            return f"the output of {name} for a token changes by {change:.1e} of the largest"
    return None


@contextmanager
def _watching(model: PreTrainedModel, kept: torch.Tensor) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Collect (module, its output for the kept tokens) of every module with an output ``[1, T, ...]`` or ``[1, C, T]``."""
    found: list[tuple[str, torch.Tensor]] = []

    def watch(name: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) and output else output
            out = getattr(out, "logits", getattr(out, "last_hidden_state", out))
            if not isinstance(out, torch.Tensor) or out.ndim < 3 or out.shape[0] != 1 or not out.is_floating_point():
                return
            dims = [d for d in (1, 2) if out.shape[d] == _TOKENS]
            if len(dims) == 1:
                found.append((f"{type(module).__name__} ({name})", out.movedim(dims[0], 0)[kept].detach().clone()))

        return module.register_forward_hook(hook)

    hooks = [watch(name or "the model", module) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
