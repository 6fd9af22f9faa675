"""Tiny models of real families, written as Hugging Face directories that both sides load.

Sizes fit the topology under test (heads over tp and usp, layers over stages, experts over ep). Weights are drawn so that a
fault shows: attention scores and logits are of order one, no norm weight is exactly one and no bias zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.capabilities import AxisProblem, check_topology
from rlctl.constraints import ModelFacts
from rlctl.errors import CapabilityError
from rlctl.records import BackendSpec, ModelType
from rlctl.topology import Topology

VOCAB = 61
"""A prime: a head that is split over ranks needs padding, which must then show nowhere."""
HEAD_DIM = 8
LONGEST_ROW = 64

MOE = ("mixtral", "qwen3_moe")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "gpt_neox", "gpt2", "mistral", *MOE)
"""The families that ``tiny:FAMILY`` knows. Of these qwen3, gemma3 and gpt2 tie the head to the embedding."""
VALUE_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", *MOE)
"""Those that transformers has with the value head ``score`` on top."""


@dataclass(frozen=True)
class TinyModel:
    """A family at certain sizes."""

    family: str
    num_heads: int = 4
    num_kv_heads: int = 2
    num_layers: int = 2
    num_experts: int = 0
    model_type: ModelType = ModelType.LANGUAGE_MODEL

    @property
    def name(self) -> str:
        """As the command line writes it."""
        return f"tiny:{self.family}"

    @property
    def slug(self) -> str:
        """A directory name."""
        head = "-value" if self.model_type is ModelType.VALUE_MODEL else ""
        sizes = f"h{self.num_heads}-kv{self.num_kv_heads}-l{self.num_layers}-e{self.num_experts}"
        return f"{self.family}-{sizes}{head}"

    @property
    def facts(self) -> ModelFacts:
        """What constraints ask of it."""
        return ModelFacts(self.num_heads, self.num_kv_heads, self.num_layers, self.num_experts)

    def config(self) -> dict[str, Any]:
        """Its Hugging Face config, ``model_type`` included."""
        return _config(self)


def fit_tiny(
    family: str, spec: BackendSpec, topology: Topology, device: str, vendor: str | None, model_type: ModelType
) -> TinyModel:
    """The first sizes of ``family`` that the backend's constraints allow under ``topology``.

    Raises:
        CapabilityError: the backend refuses the topology for every size, or the family has no value head.
    """
    if model_type is ModelType.VALUE_MODEL and family not in VALUE_FAMILIES:
        raise CapabilityError(
            f"there is no value model tiny:{family}: transformers has no token classifier of it with a head called score",
            found=family,
            wanted=", ".join(VALUE_FAMILIES),
            next=f"--model tiny:{VALUE_FAMILIES[0]}",
        )
    first: tuple[AxisProblem, ...] = ()
    for candidate in _candidates(family, topology, model_type):
        fit = check_topology(spec, topology, device, vendor, model_type, candidate.facts)
        if not fit.problems:
            return candidate
        first = first or fit.problems
    raise CapabilityError(
        f"backend {spec.name!r} cannot run tiny:{family} under this topology on {device}",
        details=[str(p) for p in first],
        found=", ".join(f"{k}={v}" for k, v in topology.axes().items()) or "one process",
        wanted="sizes that its capabilities allow",
        next=f"rlctl capabilities --backend {spec.name}",
    )


def _candidates(family: str, topology: Topology, model_type: ModelType) -> Iterable[TinyModel]:
    split = topology.tp * topology.usp
    stages = topology.pp * topology.vpp
    # A few sizes serve most topologies, so that one reference serves many.
    heads = [h for h in dict.fromkeys((4, 8, 12, math.lcm(4, split))) if h % split == 0]
    layers = math.lcm(2, stages)
    experts = math.lcm(4, topology.ep * topology.etp) if family in MOE else 0
    for h, kv in itertools.product(heads, (2, 4, 3, 1, 8, 6, 12, split)):
        one_kv = family in ("gpt_neox", "gpt2")  # these have no grouped heads
        if h % kv == 0 and kv < h and not one_kv:
            yield TinyModel(family, h, kv, layers, experts, model_type)
    for h in heads:
        yield TinyModel(family, h, h, layers, experts, model_type)


def _config(model: TinyModel) -> dict[str, Any]:
    width = model.num_heads * HEAD_DIM
    experts = model.num_experts or 1
    base: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": width,
        # Divides by every size of tp that the heads divide by.
        "intermediate_size": width * 3 // 2,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "max_position_embeddings": LONGEST_ROW,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    grouped = {**base, "num_key_value_heads": model.num_kv_heads, "head_dim": HEAD_DIM}
    moe = {"num_experts_per_tok": 2, "output_router_logits": False}
    # Experts have been counted so that ep and etp divide them, and so etp divides their matrices.
    of_mixtral = {"num_local_experts": model.num_experts, "intermediate_size": math.lcm(width * 3 // 2, experts)}
    kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(model.num_layers)]
    configs: Mapping[str, dict[str, Any]] = {
        "llama": {"model_type": "llama", **grouped},
        "qwen2": {
            "model_type": "qwen2",
            **{k: v for k, v in grouped.items() if k != "head_dim"},
            "tie_word_embeddings": False,
        },
        # Looking a padding token up trains nothing of its row, also where it stands in a row as any other.
        "qwen3": {"model_type": "qwen3", **grouped, "tie_word_embeddings": True, "pad_token_id": 0},
        "gemma3": {
            "model_type": "gemma3_text",
            **grouped,
            "sliding_window": 6,
            "query_pre_attn_scalar": HEAD_DIM,
            "layer_types": kinds,
            "pad_token_id": 0,
        },
        "gpt_neox": {"model_type": "gpt_neox", **base, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        "gpt2": {
            "model_type": "gpt2",
            "vocab_size": VOCAB,
            "n_embd": width,
            "n_layer": model.num_layers,
            "n_head": model.num_heads,
            "n_positions": LONGEST_ROW,
            "bos_token_id": None,
            "eos_token_id": 1,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
        "mistral": {"model_type": "mistral", **grouped, "sliding_window": 6},
        "mixtral": {"model_type": "mixtral", **grouped, **moe, **of_mixtral},
        "qwen3_moe": {
            "model_type": "qwen3_moe",
            **grouped,
            **moe,
            "num_experts": model.num_experts,
            "moe_intermediate_size": math.lcm(24, experts),
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    }
    of_values = {"num_labels": 1, "classifier_dropout": 0.0, "token_classification_bias": False}
    return configs[model.family] | (of_values if model.model_type is ModelType.VALUE_MODEL else {})


def write_tiny(model: TinyModel, into: Path, seed: int = 0) -> Path:
    """Write ``model`` below ``into`` unless it is there; returns its directory."""
    directory = into / model.slug
    if (directory / "config.json").is_file():
        return directory
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    from rlctl.hf_quiet import quiet_transformers

    kind = AutoModelForCausalLM if model.model_type is ModelType.LANGUAGE_MODEL else AutoModelForTokenClassification
    values = model.config()
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built: Any = kind.from_config(config, dtype=torch.float32)
        if model.model_type is ModelType.VALUE_MODEL and built.score.bias is not None:
            built.score.bias = None  # transformers before 5.17 knows no token_classification_bias
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                noise = torch.randn_like(parameter)
                if parameter.ndim <= 1:
                    parameter += 0.2 * noise
                else:
                    # Router logits are spread out, so that which experts win does not hang on the last digit.
                    spread = 3.0 if _is_router(name) else 1.0
                    parameter.copy_(noise * spread / math.sqrt(parameter.shape[-1]))
    with quiet_transformers():
        built.save_pretrained(directory)
    return directory


def _is_router(name: str) -> bool:
    return name.endswith((".gate.weight", ".router.weight"))
