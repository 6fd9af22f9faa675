"""``hf``: generation with transformers, inside the training process.

The engine serves either the training engine's live module (nothing is copied) or a copy of its own, filled by name. A
model is served through the quickest of three runners whose logits equal those of a plain forward pass; which one, and
why, is in ``EngineInfo.notes`` and in :attr:`HFRollout.notes`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from rlctl import device as devices
from rlctl.engine import EngineInfo, MeshInfo
from rlctl.errors import EngineError
from rlctl.generation import Completion, GenerateRequest, ScoreRequest, TokenScores
from rlctl.hf_config import load_config, starts_random
from rlctl.hookspecs import hookimpl
from rlctl.parts.job import Root
from rlctl.sync import fingerprint_tensor
from rlctl.topology import Topology
from rlctl_fsdp.build import build_empty
from rlctl_fsdp.decoding import decode
from rlctl_fsdp.generation_mode import generation_mode
from rlctl_fsdp.rollout_config import HFRolloutConfig
from rlctl_fsdp.rollout_probe import choose_runner
from rlctl_fsdp.rollout_weights import (
    empty_module,
    end_token_ids,
    load_named,
    model_tokenizer,
    named_weights,
    own_module,
)
from rlctl_fsdp.runners import Runner
from rlctl_fsdp.scoring import score_sequences
from rlctl_fsdp.stopping import StopRules

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class HFRollout:
    """One rank's embedded rollout engine."""

    def __init__(self) -> None:
        self.settings = HFRolloutConfig()
        self.device = torch.device("cpu")
        self.model: Mapping[str, Any] = {}
        self.config: PreTrainedConfig | None = None
        self.module: PreTrainedModel | None = None
        self.attached = False
        self._root: Root | None = None
        self.version = -1
        self.notes: dict[str, str] = {}
        self.tokenizer: Any = None
        self._end_ids: tuple[int, ...] = ()
        self._runners: dict[Any, tuple[type[Runner], str]] = {}

    # ---- building ---------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_build_mesh(self, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo:
        values = dict(settings)
        device = str(values.pop("device", "cpu"))
        self.settings = HFRolloutConfig(**values)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        device = devices.indexed(device)
        self.device = torch.device(device)
        # Every rank generates for prompts of its own: to the data there is one dimension, whatever the trainer's mesh.
        return MeshInfo(rank=rank, world_size=world, dp_rank=rank, dp_size=world, device=device)

    @hookimpl
    def rlctl_engine_init(
        self, mesh: MeshInfo, model: Mapping[str, Any], optimizer: Mapping[str, Any] | None, forward_only: bool
    ) -> EngineInfo:
        self.model = model
        self.config = load_config(model)
        self.tokenizer = model_tokenizer(model)
        self._end_ids = end_token_ids(model, self.config, self.tokenizer)
        # Weights are not loaded here: usually the training module is attached next.
        shape = build_empty(model)
        vocab = int(self.config.get_text_config(decoder=True).vocab_size)
        self.notes = {"end_token_ids": ", ".join(map(str, self._end_ids)) or "none"}
        return EngineInfo(
            sum(p.numel() for p in shape.parameters()), vocab, str(self.config.model_type), dict(self.notes)
        )

    @hookimpl
    def rlctl_shutdown(self) -> bool:
        self.module = self._root = None
        self._runners.clear()
        return True

    # ---- weights ----------------------------------------------------------------------------------------------
    @hookimpl
    def rlctl_attach_module(self, module: Any, version: int) -> bool:
        model = module.model if isinstance(module, Root) else module
        if not isinstance(model, PreTrainedModel):
            return False
        self.module, self.attached, self.version = model, True, version
        self._root = module if isinstance(module, Root) else None
        assert self.config is not None, "rlctl_engine_init comes first"
        self._end_ids = tuple(sorted({*self._end_ids, *end_token_ids(self.model, model.config, self.tokenizer, model)}))
        return True

    @hookimpl
    def rlctl_load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, Any]:
        if self.module is None or self.attached:
            assert self.config is not None, "rlctl_engine_init comes first"
            self.module = empty_module(self.model, self._dtype(), self.device)
            self.attached, self._root = False, None
        report = load_named(self.module, weights)
        self.version = version
        return report

    @hookimpl
    def rlctl_weight_fingerprint(self, names: Sequence[str]) -> dict[str, str]:
        weights = named_weights(self._served(), names)
        return {name: fingerprint_tensor(tensor) for name, tensor in weights.items()}

    @hookimpl
    def rlctl_release(self, parts: Sequence[str]) -> bool:
        """``weights``: the own copy goes to the host. Keys and values live only during a call, so ``kv`` holds nothing."""
        if "weights" not in parts or self.module is None or self.attached or self.device.type == "cpu":
            return False
        self.module.to("cpu")  # pyright: ignore[reportArgumentType]
        return True

    @hookimpl
    def rlctl_resume(self, parts: Sequence[str]) -> bool:
        if "weights" in parts and self.module is not None and not self.attached:
            self.module.to(self.device)  # pyright: ignore[reportArgumentType]
        return True

    def _dtype(self) -> torch.dtype:
        """dtype of an own copy."""
        name = self.settings.dtype
        return _DTYPES[str(self.model.get("dtype", "float32")) if name == "auto" else name]

    def _served(self) -> PreTrainedModel:
        if self.module is None:
            if starts_random(self.model):
                raise EngineError(
                    "the rollout engine has no weights yet",
                    found="a model with random weights, which only the training engine has",
                    wanted="rlctl_attach_module or rlctl_load_weights before the first call",
                )
            self.module = own_module(self.model, self._dtype(), self.device)
        return self.module

    # ---- generation -------------------------------------------------------------------------------------------
    def _autocast(self, module: PreTrainedModel) -> Any:
        """An attached module computes in the dtype asked for, without a copy of its weights."""
        held = next(p for p in module.parameters() if p.is_floating_point()).dtype
        if self.settings.dtype != "auto":
            wanted = _DTYPES[self.settings.dtype]
        else:
            wanted = torch.bfloat16 if held is torch.float32 and self.device.type != "cpu" and self.attached else held
        return nullcontext() if wanted is held else torch.autocast(self.device.type, dtype=wanted)

    @torch.no_grad()
    def _lend(self, job: Callable[[PreTrainedModel, Callable[[], Runner]], Any]) -> Any:
        """Run ``job(module, make_runner)`` while the module is in generation mode."""
        module = self._served()
        where = next(module.parameters()).device
        if where.type != devices.tensor_type(self.device):
            raise EngineError(
                "the shared training module is not on the rollout's device",
                found=str(where),
                wanted=str(self.device),
                next="set rollout.share_weights=false, or switch actor.engine.param_offload off",
            )

        def run(model: PreTrainedModel) -> Any:
            with self._autocast(model):
                kind = self._choose(model)
                with generation_mode(model, kind.attention_of(model)):
                    return job(model, lambda: kind(model, self.device))

        # The weights that FSDP keeps with the root (embedding, head) are whole only within the root's forward.
        return run(module) if self._root is None else self._root(run)

    def _choose(self, module: PreTrainedModel) -> type[Runner]:
        key = (id(module.config), type(module))
        if key not in self._runners:
            self._runners[key] = choose_runner(module, self.device, self.settings.path)
            kind, why = self._runners[key]
            self.notes["decoding"] = f"{kind.name}: {why}"
        return self._runners[key][0]

    @hookimpl
    def rlctl_generate(
        self, request: GenerateRequest, on_done: Callable[[Completion], None] | None
    ) -> list[Completion]:
        params = request.params
        module = self._served()
        self._check(request, module)
        ends = (*(() if params.ignore_eos else self._end_ids), *params.stop_token_ids)
        stops = StopRules(self._vocab(module), ends, params.stop, self.tokenizer)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        out: list[Completion | None] = [None] * (len(request.prompts) * params.n)

        def run(_: PreTrainedModel, make_runner: Callable[[], Runner]) -> None:
            limits = (self.settings.max_batch_rows, self.settings.max_batch_tokens)
            for completion in decode(make_runner, request.prompts, params, seed, stops, self.device, *limits):
                out[completion.prompt_index * params.n + completion.sample_index] = completion
                if on_done is not None:
                    on_done(completion)

        self._lend(run)
        done = [c for c in out if c is not None]
        assert len(done) == len(out)
        return done

    @hookimpl
    def rlctl_score(self, request: ScoreRequest) -> list[TokenScores]:
        vocab, budget = self._vocab(self._served()), self.settings.max_batch_tokens
        return self._lend(lambda _, make_runner: score_sequences(make_runner(), request, vocab, self.device, budget))

    def _vocab(self, module: PreTrainedModel) -> int:
        head = module.get_output_embeddings()
        weight = getattr(head, "weight", None)
        return int(module.config.get_text_config(decoder=True).vocab_size) if weight is None else int(weight.shape[0])

    def _check(self, request: GenerateRequest, module: PreTrainedModel) -> None:
        params = request.params
        for name, value, good, wanted in (
            ("n", params.n, params.n >= 1, "at least 1"),
            ("max_tokens", params.max_tokens, params.max_tokens >= 1, "at least 1"),
            ("temperature", params.temperature, 0 <= params.temperature < float("inf"), "0 (greedy) or more"),
            ("top_p", params.top_p, 0 < params.top_p <= 1, "more than 0, at most 1"),
            ("top_k", params.top_k, params.top_k >= 0, "0 (off) or more"),
        ):
            if not good:
                raise EngineError(f"cannot sample with this {name}", found=value, wanted=wanted)
        vocab = self._vocab(module)
        for i, prompt in enumerate(request.prompts):
            if not len(prompt):
                raise EngineError(f"prompt {i} is empty", found="no tokens", wanted="at least one token")
            if min(prompt) < 0 or max(prompt) >= vocab:
                raise EngineError(
                    f"prompt {i} has a token that the model does not know",
                    found=max(prompt) if max(prompt) >= vocab else min(prompt),
                    wanted=f"ids from 0 to {vocab - 1}",
                    next="the tokenizer must be the model's own: check model.tokenizer",
                )
        limit = getattr(module.config.get_text_config(decoder=True), "max_position_embeddings", None)
        longest = max((len(p) for p in request.prompts), default=0) + params.max_tokens
        if limit is not None and longest > limit:
            raise EngineError(
                "prompts and completions are longer than the model's positions",
                found=f"{longest - params.max_tokens} + {params.max_tokens} tokens",
                wanted=f"at most {limit} (max_position_embeddings)",
                next="lower data.max_prompt_length or data.max_response_length",
            )
