"""What the engine asks of the adapters of its model; without ``model.lora`` there is no such object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlctl.batch import PackedBatch
from rlctl.engine import MicroOutput
from rlctl.logits import LossFn
from rlctl.scoring import ScoreLoss
from rlctl.sync import fingerprint_tensor
from rlctl_fsdp.lora.directory import write_adapters
from rlctl_fsdp.lora.effect import check_effect, probe_batch
from rlctl_fsdp.lora.inject import adapted_layers, fused_experts_note, switch
from rlctl_fsdp.lora.merge import whole

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ForwardBackward = Callable[[Sequence[PackedBatch], LossFn, bool], list[MicroOutput]]


class Adapters:
    """The adapters of one built model. Made on every rank alike: collective where weights are shards.

    Args:
        section: ``model.lora``.
        source: where the base model comes from, for adapter_config.json.
        value: the model has a value head.
    """

    def __init__(self, model: PreTrainedModel, section: Mapping[str, Any], source: str | None, *, value: bool) -> None:
        self._model, self._section, self._source, self._value = model, section, source, value
        base: list[Any] = [layer.base_layer.weight for _, layer in adapted_layers(model)]
        self._num_layers = len(base)
        self.base = "-".join(fingerprint_tensor(whole(weight)) for weight in (base[0], base[-1]))
        """Fingerprint of the frozen weights, by the first and the last that have an adapter."""

    def note(self) -> str:
        """For :class:`rlctl.engine.EngineInfo`."""
        trained = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        section = self._section
        words = f"rank {section['rank']}, alpha {section['alpha']:g}, on {self._num_layers} layers: {trained:,} weights are trained"
        return words + fused_experts_note(self._model)

    def seed_dropout(self, seed: int, rank: int) -> None:
        """Each rank drops elements of its own tokens; a run can be repeated."""
        if float(self._section["dropout"]):
            torch.manual_seed(seed * 1_000_003 + rank)

    def switch(self, enabled: bool) -> None:
        """See :func:`rlctl_fsdp.lora.inject.switch`."""
        switch(self._model, enabled)

    def write(self, dest: Path, *, writer: bool) -> None:
        """See :func:`rlctl_fsdp.lora.directory.write_adapters`."""
        write_adapters(self._model, dest, self._source, writer=writer)

    def check_effect(
        self,
        run: ForwardBackward,
        vocab_size: int,
        largest: Callable[[list[float]], list[float]],
        clear: Callable[[], None],
    ) -> None:
        """See :func:`rlctl_fsdp.lora.effect.check_effect`.

        Args:
            run: the engine's own pass; it is run in evaluation mode.
            clear: drops gradients.
        """
        batch, name = probe_batch(vocab_size), "values" if self._value else "log_probs"

        def score() -> torch.Tensor:
            return run([batch], ScoreLoss((name,)), True)[0].items[name].float()

        def backward() -> None:
            run([batch], ScoreLoss((name,)), False)

        config = self._model.config.get_text_config()
        some_experts = any((getattr(config, key, None) or 0) > 1 for key in _EXPERTS)
        try:
            check_effect(self._model, score, backward, largest, every=not some_experts)
        finally:
            clear()
