"""Weights in: a Hugging Face directory through VeOmni's loader, once it is known to fit, or one seeded draw shared by all ranks.

VeOmni's loader draws what a checkpoint lacks at random and leaves out what it does not know, both with a line in its log. So
names and shapes are compared before it reads, on rank 0, and every rank hears of a problem.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from rlctl.errors import EngineError
from rlctl.hf_config import load_error
from rlctl.parts.values import VALUE_BIAS, VALUE_HEAD
from rlctl_veomni.families import is_fused, stored
from rlctl_veomni.mesh import Place

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Files:
    """The safetensors files of a model.

    Args:
        directory: where they are.
        has_value_head: ``score.weight`` is among them.
        unused: tensors that the model has no place for.
    """

    directory: str
    has_value_head: bool = False
    unused: Sequence[str] = ()


def wanted_shapes(model: nn.Module, ep: int = 1) -> dict[str, tuple[int, ...]]:
    """Name and whole shape of every tensor that a checkpoint of ``model`` has.

    Args:
        ep: ranks over which the experts of ``model`` are spread already.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        found |= {s.name: s.shape for s in stored(name, whole_shape(name, parameter, ep))}
    return found


def whole_shape(name: str, parameter: torch.Tensor, ep: int) -> tuple[int, ...]:
    """Shape of a parameter over all ranks: a DTensor of experts knows of those of its own rank alone."""
    shape = tuple(parameter.shape)
    return (shape[0] * ep, *shape[1:]) if is_fused(name) else shape


def find_files(path: str, revision: str | None, wanted: Shapes) -> Files:
    """Look at the files of a local directory or hub id, without reading a weight.

    Raises:
        EngineError: no safetensors files, damaged ones, or others than the config describes.
    """
    directory = Path(path)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(path, revision=revision, allow_patterns=["*.safetensors", "*.json"]))
        except (OSError, ValueError) as error:
            raise load_error(path, error) from error
    try:
        found = dict(_shapes_in(directory))
        bias = _value_bias(directory) if VALUE_BIAS in found and VALUE_HEAD in wanted else 0.0
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise load_error(path, error) from error
    if bias:
        raise EngineError(
            f"the value head of {path} has a bias",
            found=f"{VALUE_BIAS} {bias:.6g}",
            wanted="a head without bias, or a bias of zero",
            next="save it with a bias of zero",
        )
    _compare(path, found, wanted)
    unused = sorted(set(found) - set(wanted) - {"lm_head.weight", VALUE_BIAS})
    return Files(str(directory), VALUE_HEAD in found, unused)


def _compare(path: str, found: Shapes, wanted: Shapes) -> None:
    missing = sorted(set(wanted) - set(found) - {VALUE_HEAD})
    if missing:
        raise EngineError(
            f"{path} lacks weights; they would start from random numbers",
            found=f"{len(missing)} missing, first {missing[0]}",
            wanted="a checkpoint of this model, with one tensor for each matrix of each expert",
            next="set model.init=random to train it from nothing, or save it again with transformers",
        )
    odd = sorted(n for n in set(wanted) & set(found) if tuple(found[n]) != tuple(wanted[n]))
    if odd:
        raise EngineError(
            f"weights of {path} have other shapes than its config describes",
            found=f"{odd[0]} {list(found[odd[0]])}",
            wanted=f"{list(wanted[odd[0]])}",
            next="check that config.json belongs to the weight files",
        )


def _shapes_in(directory: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in _file_names(directory):
        with safe_open(directory / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, tuple(opened.get_slice(name).get_shape())


def _file_names(directory: Path) -> list[str]:
    if (directory / SINGLE).is_file():
        return [SINGLE]
    if not (directory / INDEX).is_file():
        raise OSError(f"neither {SINGLE} nor {INDEX} in {directory}")
    return sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))


def _value_bias(directory: Path) -> float:
    for file in _file_names(directory):
        with safe_open(directory / file, framework="pt") as opened:
            if VALUE_BIAS in opened.keys():  # noqa: SIM118
                return float(opened.get_tensor(VALUE_BIAS).abs().max())
    return 0.0


# ---- random numbers -----------------------------------------------------------------------------------------------
def draw(config: Any, seed: int, *, trust_remote_code: bool = False) -> dict[str, torch.Tensor]:
    """The weights of a causal language model that every backend of ours draws from this config and seed, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    return {name: p.detach() for name, p in model.named_parameters()}


@torch.no_grad()
def fill(model: nn.Module, source: Mapping[str, torch.Tensor] | None, place: Place) -> None:
    """Give every parameter the numbers of rank 0's ``source``, one whole tensor at a time. Collective over all ranks.

    Args:
        source: by VeOmni's names; None on the other ranks.
    """
    ep = place.topology.ep
    for name, parameter in model.named_parameters():
        whole = torch.empty(whole_shape(name, parameter, ep), dtype=parameter.dtype, device=place.device)
        if source is not None:
            assert source[name].shape == whole.shape, name
            whole.copy_(source[name])
        dist.broadcast(whole, src=0)
        store(parameter, whole.chunk(ep)[place.ep_rank] if is_fused(name) else whole)


@torch.no_grad()
def store(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Fill this rank's shard of a parameter from ``whole``, which all its ranks hold."""
    assert isinstance(parameter, DTensor), "VeOmni shards every parameter"
    parts = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(parts.to_local())
