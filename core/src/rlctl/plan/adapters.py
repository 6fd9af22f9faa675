"""Memory of a training engine that trains adapters (``model.lora``): the model's weights are there, and nothing more of them.

Gradients and moments are those of the adapters, in float32. Activations are those of full training, an upper bound where few layers
have adapters, and what each adapter keeps beside them.

Legend: r rank, D hidden, F feed-forward, T tokens of a micro-batch on this rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlctl.config.schema_lora import LoraConfig, chosen_layers, names_hint
from rlctl.plan.activations import Precision
from rlctl.plan.memory import Item, Load, Moment, Setting
from rlctl.plan.parameters import DTYPE_BYTES, LayerCount, ParameterCount
from rlctl.plan.shapes import ModelShape
from rlctl.plan.training import StateMemory, TrainMemory

_FLOAT32 = DTYPE_BYTES["float32"]


@dataclass(frozen=True)
class AdapterCount:
    """Adapters of a model.

    Args:
        num_layers: linear layers that have one.
        parameters: of all adapters.
        rank: elements a token between A and B.
    """

    num_layers: int
    parameters: int
    rank: int


def count_adapters(shape: ModelShape, lora: LoraConfig) -> AdapterCount:
    """Adapters on the layers that ``target_modules`` matches; experts have none. Layers without experts come first."""
    sizes = {name: (inputs, outputs) for name, inputs, outputs in _linears(shape)}
    try:
        chosen = chosen_layers(list(sizes), lora.target_modules, lora.exclude_modules)
    except re.error:  # which the configuration's faults say
        chosen = []
    return AdapterCount(len(chosen), lora.rank * sum(sum(sizes[name]) for name in chosen), lora.rank)


def unmatched_targets(shape: ModelShape, lora: LoraConfig) -> tuple[str, str] | None:
    """(what is wrong, the nearest thing that works) where adapters would be on no layer; None where some are."""
    if count_adapters(shape, lora).num_layers:
        return None
    names = list(dict.fromkeys(name.rpartition(".")[2] for name, _, _ in _linears(shape)))
    targets = lora.target_modules
    shown = targets if isinstance(targets, str) else ", ".join(targets)
    what = f"target_modules {shown} without exclude_modules {lora.exclude_modules}" if lora.exclude_modules else shown
    hint = names_hint([name for name, _, _ in _linears(shape)], targets) or "target_modules=all-linear"
    return f"{what} matches no linear layer of the model, which are {', '.join(names)}", hint


def _linears(shape: ModelShape) -> Iterator[tuple[str, int, int]]:
    """(name, inputs, outputs) of every linear layer inside the model, by the names that Hugging Face gives them."""
    d, f, q, kv = shape.hidden_size, shape.intermediate_size, shape.query_size, shape.kv_size
    for i in range(shape.num_layers):
        if shape.family.fused_qkv:
            layer = f"gpt_neox.layers.{i}"
            yield f"{layer}.attention.query_key_value", d, q + 2 * kv
            yield f"{layer}.attention.dense", q, d
            yield f"{layer}.mlp.dense_h_to_4h", d, f
            yield f"{layer}.mlp.dense_4h_to_h", f, d
            continue
        layer = f"model.layers.{i}"
        for name, inputs, outputs in (("q", d, q), ("k", d, kv), ("v", d, kv), ("o", q, d)):
            yield f"{layer}.self_attn.{name}_proj", inputs, outputs
        if i < shape.num_layers - shape.moe_layers:
            for name, inputs, outputs in (("gate", d, f), ("up", d, f), ("down", f, d)):
                yield f"{layer}.mlp.{name}_proj", inputs, outputs


@dataclass(frozen=True)
class AdapterState(StateMemory):
    """Frozen weights and trained adapters. ``trained`` counts the adapters, which come on top of ``total``."""

    def weights(self) -> Item:
        base = super().weights()
        mine, over = self._share("weights", self.trained)
        words = f"{base.formula}, and {self.trained:,} of adapters x {_FLOAT32} bytes (float32){over}"
        return self.item("weights", base.num_bytes + mine * _FLOAT32, words)

    def gradients(self) -> Item:
        mine, over = self._share("gradients", self.trained)
        return self.item(
            "gradients", mine * _FLOAT32, f"{self.trained:,} parameters of adapters x {_FLOAT32} bytes{over}"
        )

    def optimizer(self) -> Item:
        mine, over = self._share("optimizer", self.trained)
        moments = [name for name, dtype in self.setting.policy.optimizer if dtype != "main"]
        words = " + ".join(f"{name} {_FLOAT32} bytes" for name in moments)
        return self.item(
            "optimizer", mine * _FLOAT32 * len(moments), f"{self.trained:,} parameters of adapters x ({words}){over}"
        )


class AdapterMemory(TrainMemory):
    """:class:`rlctl.plan.training.TrainMemory` of an engine whose own weights have no gradients."""

    def __init__(
        self,
        role: str,
        shape: ModelShape,
        count: ParameterCount,
        precision: Precision,
        setting: Setting,
        load: Load,
        adapters: AdapterCount,
    ) -> None:
        super().__init__(role, shape, count, precision, setting, load)
        self.adapters = adapters
        self.state = AdapterState(role, count.total, adapters.parameters, precision, setting, self.state.experts)
        self.head = replace(self.head, frozen=True)

    def under(self, setting: Setting, load: Load | None = None) -> AdapterMemory:
        return AdapterMemory(self.state.role, self.shape, self.count, self.p, setting, load or self.load, self.adapters)

    def layer_bytes(self, kind: LayerCount) -> float:
        a = self.adapters
        middle = a.num_layers / self.shape.num_layers * a.rank * self.p.compute_bytes * self.load.tokens
        return super().layer_bytes(kind) + middle

    def _gradients_so_far(self, done: int, begun: float) -> list[Item]:
        each = self.adapters.parameters / self.shape.num_layers
        size = (done + begun) * each * _FLOAT32
        return [self._item("gradients", size, f"those of the adapters of {done} layers and of one more")]

    def _embedding_backward(self, held: list[Item]) -> Moment:
        return Moment("embedding's backward", (*held, self._working(0, "nothing: the embedding is frozen")))
