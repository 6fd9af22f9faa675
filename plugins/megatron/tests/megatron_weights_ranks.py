"""One rank of a four-rank gloo group: loads, exports and compares every case and writes down what it saw. Started by
test_megatron_exporting.py."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_weights_models import CONFIGS, LAYERS, config_of, differences, empty_module, read_directory, reference
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.errors import EngineError
from rlctl.topology import Topology
from rlctl_megatron import mapping
from rlctl_megatron.exporting import export_weights
from rlctl_megatron.families import Entry, Family, Layout, family_of
from rlctl_megatron.loading import Chunk, load_weights
from rlctl_megatron.mesh import Place, leave, settle
from rlctl_megatron.source import DrawnSource, FileSource, Source

WORLD = 4
CASES: dict[str, dict[str, Any]] = {
    "tp2": {"model": "llama", "axes": {"tp": 2, "dp_shard": 2}},
    "tp4": {"model": "qwen2", "axes": {"tp": 4}},
    "tp2-tied": {"model": "llama-tied", "axes": {"tp": 2, "dp_shard": 2}},
    "pp2": {"model": "qwen3", "axes": {"pp": 2, "dp_shard": 2}},
    "pp4-tied": {"model": "llama-tied", "axes": {"pp": 4}},
    "tp2-pp2": {"model": "qwen2", "axes": {"tp": 2, "pp": 2, "sp": True}},
    "tp2-pp2-tied": {"model": "llama-tied", "axes": {"tp": 2, "pp": 2}},
    "pp2-vpp2": {"model": "mistral", "axes": {"pp": 2, "vpp": 2, "dp_shard": 2}},
    "tp2-pp2-vpp2": {"model": "qwen3", "axes": {"tp": 2, "pp": 2, "vpp": 2}},
    "cp2-tp2": {"model": "llama", "axes": {"cp": 2, "tp": 2}},
    "ep2": {"model": "qwen3-moe", "axes": {"ep": 2, "dp_shard": 4}},
    "ep4": {"model": "mixtral", "axes": {"ep": 4, "dp_shard": 4}},
    "ep2-etp2": {"model": "qwen3-moe", "axes": {"ep": 2, "etp": 2, "dp_shard": 4}},
    "tp2-ep2": {"model": "mixtral", "axes": {"tp": 2, "sp": True, "ep": 2, "dp_shard": 2}},
    "tp2-ep2-etp2": {"model": "qwen3-moe", "axes": {"tp": 2, "sp": True, "ep": 2, "etp": 2, "dp_shard": 2}},
    "pp2-ep2-vpp2": {"model": "mixtral", "axes": {"pp": 2, "vpp": 2, "ep": 2, "dp_shard": 2}},
    "value-tp2": {"model": "llama-tied", "value": True, "axes": {"tp": 2, "dp_shard": 2}},
    "value-pp2": {"model": "qwen3", "value": True, "axes": {"pp": 2, "tp": 2}},
}
"""Every model is at ``models/<model>``, value models at ``models/<model>-value``."""


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors, made while it is on, that were alive at one time; the chunks' own weights do not count."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self.own = {p.untyped_storage()._cdata for c in chunks for p in c.module.parameters()}
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note every new storage that an operation makes."""
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.live and key not in self.own:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.most = max(self.most, sum(self.live.values()))
        return out


