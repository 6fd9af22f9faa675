"""Which checkpoint tensors make which megatron parameter, one declarative table a family.

Loading, exporting and sharded reading all walk these tables; nothing else knows a weight's name. A table says, for each
parameter of a megatron module: its name there, the tensors of a Hugging Face checkpoint that it is made of, how they lie
inside it (:class:`Layout`), and which ranks share it (:class:`Split`).

mbridge (0.15.1 was looked at) holds such tables too and is not used. Importing it is cheap, a second beyond megatron-core and
transformers, and at tp=2 its loading and export were exact. But its tensor parallel rank 0 reads every tensor of a stage
whole and sends the others their pieces, where here each rank of a tp=2 pair reads 50.5 % of a tiny Llama at most; it works only
once megatron's global groups exist, so a directory could not be checked before; its norms have the names of Transformer
Engine layers, which need an override; and its default dtype rounds to bfloat16. What it could give us beside that are the six
short tables below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from rlctl.errors import CapabilityError
from rlctl.records import ModelType


class Layout(Enum):
    """How checkpoint tensors lie inside one megatron parameter, whole and split over ranks."""

    REPLICATED = "replicated"
    """One tensor, the same on every rank."""
    COLUMN = "column"
    """Each rank has a share of the rows (axis 0) of every tensor; the shares follow each other (gate, then up)."""
    ROW = "row"
    """One tensor, of which each rank has a share of the columns (axis 1)."""
    QKV = "qkv"
    """Queries, keys and values, interleaved by query group: the group's queries, its key, its value. Ranks share groups."""
    VOCABULARY = "vocabulary"
    """One tensor, of which each rank has a share of the rows; zeros fill the last ones up to a multiple of the ranks."""


class Split(Enum):
    """Which ranks share a parameter."""

    TP = "tp"
    ETP = "etp"


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint.

    Args:
        name: with ``{layer}`` and ``{expert}`` where it has them.
        dims: names of its sizes, keys of ``Family.sizes``.
    """

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One parameter of a megatron module.

    Args:
        megatron: its name; ``{layer}`` counts from 0 in the chunk and ``{expert}`` from 0 on the expert rank.
        stored: the checkpoint tensors that it is made of, in the order in which they lie in it.
        exported: False for a copy of what another entry exports.
    """

    megatron: str
    stored: tuple[Stored, ...]
    layout: Layout
    split: Split = Split.TP
    exported: bool = True


@dataclass(frozen=True)
class Site:
    """One parameter of the whole model: an entry at a layer and an expert, both counted over the whole model."""

    entry: Entry
    layer: int | None = None
    expert: int | None = None

    def names(self) -> tuple[str, ...]:
        """Names of its checkpoint tensors."""
        return tuple(s.name.format(layer=self.layer, expert=self.expert) for s in self.entry.stored)


