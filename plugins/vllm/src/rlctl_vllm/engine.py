"""``vllm``: generation by vLLM inside the rank's own process, with weights written into its live model.

With tp, each rank of the replica has such an engine, and all do the same in step: what they are asked is the same, and so are
their schedulers.
"""

from __future__ import annotations

import math
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from rlctl.engine import EngineInfo, MeshInfo
from rlctl.errors import EngineError, RlctlError
from rlctl.generation import Completion, GenerateRequest, ScoreRequest, TokenScores
from rlctl.hf_config import load_config, starts_random
from rlctl.hookspecs import hookimpl
from rlctl.parts import ranks
from rlctl.sync import fingerprint_tensor
from rlctl.topology import Topology
from rlctl_vllm import compat, model_files, requests, versions
from rlctl_vllm.config import VLLMConfig
from rlctl_vllm.live import LiveReader
from rlctl_vllm.loading import Loader
from rlctl_vllm.names import WeightNames, find_names, skeleton_of

_CPU_CACHE_MIB = 256
_TIMEOUT_S = 1800.0


class VLLMRollout:
    """One rank's vLLM."""

    def __init__(self) -> None:
        self.settings = VLLMConfig()
        self.device = torch.device("cpu")
        self.topology = Topology()
        self.model: Mapping[str, Any] = {}
        self.llm: compat.LLM | None = None
        self.version = -1
        self._names: WeightNames | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tokenizer: Any = None
        self._end_ids: tuple[int, ...] = ()
        self._vocab = 0
        self._negative_zeros: dict[str, torch.Tensor] = {}
        self._whole = False
        """The live model has a whole set of weights, all of one sync."""
        self._broken: str = ""
        self._spoilt = False
        """Numbers that are not finite came out, so there are such keys and values."""

    # ---- building ---------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_build_mesh(self, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo:
        values = dict(settings)
        device = str(values.pop("device", "cpu"))
        self.settings = VLLMConfig(**values)
        self.topology = topology
        world = topology.world_size
        versions.require_platform(device)
        self.device = ranks.take_device("vllm", device, world, ("cpu", "cuda", "npu"))
        ranks.join(world, self.device, _TIMEOUT_S)
        rank = dist.get_rank()
        return MeshInfo(
            rank=rank,
            world_size=world,
            dp_rank=topology.dp_rank(rank),
            dp_size=topology.dp_size,
            is_collect=topology.is_collector(rank),
            coordinates=topology.coordinates(rank),
            device=str(self.device),
        )

    @hookimpl
    def rlctl_engine_init(
        self, mesh: MeshInfo, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo:
        self.model = model
        config = load_config(model)
        model_files.require_kernel_sizes(config, self.device.type, compat.HEAD_ALIGNMENT)
        self._tokenizer = model_files.model_tokenizer(model)
        skeleton = skeleton_of(config, bool(model.get("trust_remote_code")))
        self._vocab = int(config.get_text_config(decoder=True).vocab_size)
        ends = model_files.end_token_ids(model, config, self._tokenizer)
        self._end_ids = tuple(i for i in ends if 0 <= i < self._vocab)
        self._folder = model_files.config_directory(config, type(skeleton).__name__, self._dtype())
        try:
            self.llm = self._make_llm(mesh, config)
            self._names = find_names(skeleton, compat.model_of(self.llm))
        except BaseException:
            self.rlctl_shutdown()
            raise
        installed = compat.require_proved()
        notes = {
            "vllm": str(installed),
            "dtype": self._dtype(),
            "max_model_len": str(compat.max_model_len(self.llm)),
            "end_token_ids": ", ".join(map(str, self._end_ids)) or "none",
            "fingerprints": "read back from the live model: linear layers of a CPU by a product with the identity, experts "
            "out of their kernel's layout"
            if self.device.type == "cpu"
            else "read back from the live model",
        }
        return EngineInfo(sum(p.numel() for p in skeleton.parameters()), self._vocab, str(config.model_type), notes)

    def _make_llm(self, mesh: MeshInfo, config: PreTrainedConfig) -> compat.LLM:
        cfg, on_cpu = self.settings, self.device.type == "cpu"
        cache = cfg.kv_cache_mib or (_CPU_CACHE_MIB if on_cpu else None)
        assert self._folder is not None
        settings: dict[str, Any] = {
            "model": self._folder.name,
            "dtype": self._dtype(),
            # Weights come by a sync; until then the engine refuses to generate.
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            # Sampling is what each request says, and not what a file beside the weights says.
            "generation_config": "vllm",
            "trust_remote_code": bool(self.model.get("trust_remote_code")),
            "max_model_len": cfg.max_model_len or model_files.positions_of(config),
            "max_num_seqs": cfg.max_num_seqs,
            "max_num_batched_tokens": cfg.max_num_batched_tokens,
            "max_logprobs": -1,
            "logprobs_mode": f"{cfg.logprobs_mode}_logprobs",
            "enforce_eager": on_cpu if cfg.enforce_eager is None else cfg.enforce_eager,
            "enable_prefix_caching": cfg.enable_prefix_caching,
            "gpu_memory_utilization": cfg.gpu_memory_utilization,
            "kv_cache_memory_bytes": None if cache is None else cache * 1024**2,
            "seed": cfg.seed,
            **({"enable_sleep_mode": True} if cfg.enable_sleep_mode and not on_cpu else {}),
            "disable_log_stats": True,
            "tensor_parallel_size": self.topology.tp,
            "distributed_executor_backend": "uni" if self.topology.world_size == 1 else "external_launcher",
        }
        if self.topology.ep > 1:
            settings["enable_expert_parallel"] = True
        if self.topology.dcp > 1:
            settings["decode_context_parallel_size"] = self.topology.dcp
        local_rank, run = self.device.index or 0, _word_for_all()
        compat.require_proved()
        try:
            with compat.adopted_ranks(mesh.rank, local_rank, run):
                return compat.make_llm(self.device.type, **settings)
        except RlctlError:
            raise
        # vLLM refuses models and sizes with exceptions of many kinds, its config's among them.
        except Exception as error:
            raise EngineError(
                "vLLM does not build this model",
                found=f"{type(error).__name__}: {_first_lines(error)}",
                wanted="a model and settings that vLLM takes",
                next="check rollout.engine (kv_cache_mib, max_model_len, gpu_memory_utilization), or rollout.backend=hf",
            ) from error
        finally:
            compat.unname_shared_memory(run)

    def _dtype(self) -> str:
        name = self.settings.dtype
        return str(self.model.get("dtype", "float32")) if name == "auto" else name

    @hookimpl
    def rlctl_shutdown(self) -> bool:
        if self.llm is not None:
            compat.close(self.llm)
        self.llm = self._names = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        return True

    # ---- weights ----------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        llm, names = self._built()
        self._whole = False
        self._broken = f"sync {version} was not finished"
        answer, self._negative_zeros = Loader(llm, names).load(weights)
        if self._spoilt:
            # A kernel multiplies what lies behind the end of a row with zero, and zero times NaN is NaN: a block that held one
            # would spoil every later row that it is lent to, whatever its weights.
            compat.clear_cache(llm)
            self._spoilt = False
        self._whole, self._broken, self.version = True, "", version
        return answer

    @hookimpl
    def rlctl_weight_fingerprint(self, names: Sequence[str]) -> dict[str, str]:
        self._served()
        reader = self._reader()
        return {name: fingerprint_tensor(self._read(reader, name)) for name in names}

    def _reader(self) -> LiveReader:
        llm, _ = self._built()
        return LiveReader(compat.model_of(llm), self._negative_zeros)

    def _read(self, reader: LiveReader, name: str) -> torch.Tensor:
        """What is served under ``name``; where tied names are served from other values, those."""
        _, names = self._built()
        if name in names.fused:
            return self._read_fused(reader, name)
        part = names.parts.get(name) or names.tied.get(name)
        if part is None:
            raise EngineError(
                "vLLM's model has no weight of this name",
                found=name,
                wanted="a name of the Hugging Face model",
            )
        value = reader.read(part)
        for tied in names.sources.get(name, ()):
            if tied in names.tied and not torch.equal(other := reader.read(names.tied[tied]), value):
                return other
        return value

    def _read_fused(self, reader: LiveReader, name: str) -> torch.Tensor:
        """All experts of a layer in one tensor, gate above up, as transformers keeps them in memory."""
        _, names = self._built()
        shape, published = names.fused[name]
        experts: dict[int, list[torch.Tensor]] = {}
        for own in sorted(published, key=lambda n: (names.parts[n].expert or 0, names.parts[n].shard or 0)):
            experts.setdefault(names.parts[own].expert or 0, []).append(reader.read(names.parts[own]))
        whole = torch.stack([torch.cat(matrices) for matrices in experts.values()])
        assert tuple(whole.shape) == shape, (name, tuple(whole.shape), shape)
        return whole

    @hookimpl
    def rlctl_release(self, parts: Sequence[str]) -> bool:
        """vLLM's sleep: weights go to the host, keys and values are forgotten; never one of the two alone. On a CPU nothing is freed."""
        if not self.settings.enable_sleep_mode or self.device.type == "cpu" or not {"weights", "kv"} <= set(parts):
            return False
        compat.sleep(self._built()[0])
        return True

    @hookimpl
    def rlctl_resume(self, parts: Sequence[str]) -> bool:
        if self.settings.enable_sleep_mode and self.device.type != "cpu":
            compat.wake(self._built()[0], [tag for part, tag in compat.SLEEP_TAGS.items() if part in parts])
        return True

    # ---- generation -------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_generate(
        self, request: GenerateRequest, on_done: Callable[[Completion], None] | None
    ) -> list[Completion]:
        llm = self._served()
        requests.check_request(request, self._vocab, compat.max_model_len(llm))
        params = request.params
        ends = (*(() if params.ignore_eos else self._end_ids), *params.stop_token_ids)
        rules = requests.Rules(
            tuple(i for i in dict.fromkeys(ends) if 0 <= i < self._vocab),
            tuple(s for s in params.stop if s),
            self._tokenizer,
        )
        done = requests.generate(llm, request, rules, on_done)
        self._spoilt |= not all(map(math.isfinite, (x for c in done for x in c.log_probs)))
        return done

    @hookimpl
    def rlctl_score(self, request: ScoreRequest) -> list[TokenScores]:
        llm = self._served()
        done = requests.score(llm, request, self._vocab, compat.max_model_len(llm))
        self._spoilt |= not all(map(math.isfinite, (x for scores in done for x in scores.log_probs)))
        return done

    def _built(self) -> tuple[compat.LLM, WeightNames]:
        assert self.llm is not None, "rlctl_engine_init comes first"
        assert self._names is not None, "rlctl_engine_init comes first"
        return self.llm, self._names

    def _served(self) -> compat.LLM:
        """The engine, with weights: those of the last sync, else those of ``model.path``.

        Raises:
            EngineError: there are none, or the last sync broke off half-way.
        """
        llm, _ = self._built()
        if self._broken:
            raise EngineError(
                "the rollout engine has weights of two syncs",
                found=self._broken,
                wanted="a sync that ends",
                next="sync again",
            )
        if not self._whole:
            if starts_random(self.model):
                raise EngineError(
                    "the rollout engine has no weights yet",
                    found="a model with random weights, which only the training engine has",
                    wanted="rlctl_load_weights before the first call",
                )
            self._load_stored()
        return llm

    def _load_stored(self) -> None:
        _, names = self._built()
        known = {*names.parts, *names.fused, *names.tied}
        stored = ((n, t) for n, t in model_files.stored_weights(self.model) if n in known)
        answer = self.rlctl_load_weights(stored, 0)
        if answer["missing"]:
            self._whole = False
            raise EngineError(
                f"the files of {self.model['path']} do not have every weight of the model",
                found=f"no {answer['missing'][0]}",
                wanted="a whole checkpoint",
                next="check model.path",
            )


def _word_for_all() -> str:
    """A word of this engine's own, the same on all ranks. Collective."""
    words = [f"rlctl-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(words, src=0)
    return words[0]


def _first_lines(error: Exception, most: int = 3) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:most]) or "no words"