def chunks_of(
    place: Place, config: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> tuple[list[Chunk], list[dict[str, torch.Tensor]]]:
    """This rank's chunks, all NaN, and what must be in them by the second mapping."""
    t = place.topology
    chunks, wanted = [], []
    for number in range(t.vpp):
        layers = mapping.layers_of(t, LAYERS, place.pp_rank, number)
        first, last = layers[0] == 0, layers[-1] == LAYERS - 1
        right = reference(
            tensors,
            config,
            layers,
            (first, last),
            (place.tp_rank, t.tp),
            (place.ep_rank, t.ep),
            (place.etp_rank, t.etp),
        )
        wanted.append(right)
        chunks.append(Chunk(empty_module(right, dtype), layers, first, last))
    return chunks, wanted


def odd_parameters(chunks: Sequence[Chunk], wanted: Sequence[dict[str, torch.Tensor]]) -> list[str]:
    """Parameters that are not what they must be, over all chunks."""
    return [n for c, w in zip(chunks, wanted, strict=True) for n in differences(dict(c.module.named_parameters()), w)]


def odd_exports(exported: Iterator[tuple[str, torch.Tensor]], tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of an export that differ from the directory's; a name that comes twice is one."""
    found: dict[str, torch.Tensor] = {}
    twice = []
    for name, tensor in exported:
        if name in found:
            twice.append(name)
        found[name] = tensor.clone()
    return twice + differences(found, tensors)


def run_case(case: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Load a directory, export it, and say what differs from it."""
    value = bool(case.get("value"))
    directory = scratch / "models" / (case["model"] + ("-value" if value else ""))
    tensors, config = read_directory(directory), config_of(case["model"])
    family = family_of(config, "value_model" if value else "language_model")
    _, place = settle(Topology(world_size=WORLD, **case["axes"]), {}, 120)
    try:
        chunks, wanted = chunks_of(place, config, tensors)
        source = FileSource(str(directory))
        load_weights(chunks, family, place, source)
        with LiveBytes(chunks) as live:
            order = []
            for item in export_weights(chunks, family, place, None):
                order.append(item[0])
                del item  # a reader that keeps nothing
        rounded = {n: t.bfloat16() for n, t in tensors.items()}
        return {
            "loading": odd_parameters(chunks, wanted),
            "exporting": odd_exports(export_weights(chunks, family, place, None), tensors),
            "bfloat16": odd_exports(export_weights(chunks, family, place, torch.bfloat16), rounded),
            "order": order == list(family.checkpoint()),
            "most_live": live.most,
            "largest": max(sum(_bytes(s) for s in family.shapes(site.entry)) for site in family.sites()),
            "whole": sum(t.nbytes for t in tensors.values()),
            "read": source.bytes_read,
        }
    finally:
        leave(place)


def _bytes(shape: tuple[int, ...]) -> int:
    return 4 * int(torch.Size(shape).numel())


# ---- mistakes that must be seen -----------------------------------------------------------------------------------
def _swap_gate_and_up(entry: Entry) -> Entry:
    return replace(entry, stored=entry.stored[::-1]) if entry.megatron.endswith("linear_fc1.weight") else entry


def _flatten_qkv(entry: Entry) -> Entry:
    return replace(entry, layout=Layout.COLUMN) if entry.layout is Layout.QKV else entry


def run_mistakes(scratch: Path) -> dict[tuple[str, str], list[str]]:
    """Load and export with tables that are wrong in one way each; what differs."""
    directory = scratch / "models" / "llama"
    tensors, config = read_directory(directory), config_of("llama")
    right = family_of(config)
    _, place = settle(Topology(world_size=WORLD, tp=2, pp=2), {}, 120)
    out: dict[tuple[str, str], list[str]] = {}
    try:
        for name, change in {"gate_up": _swap_gate_and_up, "qkv": _flatten_qkv}.items():
            wrong = replace(right, layer=tuple(change(e) for e in right.layer))
            chunks, wanted = chunks_of(place, config, tensors)
            load_weights(chunks, wrong, place, FileSource(str(directory)))
            out[name, "loading"] = odd_parameters(chunks, wanted)
            # Only the names come in another order when gate and up change places twice.
            out[name, "round trip"] = odd_exports(export_weights(chunks, wrong, place, None), tensors)
            out[name, "exporting"] = odd_exports(export_weights(chunks, right, place, None), tensors)
    finally:
        leave(place)
    return out


# ---- failures and draws -------------------------------------------------------------------------------------------
def _error(chunks: Sequence[Chunk], family: Family, place: Place, source: Source) -> str:
    try:
        load_weights(chunks, family, place, source)
    except EngineError as error:
        return error.what
    return "nothing was refused"


def run_failures(scratch: Path) -> dict[str, str]:
    """A file that one pipeline stage needs is damaged; a model that rank 0 cannot build."""
    config = config_of("llama")
    tensors = read_directory(scratch / "models" / "llama")
    _, place = settle(Topology(world_size=WORLD, tp=2, pp=2), {}, 120)
    try:
        chunks, _ = chunks_of(place, config, tensors)
        damaged = FileSource(str(scratch / "models" / "damaged"))
        other = AutoConfig.for_model("vit")
        return {
            "damaged": _error(chunks, family_of(config), place, damaged),
            "unbuildable": _error(chunks, family_of(config), place, DrawnSource(other, torch.float32, 0, place)),
        }
    finally:
        leave(place)


def run_draws(scratch: Path) -> dict[str, Any]:
    """Weights drawn on rank 0 and shared, against the directory that transformers drew from the same seed."""
    built = 0
    whole = AutoModelForCausalLM.from_config

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal built
        built += 1
        return whole(*args, **kwargs)

    AutoModelForCausalLM.from_config = counting
    out: dict[str, Any] = {}
    axes: dict[str, dict[str, Any]] = {
        "llama-tied": {"tp": 2, "pp": 2},
        "qwen3-moe": {"ep": 2, "etp": 2, "pp": 1, "dp_shard": 4},
    }
    try:
        for name, sizes in axes.items():
            tensors, config = read_directory(scratch / "models" / f"{name}-drawn"), config_of(name)
            family = family_of(config)
            _, place = settle(Topology(world_size=WORLD, **sizes), {}, 120)
            try:
                chunks, wanted = chunks_of(place, config, tensors)
                source = DrawnSource(AutoConfig.for_model(**CONFIGS[name]), torch.float32, 3, place)
                with LiveBytes(chunks) as live:
                    load_weights(chunks, family, place, source)
                largest = max(_bytes(s) for s in family.checkpoint().values())
                out[name] = {
                    "loading": odd_parameters(chunks, wanted),
                    "most_live": live.most,
                    "whole": sum(t.nbytes for t in tensors.values()),
                    "largest": largest,
                }
            finally:
                leave(place)
    finally:
        AutoModelForCausalLM.from_config = whole
    out["built"] = built
    return out


def main() -> None:
    """Run everything and save it."""
    scratch = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result: dict[str, Any] = {name: run_case(case, scratch) for name, case in CASES.items()}
    result["mistakes"] = run_mistakes(scratch)
    result["failures"] = run_failures(scratch)
    result["draws"] = run_draws(scratch)
    torch.save(result, scratch / f"rank{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
