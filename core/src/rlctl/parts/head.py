"""How a model turns its last hidden states into logits, found by trying it.

The head is a weight ``[V, D]``, an optional bias, a scale and an optional cap:
``logits = cap(scale * (hidden @ weight.T + bias))`` with ``cap(x) = softcap * tanh(x / softcap)``. The probe feeds the
model's own ``forward`` random hidden states large enough for a cap to show, and looks for the scale and cap that explain
the logits, taking exact values from the numbers in the model's config. Nothing depends on the model's name.

Shapes: V vocabulary, D hidden, T probe tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

_PROBE_TOKENS = 4
_PROBE_PEAK = 90.0
"""Largest plain logit of the probe: well beyond the caps in use (30 to 50)."""


@dataclass(frozen=True)
class HeadSpec:
    """The function from hidden states to logits, beside the weights."""

    scale: float = 1.0
    softcap: float | None = None

    def describe(self) -> str:
        """Words for the notes of :class:`rlctl.engine.EngineInfo`."""
        words = ["linear"]
        if self.scale != 1.0:
            words.append(f"scale {self.scale:g}")
        if self.softcap is not None:
            words.append(f"softcap {self.softcap:g}")
        return ", ".join(words)

    def apply(self, raw: torch.Tensor) -> torch.Tensor:
        """Scale and cap ``raw`` (the plain matrix product), in its dtype."""
        if self.scale != 1.0:
            raw = raw * self.scale
        if self.softcap is not None:
            raw = torch.tanh(raw / self.softcap) * self.softcap
        return raw


def decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """The part of ``model`` that makes hidden states, or None when it is not a module of its own."""
    base = model.base_model
    return None if base is model else base


def head_of(model: PreTrainedModel) -> tuple[nn.Parameter, nn.Parameter | None] | None:
    """(weight ``[V, D]``, bias ``[V]`` or None) of the output layer, or None when it has no such form."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        return None
    bias = getattr(head, "bias", None)
    return weight, bias if isinstance(bias, nn.Parameter) else None


def _config_numbers(config: Any) -> Iterator[float]:
    values = config.to_dict() if hasattr(config, "to_dict") else config
    for value in values.values():
        if isinstance(value, dict):
            yield from _config_numbers(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < abs(value) < 1e9:
            yield float(value)


@torch.no_grad()
def probe_head(model: PreTrainedModel, device: torch.device) -> tuple[HeadSpec | None, str]:
    """Find the :class:`HeadSpec` of ``model``, whose weights must be whole (run inside the root's forward).

    Returns:
        the spec and a note, or None and why the model's own ``forward`` has to make the logits.
    """
    decoder, head = decoder_of(model), head_of(model)
    if decoder is None or head is None:
        return None, "the model has no separate decoder and linear head"
    weight, bias = head
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _PROBE_TOKENS, weight.shape[1], generator=generator)
    plain = F.linear(hidden.to(device), weight.float(), None if bias is None else bias.float())
    factor = _PROBE_PEAK / max(float(plain.abs().max()), 1e-20)
    hidden = (hidden * factor).to(device, weight.dtype)
    calls = 0

    def substitute(_module: nn.Module, _args: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        output.last_hidden_state = hidden
        return output

    hook = decoder.register_forward_hook(substitute)
    try:
        ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=device)
        logits = model(input_ids=ids, use_cache=False).logits
    except (AttributeError, TypeError) as error:
        # A decoder that returns no last_hidden_state, or a forward with other arguments: not a head of this form.
        return None, f"the head could not be tried ({type(error).__name__}: {error})"
    finally:
        hook.remove()
    if calls != 1 or logits.shape != (1, _PROBE_TOKENS, weight.shape[0]):
        return None, f"the logits have shape {tuple(logits.shape)} after {calls} decoder calls"
    return _explain(F.linear(hidden, weight, bias).double(), logits.double(), weight.dtype, model.config)


def _explain(plain: torch.Tensor, logits: torch.Tensor, dtype: torch.dtype, config: Any) -> tuple[HeadSpec | None, str]:
    tolerance = (1e-5 if dtype == torch.float32 else 3e-2) * max(float(logits.abs().max()), 1e-20)

    def error(spec: HeadSpec) -> float:
        value = float((spec.apply(plain) - logits).abs().max())
        return value if value == value else float("inf")

    if error(HeadSpec()) <= tolerance:
        return HeadSpec(), "plain linear head"
    numbers = sorted(set(_config_numbers(config)))
    scales = [1.0, *numbers, *(1.0 / n for n in numbers)]
    caps = [None, *(n for n in numbers if n > 0)]
    best = min((HeadSpec(s, c) for s in scales for c in caps), key=error)
    if error(best) <= tolerance:
        return best, best.describe()
    return None, "no scale and cap of the config explain the logits"