@dataclass(frozen=True)
class Family:
    """One model's table and sizes.

    Args:
        first, layer, expert, last: entries before the layers, of each layer, of each expert of a layer, after the layers.
        sizes: every size that a checkpoint tensor has, by the name that the tables use.
        tied: the output layer is the embedding; no tensor of its own is stored.
        initializer_range: standard deviation of weights that start from random numbers.
    """

    model_type: str
    head: ModelType
    num_layers: int
    num_kv_heads: int
    num_experts: int
    tied: bool
    initializer_range: float
    sizes: Mapping[str, int]
    first: tuple[Entry, ...]
    layer: tuple[Entry, ...]
    expert: tuple[Entry, ...]
    last: tuple[Entry, ...]

    def layer_sites(self, layer: int) -> Iterator[Site]:
        """The parameters of one layer, all experts among them."""
        for entry in self.layer:
            yield Site(entry, layer)
        for expert in range(self.num_experts):
            for entry in self.expert:
                yield Site(entry, layer, expert)

    def sites(self) -> Iterator[Site]:
        """Every parameter of the whole model: embedding, layers, final norm, head."""
        yield from (Site(entry) for entry in self.first)
        for layer in range(self.num_layers):
            yield from self.layer_sites(layer)
        yield from (Site(entry) for entry in self.last)

    def shapes(self, entry: Entry) -> tuple[tuple[int, ...], ...]:
        """Shapes of an entry's checkpoint tensors."""
        return tuple(tuple(self.sizes[d] for d in s.dims) for s in entry.stored)

    def checkpoint(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint of this model holds, in the order of export."""
        return {
            name: shape
            for site in self.sites()
            if site.entry.exported
            for name, shape in zip(site.names(), self.shapes(site.entry), strict=True)
        }


# ---- the tables ---------------------------------------------------------------------------------------------------
_LAYER, _STORED_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."


def _layer(megatron: str, layout: Layout, *stored: tuple[str, str], split: Split = Split.TP) -> Entry:
    """An entry of each layer; ``stored`` are (name in the layer, sizes separated by blanks)."""
    tensors = tuple(Stored(_STORED_LAYER + name, tuple(dims.split())) for name, dims in stored)
    return Entry(_LAYER + megatron, tensors, layout, split)


_expert = partial(_layer, split=Split.ETP)

_EMBED_TOKENS = Stored("model.embed_tokens.weight", ("vocab", "hidden"))
_EMBEDDING = Entry("embedding.word_embeddings.weight", (_EMBED_TOKENS,), Layout.VOCABULARY)
_FINAL_NORM = Entry("decoder.final_layernorm.weight", (Stored("model.norm.weight", ("hidden",)),), Layout.REPLICATED)
_OUTPUT = Entry("output_layer.weight", (Stored("lm_head.weight", ("vocab", "hidden")),), Layout.VOCABULARY)
_TIED_OUTPUT = Entry("output_layer.weight", (_EMBED_TOKENS,), Layout.VOCABULARY, exported=False)
"""The last pipeline stage's copy of the embedding; where one stage has both, the module has no such parameter."""
_VALUE_HEAD = Entry("value_head.weight", (Stored("score.weight", ("one", "hidden")),), Layout.REPLICATED)

_ATTENTION = (
    _layer(
        "self_attention.linear_qkv.weight",
        Layout.QKV,
        ("self_attn.q_proj.weight", "queries hidden"),
        ("self_attn.k_proj.weight", "keys hidden"),
        ("self_attn.v_proj.weight", "keys hidden"),
    ),
    _layer("self_attention.linear_proj.weight", Layout.ROW, ("self_attn.o_proj.weight", "hidden queries")),
)
_QKV_BIAS = (
    _layer(
        "self_attention.linear_qkv.bias",
        Layout.QKV,
        ("self_attn.q_proj.bias", "queries"),
        ("self_attn.k_proj.bias", "keys"),
        ("self_attn.v_proj.bias", "keys"),
    ),
)
_QK_NORM = (
    _layer("self_attention.q_layernorm.weight", Layout.REPLICATED, ("self_attn.q_norm.weight", "head")),
    _layer("self_attention.k_layernorm.weight", Layout.REPLICATED, ("self_attn.k_norm.weight", "head")),
)
_MLP = (
    _layer(
        "mlp.linear_fc1.weight",
        Layout.COLUMN,
        ("mlp.gate_proj.weight", "ffn hidden"),
        ("mlp.up_proj.weight", "ffn hidden"),
    ),
    _layer("mlp.linear_fc2.weight", Layout.ROW, ("mlp.down_proj.weight", "hidden ffn")),
)
_NORMS = (
    _layer("input_layernorm.weight", Layout.REPLICATED, ("input_layernorm.weight", "hidden")),
    _layer("pre_mlp_layernorm.weight", Layout.REPLICATED, ("post_attention_layernorm.weight", "hidden")),
)
_QWEN3_MOE_ROUTER = (_layer("mlp.router.weight", Layout.REPLICATED, ("mlp.gate.weight", "experts hidden")),)
_QWEN3_MOE_EXPERT = (
    _expert(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        Layout.COLUMN,
        ("mlp.experts.{expert}.gate_proj.weight", "expert_ffn hidden"),
        ("mlp.experts.{expert}.up_proj.weight", "expert_ffn hidden"),
    ),
    _expert(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        Layout.ROW,
        ("mlp.experts.{expert}.down_proj.weight", "hidden expert_ffn"),
    ),
)
_MIXTRAL_ROUTER = (_layer("mlp.router.weight", Layout.REPLICATED, ("block_sparse_moe.gate.weight", "experts hidden")),)
_MIXTRAL_EXPERT = (
    _expert(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        Layout.COLUMN,
        ("block_sparse_moe.experts.{expert}.w1.weight", "expert_ffn hidden"),
        ("block_sparse_moe.experts.{expert}.w3.weight", "expert_ffn hidden"),
    ),
    _expert(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        Layout.ROW,
        ("block_sparse_moe.experts.{expert}.w2.weight", "hidden expert_ffn"),
    ),
)

TABLES: Mapping[str, tuple[tuple[Entry, ...], tuple[Entry, ...]]] = {
    "llama": ((*_ATTENTION, *_MLP, *_NORMS), ()),
    "mistral": ((*_ATTENTION, *_MLP, *_NORMS), ()),
    "qwen2": ((*_ATTENTION, *_QKV_BIAS, *_MLP, *_NORMS), ()),
    "qwen3": ((*_ATTENTION, *_QK_NORM, *_MLP, *_NORMS), ()),
    "qwen3_moe": ((*_ATTENTION, *_QK_NORM, *_NORMS, *_QWEN3_MOE_ROUTER), _QWEN3_MOE_EXPERT),
    "mixtral": ((*_ATTENTION, *_NORMS, *_MIXTRAL_ROUTER), _MIXTRAL_EXPERT),
}
"""Hugging Face model_type: (entries of each layer, entries of each expert)."""


# ---- a model's own table ------------------------------------------------------------------------------------------
def family_of(config: Mapping[str, Any], head: ModelType | str = ModelType.LANGUAGE_MODEL) -> Family:
    """The table and sizes of the model that a Hugging Face config describes.

    Args:
        config: the whole config as a mapping (``PretrainedConfig.to_dict()``); a config.json alone may leave defaults out.
        head: what is on top; a value model stores ``score.weight`` [1, D] instead of ``lm_head.weight``.

    Raises:
        CapabilityError: a model_type without a table, or weights that megatron's modules have no place for here.
    """
    model_type = str(config.get("model_type"))
    if model_type not in TABLES:
        raise CapabilityError(
            f"megatron trains no model of type {model_type} here",
            found=f"model_type {model_type}",
            wanted=", ".join(TABLES),
            next="`rlctl capabilities` shows which backend takes any Hugging Face causal language model",
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise CapabilityError(
                f"megatron has no place for this {model_type}'s biases here",
                found=f"{key} true",
                wanted="a model without it (only qwen2 has biases, on queries, keys and values)",
                next="choose another backend for this model",
            )
    layer, expert = TABLES[model_type]
    num_experts = _num_experts(config, model_type) if expert else 0
    head = ModelType(head)
    tied = bool(config.get("tie_word_embeddings"))
    if head is ModelType.VALUE_MODEL:
        last = (_FINAL_NORM, _VALUE_HEAD)
    else:
        last = (_FINAL_NORM, _TIED_OUTPUT if tied else _OUTPUT)
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    sizes = {
        "one": 1,
        "vocab": int(config["vocab_size"]),
        "hidden": int(config["hidden_size"]),
        "ffn": int(config["intermediate_size"]),
        "head": head_size,
        "queries": heads * head_size,
        "keys": kv_heads * head_size,
        "experts": num_experts,
        # Mixtral's experts have the size that a dense model's single one would have.
        "expert_ffn": int(config.get("moe_intermediate_size") or config["intermediate_size"]),
    }
    return Family(
        model_type=model_type,
        head=head,
        num_layers=int(config["num_hidden_layers"]),
        num_kv_heads=kv_heads,
        num_experts=num_experts,
        tied=tied,
        initializer_range=float(config.get("initializer_range") or 0.02),
        sizes=sizes,
        first=(_EMBEDDING,),
        layer=layer,
        expert=expert,
        last=last,
    )


def _num_experts(config: Mapping[str, Any], model_type: str) -> int:
    """Experts of each layer.

    Raises:
        CapabilityError: a layer without experts; megatron's local layer specs build one kind.
    """
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    step = int(config.get("decoder_sparse_step") or 1)
    plain = set(config.get("mlp_only_layers") or ())
    layers = range(int(config["num_hidden_layers"]))
    dense = [i for i in layers if not experts or i in plain or (i + 1) % step]
    if dense:
        raise CapabilityError(
            f"megatron trains a {model_type} only where every layer has experts",
            found=f"{len(dense)} of {len(layers)} layers without, first {dense[0]} (num_experts {experts}, "
            f"decoder_sparse_step {step}, mlp_only_layers {sorted(plain)})",
            wanted="experts in every layer",
            next="choose another backend for this model",
        )
    return experts
