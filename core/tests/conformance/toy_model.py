"""A small causal language model in plain torch. V vocabulary, D hidden, T tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlctl.errors import ConfigError


class ToyLM(nn.Module):
    """Embedding, the mean of the row so far beside it, one hidden layer, a head tied to the embedding."""

    def __init__(self, vocab: int = 16, hidden: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.mix = nn.Linear(2 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` -> logits ``[T, V]``; row t predicts token t + 1."""
        x = self.embed(ids)
        mean = x.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        return self.head(self.drop(self.norm(torch.tanh(self.mix(torch.cat([x, mean], dim=-1))))))


def make_model(section: Mapping[str, Any]) -> ToyLM:
    """The model of a ``model`` section, its weights from the section's seed alone."""
    if section.get("path") is not None:
        raise ConfigError("a toy is made from a config", found=section["path"], wanted="model.config")
    with torch.random.fork_rng():
        torch.manual_seed(section["seed"])
        return ToyLM(**{k: v for k, v in section["config"].items() if k != "model_type"})
