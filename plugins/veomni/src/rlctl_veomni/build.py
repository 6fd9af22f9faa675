"""A model of VeOmni's, sharded by VeOmni, with the weights of a ``model`` section in it.

Built empty, on the meta device, and given memory once it is sharded: no rank ever holds all of it. VeOmni refuses that on one
rank ("Only FSDP training supports init_device=meta"); there the function behind it is called, which shards over one rank as
it does over many.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from veomni.arguments.arguments_types import MixedPrecisionConfig  # pyright: ignore[reportMissingImports]
from veomni.distributed.torch_parallelize import (  # pyright: ignore[reportMissingImports]
    build_parallelize_model,
    parallelize_model_fsdp2,
)
from veomni.models import build_foundation_model  # pyright: ignore[reportMissingImports]

from rlctl import device as devices
from rlctl.errors import CapabilityError, ConfigError, EngineError
from rlctl.hf_config import load_config, starts_random
from rlctl.parts import fsdp, values
from rlctl.parts.agreement import agreed
from rlctl.records import ModelType
from rlctl_veomni import attention, families, kernels, standins, weights
from rlctl_veomni.config import VeOmniConfig
from rlctl_veomni.job import take_jobs
from rlctl_veomni.mesh import Place
from rlctl_veomni.notices import quietly

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_EMPTY = "weights come later"
"""VeOmni ties the head to the embedding only where it is told of files; an empty model reads none."""


@dataclass(frozen=True)
class Built:
    """What a rank holds.

    Args:
        model: sharded; ``model(job=job)`` runs a job on whole weights.
        experts: VeOmni's name for how experts are computed; None for a dense model.
        notes: what a reader of the run should know of where the weights came from.
    """

    model: Any
    kernels: kernels.Kernels
    head: ModelType
    experts: str | None
    notes: Mapping[str, str]

    def drop_unreduced(self) -> None:
        """See :func:`rlctl.parts.fsdp.drop_unreduced`."""
        fsdp.drop_unreduced(self.model)

    def reshard(self) -> None:
        """After a forward without backward the root's weights are still whole; parameters must be shards again."""
        fsdp.reshard(self.model)


