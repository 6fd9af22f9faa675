"""What megatron-core 0.12.1 has under other names than 0.16.1, all of it: nothing else here asks for the version.

0.16.1 is the version for CUDA and the CPU. 0.12.1 is the one that MindSpeed patches on Ascend. Between them a chunk was told of its
virtual stage through a global; now it is an argument. Functions that 0.12.1 lacks are answered here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings, random
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from rlctl_megatron import versions

STAGE_BY_GLOBAL = versions.is_legacy(versions.installed())
"""The virtual stage is a global, groups are looked up, and neither is an argument (0.12.1)."""


def decoder_spec(config: TransformerConfig, vp_stage: int | None, *, engine: bool) -> TransformerBlockSubmodules:
    """The layers of one chunk; with ``engine`` of Transformer Engine's modules. See :func:`at_stage`."""
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization="RMSNorm", **stage_argument(vp_stage)
    )


def stage_argument(vp_stage: int | None) -> dict[str, Any]:
    """The virtual stage as a keyword of what builds a chunk; nothing where it is a global."""
    return {} if STAGE_BY_GLOBAL else {"vp_stage": vp_stage}


@contextlib.contextmanager
def at_stage(vp_stage: int | None) -> Iterator[None]:
    """Within, what is built belongs to this virtual stage."""
    if not STAGE_BY_GLOBAL or vp_stage is None:
        yield
        return
    parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)


def is_first(vp_stage: int | None) -> bool:
    """Whether this rank's chunk holds the embedding."""
    with at_stage(vp_stage):
        return parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, **stage_argument(vp_stage))


def is_last(vp_stage: int | None) -> bool:
    """Whether this rank's chunk holds the final norm and the head."""
    with at_stage(vp_stage):
        return parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, **stage_argument(vp_stage))


def settle_experts(model: torch.nn.Module) -> None:
    """Whole experts beside split matrices (etp 1, tp above 1, and ep 1): 0.12.1's layers of an expert would scatter their tokens
    over tp once more, which the dispatcher has done already."""
    for module in model.modules() if STAGE_BY_GLOBAL else ():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.is_expert:
            module.explicit_expert_comm = True


def hidden_states(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, packed: PackedSeqParams
) -> torch.Tensor:
    """``[1, f]`` tokens -> what the last layer of a chunk gives, ``[f, 1, D]`` (under sp of this rank's tokens).

    0.12.1 only: its model has no step of its own between layers and vocabulary that could be replaced.
    """
    embedded = model.embedding(input_ids=input_ids, position_ids=position_ids) if model.pre_process else None
    rotary = model.rotary_pos_emb
    longest = rotary.get_rotary_seq_len(None, model.decoder, embedded, model.config, packed)
    return model.decoder(
        hidden_states=embedded,
        attention_mask=None,
        rotary_pos_emb=rotary(longest, packed_seq=True),
        packed_seq_params=packed,
    )