def compute_dtype(config: VeOmniConfig, model: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """dtype of the computation. VeOmni's own default is bfloat16 wherever it runs; here it is said.

    Raises:
        ConfigError: other master weights than float32, or a lower precision on a CPU.
    """
    if str(model.get("dtype") or "float32") != "float32":
        raise ConfigError(
            "veomni keeps master weights in float32",
            found=f"model.dtype {model['dtype']}",
            wanted="model.dtype float32; engine.param_dtype sets the computation's dtype",
            next="set model.dtype=float32",
        )
    if config.param_dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if config.param_dtype == "bfloat16" and device.type == "cpu":
        raise ConfigError(
            "veomni computes in float32 on a CPU",
            found="engine.param_dtype bfloat16",
            wanted="auto or float32",
            next="set actor.engine.param_dtype=auto",
        )
    return DTYPES[config.param_dtype]


def build(
    section: Mapping[str, Any], config: VeOmniConfig, place: Place, compute: torch.dtype, *, train: bool
) -> Built:
    """Build, shard and fill a model. Collective over all ranks; call it inside :meth:`Place.here`.

    Args:
        section: the ``model`` section; may carry ``seed`` and ``model_type``, the head.
        train: parameters will have gradients.

    Raises:
        CapabilityError: a family or sizes that this backend does not run.
        ConfigError: settings that exclude each other.
        EngineError: files that are missing, damaged or of another model.
    """
    ep = place.topology.ep
    head = ModelType(section.get("model_type") or ModelType.LANGUAGE_MODEL)
    seed = int(section.get("seed") or 0)
    hf = copy.deepcopy(load_config(section))
    families.check_config(hf)
    _check_expert_sizes(hf, place)
    mixture = bool(getattr(hf, "num_experts", None))
    experts = kernels.experts_implementation(config, ep, place.device, compute) if mixture else kernels.EAGER
    # Whatever head the files have: a value head is put on top below.
    hf.architectures = ["ForCausalLM"]
    if head is ModelType.VALUE_MODEL:
        hf.tie_word_embeddings = False
    attention.register()
    # VeOmni draws a value head that a checkpoint lacks; whoever draws after an engine was built must not see that.
    with devices.kept_random_state(place.device), quietly():
        model = build_foundation_model(
            config_path=hf,
            weights_path=_EMPTY,
            torch_dtype="float32",
            init_device="meta",
            ops_implementation=kernels.operators(experts),
        )
        if head is ModelType.VALUE_MODEL:
            del model.lm_head
            model.score = nn.Linear(hf.hidden_size, 1, bias=False, device="meta", dtype=torch.float32)
        bound = kernels.Kernels(model)
        source, files, notes = _source(section, hf, head, seed, place, model)
        model = _shard(model, config, place, compute, files, train=train)
        if files is None:
            _tie_again(model, hf)
            weights.fill(model, source, place)
        if files is not None and head is ModelType.VALUE_MODEL and not files.has_value_head:
            weights.store(model.score.weight, _fresh_head(hf, seed).to(place.device))
            notes["value_head"] = f"drawn from seed {seed}: {section['path']} is a language model"
    if place.device.type == "cpu" and ep > 1 and place.expert_shards > 1:
        standins.sum_expert_gradients((m for m in fsdp.fsdp_modules(model) if _holds_experts(m)), place.expert_shards)
    model.requires_grad_(train)
    model.eval()
    take_jobs(model)
    return Built(model, bound, head, experts if mixture else None, notes)


def _source(
    section: Mapping[str, Any], hf: Any, head: ModelType, seed: int, place: Place, model: nn.Module
) -> tuple[dict[str, torch.Tensor] | None, weights.Files | None, dict[str, str]]:
    """(rank 0's drawn weights, the files that VeOmni reads, notes). One of the first two is None on every rank."""
    random = starts_random(section)
    wanted = weights.wanted_shapes(model)
    drawn: dict[str, torch.Tensor] | None = None
    found: list[weights.Files | None] = [None]
    with agreed(place.device, place.topology.world_size, "read the model"):
        if dist.get_rank() == 0 and random:
            drawn = weights.draw(hf, seed, trust_remote_code=bool(section.get("trust_remote_code")))
            if head is ModelType.VALUE_MODEL:
                drawn[values.VALUE_HEAD] = _fresh_head(hf, seed)
        elif dist.get_rank() == 0:
            found[0] = weights.find_files(str(section["path"]), section.get("revision"), wanted)
    if random:
        return drawn, None, {}
    dist.broadcast_object_list(found, src=0, device=place.device if place.device.type != "cpu" else None)
    files = found[0]
    assert files is not None, "rank 0 found them, or no rank came here"
    unused = files.unused
    return None, files, {"unused_weights": f"{len(unused)}, first {unused[0]}"} if unused else {}


def _fresh_head(hf: Any, seed: int) -> torch.Tensor:
    return values.draw_value_head(hf.hidden_size, hf.initializer_range, seed)


def _shard(
    model: Any, config: VeOmniConfig, place: Place, compute: torch.dtype, files: weights.Files | None, *, train: bool
) -> Any:
    lower = compute != torch.float32 or config.reduce_dtype != "float32"
    precision = MixedPrecisionConfig(
        enable=lower, param_dtype=str(compute).removeprefix("torch."), reduce_dtype=config.reduce_dtype
    )
    settings: dict[str, Any] = {
        "weights_path": None if files is None else files.directory,
        "should_skip_hf_weight_load": files is None,
        "init_device": "meta",
        "mixed_precision": precision,
        "enable_reshard_after_forward": config.reshard_after_forward,
        "basic_modules": list(model._no_split_modules or ()),
        "broadcast_model_weights_from_rank0": True,
    }
    checkpointing = config.activation_checkpointing and train
    if place.topology.world_size > 1:
        return build_parallelize_model(model, enable_gradient_checkpointing=checkpointing, **settings)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return parallelize_model_fsdp2(model, **settings)


def _tie_again(model: Any, hf: Any) -> None:
    """VeOmni ties the head where it reads files; where it only makes room, embedding and head get memory of their own."""
    if hf.tie_word_embeddings:
        model.get_output_embeddings()._parameters["weight"] = model.get_input_embeddings()._parameters["weight"]


def _holds_experts(module: Any) -> bool:
    return any(families.is_fused(f"x.mlp.experts.{name}") for name, _ in module.named_parameters(recurse=False))


def _check_expert_sizes(hf: Any, place: Place) -> None:
    """The ranks that share an expert split its matrices by their second dimension, which torch wants to be even.

    Raises:
        CapabilityError: it is not.
    """
    shards = place.expert_shards
    if place.topology.ep == 1 or not getattr(hf, "num_experts", None):
        return
    sizes = {"hidden_size": hf.hidden_size, "2 x moe_intermediate_size": 2 * hf.moe_intermediate_size}
    for name, size in sizes.items():
        if size % shards:
            raise CapabilityError(
                "the ranks that share an expert cannot split it evenly",
                found=f"{name} {size} over {shards} ranks (dp_shard x usp / ep)",
                wanted=f"a multiple of {shards}",
                next="raise parallel.ep, or use fewer ranks",
            )


def check_tied(built: Built) -> None:
    """Head and embedding are one parameter where the config says so.

    Raises:
        EngineError: they are not; they would part with the first step.
    """
    model = built.model
    if built.head is ModelType.VALUE_MODEL or not model.config.tie_word_embeddings:
        return
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        raise EngineError(
            "head and embedding of this model are tied, and were built apart",
            found="two parameters",
            wanted="one",
            next="rlctl doctor: is this the veomni that was proved?",
        )