def copy_to_tensor_ranks(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``hidden``, whose gradient is summed over tp. 0.12.1 takes its own group, which is the same one."""
    if STAGE_BY_GLOBAL:
        return mappings.copy_to_tensor_model_parallel_region(hidden)
    return mappings.copy_to_tensor_model_parallel_region(hidden, group)


def window_of(config: TransformerConfig, layer_number: int) -> tuple[int, int] | None:
    """The attention window of a layer (counted from 1), or None. 0.12.1 has one for all layers."""
    window, skip = config.window_size, getattr(config, "window_attn_skip_freq", None)
    if window is None or skip is None:
        return window
    uses = layer_number % skip != 0 if isinstance(skip, int) else bool(skip[layer_number - 1])
    return window if uses else None


def embedding_group(embedding: Any) -> dist.ProcessGroup:
    """The tp group that a word embedding is split over."""
    found: dist.ProcessGroup | None = getattr(embedding, "tp_group", None)
    own: Any = parallel_state.get_tensor_model_parallel_group()
    return own if found is None else found


def sharding_metadata(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """What ``sharded_state_dict`` of a module takes as metadata."""
    if STAGE_BY_GLOBAL:
        return metadata
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

    return ensure_metadata_has_dp_cp_group(metadata)


_made: list[dist.ProcessGroup] = []
"""Groups of 0.12.1, which keeps no list of them."""


def initialize_groups(**sizes: Any) -> None:
    """megatron's ``initialize_model_parallel``."""
    if not STAGE_BY_GLOBAL:
        parallel_state.initialize_model_parallel(**sizes)
        return
    known = dist.distributed_c10d._world.pg_map
    before = set(known)
    parallel_state.initialize_model_parallel(**sizes)
    _made[:] = [group for group in known if group not in before]


def forget_groups() -> list[dist.ProcessGroup]:
    """megatron's ``destroy_model_parallel``, which forgets its groups. Returns those, each once, to be destroyed."""
    if not STAGE_BY_GLOBAL:
        listed: Any = parallel_state._global_process_group_list or ()
        found = list(dict.fromkeys(group for group in listed if group is not None))
        parallel_state.destroy_model_parallel()
        return found
    found, _made[:] = list(_made), []
    parallel_state.destroy_model_parallel()
    # Which it leaves: the next layout's ranks would look for a group of this one's.
    parallel_state._EMBEDDING_GLOBAL_RANKS = parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # type: ignore[assignment]
    return found


def seed_random_states() -> None:
    """Make megatron's tracker of random states know its names."""
    random.model_parallel_cuda_manual_seed(0, **({} if STAGE_BY_GLOBAL else {"force_reset_rng": True}))


def sharded_moments(
    optimizer: Any, parts: Iterable[Any], weights: Any, *, loading: bool, distributed: bool
) -> dict[str, Any]:
    """The optimizer's state with its place in the whole; sharded moments as its buffers have them (of 0.12.1, which fails to
    write more than one weight of a buffer, by weight).

    Args:
        parts: the optimizers of dense and of expert weights.
        weights: the model's own sharded state.
        distributed: moments are sharded over data parallel ranks.
    """
    if not STAGE_BY_GLOBAL:
        how: dict[str, Any] = {"metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    else:
        how = {"sharding_type": "fully_sharded_model_space"} if distributed else {}
    with steps_apart(parts):
        return optimizer.sharded_state_dict(weights, is_loading=loading, **how)


@contextlib.contextmanager
def steps_apart(parts: Iterable[Any]) -> Iterator[None]:
    """Within, 0.12.1's distributed optimizer does not take the step count of torch's AdamW, a tensor like the moments, for one of
    them. (The counts themselves are the caller's, and written apart.)"""
    sharded = [p for p in parts if isinstance(p, DistributedOptimizer)] if STAGE_BY_GLOBAL else []
    for part in sharded:
        get, put = part._get_main_param_and_optimizer_states, part._set_main_param_and_optimizer_states

        def moments(weight: Any, get: Any = get) -> dict[str, Any]:
            return {k: v for k, v in get(weight).items() if k != "step"}

        def take(weight: Any, found: dict[str, Any], get: Any = get, put: Any = put) -> None:
            put(weight, {**{k: v for k, v in get(weight).items() if k == "step"}, **found})

        part._get_main_param_and_optimizer_states = moments  # type: ignore[method-assign]
        part._set_main_param_and_optimizer_states = take  # type: ignore[method-assign]
    try:
        yield
    finally:
        for part in sharded:
            del part._get_main_param_and_optimizer_states, part._set_main_param_and_optimizer_states


def load_moments(optimizer: Any, parts: Sequence[Any], state: dict[str, Any]) -> None:
    """Give the optimizer what was read. The settings of its groups stay its own: of 0.12.1 they lie in the order in which each rank
    met them, and are written by the first one, so that another stage would decay its norms and not its matrices."""
    groups = [group for part in parts if part.optimizer is not None for group in part.optimizer.param_groups]
    own = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in groups]
    with steps_apart(parts):
        optimizer.load_state_dict(state)
    if STAGE_BY_GLOBAL:
        groups = [group for part in parts if part.optimizer is not None for group in part.optimizer.param_groups]
        for group, settings in zip(groups, own, strict=True):
            group.update(settings)


def save_sharded(state: dict[str, Any], path: str) -> None:
    """``dist_checkpointing.save``, ended when it returns. 0.12.1 would let a forked process write; here this one does."""
    if not STAGE_BY_GLOBAL:
        dist_checkpointing.save(state, path)
        return
    with _libraries_of_then():
        request: Any = dist_checkpointing.save(state, path, async_sharded_save=True)
        if request.preload_fn is not None:
            rank, _, results = request.async_fn_args
            request = request._replace(async_fn_args=(rank, request.preload_fn(), results))
        request.execute_sync()


def load_sharded(state: Any, path: str) -> dict[str, Any]:
    """``dist_checkpointing.load``."""
    with _libraries_of_then() if STAGE_BY_GLOBAL else contextlib.nullcontext():
        return dist_checkpointing.load(state, path)  # type: ignore[return-value]


class _NumpyOfThen:
    """numpy with ``product``, by which 0.12.1's checkpoints count; numpy 2 calls it ``prod``."""

    product = staticmethod(numpy.prod)

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)


@contextlib.contextmanager
def _libraries_of_then() -> Iterator[None]:
    """0.12.1 writes and reads items by names of numpy that are gone, and by an inner function of torch, which since then wants to
    be told the format that was the only one."""
    from megatron.core.dist_checkpointing import exchange_utils, mapping, validation
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for module in (exchange_utils, mapping, validation):
        module.np = _NumpyOfThen()  # type: ignore[assignment]

    write = filesystem_async._write_item
    if "serialization_format" in inspect.signature(write).parameters:
        from torch.distributed.checkpoint.filesystem import SerializationFormat

        filesystem_async._write_item = functools.partial(write, serialization_format=SerializationFormat.TORCH_SAVE)
    try:
        yield
    finally:
        filesystem_async._write_item = write
        for module in (exchange_utils, mapping, validation):
            module.np = numpy  # type: ignore[attr-defined]


def redirected_modules(names: Sequence[str]) -> list[str]:
    """``names`` of megatron-core's modules without those that the installed version has not."""
    return [n for n in names if not (STAGE_BY_GLOBAL and n in _ADDED_SINCE)]


_ADDED_SINCE = frozenset({"pipeline_parallel.utils"})
