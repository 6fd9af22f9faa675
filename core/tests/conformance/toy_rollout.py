"""A correct toy rollout engine, and engines that each break one promise of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from toy_model import ToyLM, make_model

from rlctl.engine import EngineInfo, MeshInfo
from rlctl.generation import Completion, FinishReason, GenerateRequest, SamplingParams, ScoreRequest, TokenScores
from rlctl.hookspecs import hookimpl
from rlctl.sync import fingerprint_tensor
from rlctl.topology import Topology


class ToyRollout:
    """Every promise kept: one row after the other, the whole row again for each token."""

    model: ToyLM

    @hookimpl
    def rlctl_build_mesh(self, topology: Topology, settings: Mapping[str, Any]) -> MeshInfo:
        return MeshInfo(device=settings["device"])

    @hookimpl
    def rlctl_engine_init(self, model: Mapping[str, Any]) -> EngineInfo:
        self.model = make_model(model)
        return EngineInfo(sum(p.numel() for p in self.model.parameters()), self.model.embed.num_embeddings, "toy")

    def logits(self, ids: Sequence[int], batch: Sequence[Sequence[int]]) -> torch.Tensor:
        return self.model(torch.tensor(ids))

    def generator(self, seed: int | None, row: int) -> torch.Generator:
        return torch.Generator().manual_seed(hash((seed, row)) % 2**31)

    def stream_number(self, params: SamplingParams, index: int) -> int:
        return params.row_offset + index

    def distribution(self, logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """Log-probs ``[V]`` of the distribution that is sampled from (greedy: of temperature 1)."""
        log_p = torch.log_softmax(logits / (params.temperature or 1.0), -1)
        if params.temperature == 0.0:
            return log_p
        values, ids = log_p.sort(descending=True)
        keep = torch.ones_like(values, dtype=torch.bool)
        if params.top_k:
            keep[params.top_k :] = False
        # A token stays while the mass before it is below top_p (nucleus sampling, arXiv 1904.09751).
        keep &= values.exp().cumsum(0) - values.exp() < params.top_p
        kept = torch.full_like(log_p, float("-inf")).scatter(0, ids[keep], values[keep])
        return torch.log_softmax(kept, -1)

    def choose(self, log_p: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
        if params.temperature == 0.0:
            return int(log_p.argmax())
        return int(torch.multinomial(log_p.exp(), 1, generator=generator))

    def limit(self, params: SamplingParams) -> int:
        return params.max_tokens

    @torch.no_grad()
    def row(self, index: int, request: GenerateRequest) -> Completion:
        params = request.params
        prompt, sample = divmod(index, params.n)
        generator = self.generator(params.seed, self.stream_number(params, index))
        tokens: list[int] = []
        log_probs: list[float] = []
        reason = FinishReason.LENGTH
        while len(tokens) < self.limit(params) and reason is not FinishReason.STOP:
            ids = [*request.prompts[prompt], *tokens]
            log_p = self.distribution(self.logits(ids, request.prompts)[-1], params)
            tokens.append(self.choose(log_p, params, generator))
            log_probs.append(float(log_p[tokens[-1]]))
            if tokens[-1] in params.stop_token_ids:
                reason = FinishReason.STOP
        return Completion(prompt, sample, tokens, log_probs, reason)

    def order(self, request: GenerateRequest) -> list[int]:
        return list(range(len(request.prompts) * request.params.n))

    @hookimpl
    def rlctl_generate(
        self, request: GenerateRequest, on_done: Callable[[Completion], None] | None
    ) -> list[Completion]:
        out = []
        for index in self.order(request):
            out.append(self.row(index, request))
            if on_done is not None:
                on_done(out[-1])
        return out

    @hookimpl
    @torch.no_grad()
    def rlctl_score(self, request: ScoreRequest) -> list[TokenScores]:
        out = []
        for ids in request.sequences:
            log_p = torch.log_softmax(self.logits(ids, [])[:-1] / request.temperature, -1)
            own = log_p.gather(1, torch.tensor(ids)[1:, None])[:, 0]
            values, top = log_p.topk(request.topk)
            first = [[0] * request.topk], [[0.0] * request.topk]
            out.append(TokenScores([0.0, *own.tolist()], first[0] + top.tolist(), first[1] + values.tolist()))
        return out

    @hookimpl
    def rlctl_load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        own = self.model.state_dict()
        loaded = []
        for name, tensor in weights:
            if name in own:
                own[name].copy_(tensor)
                loaded.append(name)
        return {"loaded": loaded, "missing": sorted(set(own) - set(loaded))}

    @hookimpl
    def rlctl_weight_fingerprint(self, names: Sequence[str]) -> dict[str, str]:
        own = self.model.state_dict()
        return {name: fingerprint_tensor(own[name]) for name in names if name in own}


# ---- one broken promise each ---------------------------------------------------------------------------------------
class IgnoresMaxTokens(ToyRollout):
    def limit(self, params: SamplingParams) -> int:
        return params.max_tokens + 1


class IgnoresStopTokens(ToyRollout):
    def row(self, index: int, request: GenerateRequest) -> Completion:
        free = replace(request, params=replace(request.params, stop_token_ids=()))
        return super().row(index, free)


class SampleMajor(ToyRollout):
    def order(self, request: GenerateRequest) -> list[int]:
        n = request.params.n
        return [p * n + s for s in range(n) for p in range(len(request.prompts))]


class OneStreamForAll(ToyRollout):
    """All rows draw from one generator, so that a row depends on those before it."""

    @hookimpl
    def rlctl_generate(self, request: GenerateRequest, on_done: Any) -> list[Completion]:
        self.stream = torch.Generator().manual_seed(request.params.seed or 0)
        torch.rand(len(request.prompts), generator=self.stream)
        return ToyRollout.rlctl_generate(self, request, on_done)

    def generator(self, seed: int | None, row: int) -> torch.Generator:
        return self.stream


class IgnoresRowOffset(ToyRollout):
    """Numbers the rows of each request from 0: replicas would all sample from the same streams."""

    def stream_number(self, params: SamplingParams, index: int) -> int:
        return index


class ChokesOnNothing(ToyRollout):
    """Looks at the longest prompt, of which there is none on a replica without prompts."""

    def order(self, request: GenerateRequest) -> list[int]:
        assert max(map(len, request.prompts)) > 0
        return super().order(request)


class IgnoresSeed(ToyRollout):
    def generator(self, seed: int | None, row: int) -> torch.Generator:
        return torch.Generator().manual_seed(row)


class PaddingLeaks(ToyRollout):
    """Shorter prompts see the padding of the longest one."""

    def logits(self, ids: Sequence[int], batch: Sequence[Sequence[int]]) -> torch.Tensor:
        longest = max((len(p) for p in batch), default=0)
        return super().logits([0] * max(0, longest - len(ids)) + list(ids), batch)[-len(ids) :]


class LogProbsOfTemperatureOne(ToyRollout):
    """Reports log-probs of the model, not of what it sampled from."""

    def row(self, index: int, request: GenerateRequest) -> Completion:
        out = super().row(index, request)
        ids = [*request.prompts[out.prompt_index], *out.token_ids]
        with torch.no_grad():
            log_p = torch.log_softmax(self.logits(ids, request.prompts), -1)
        at = len(request.prompts[out.prompt_index]) - 1
        return replace(out, log_probs=[float(log_p[at + i, t]) for i, t in enumerate(out.token_ids)])


class FlatSampling(ToyRollout):
    """Samples at twice the temperature that it reports."""

    def choose(self, log_p: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
        if params.temperature == 0.0:
            return int(log_p.argmax())
        return int(torch.multinomial(torch.softmax(log_p / 2, -1), 1, generator=generator))


class GreedyTakesSecond(ToyRollout):
    def choose(self, log_p: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
        return int(log_p.topk(2).indices[1]) if params.temperature == 0.0 else super().choose(log_p, params, generator)


class ServesOldWeights(ToyRollout):
    """Keeps a cache of the first answers over a weight update."""

    def __init__(self) -> None:
        self.cache: dict[str, list[Completion]] = {}

    @hookimpl
    def rlctl_generate(self, request: GenerateRequest, on_done: Any) -> list[Completion]:
        key = repr(request)
        if key not in self.cache:
            self.cache[key] = ToyRollout.rlctl_generate(self, request, on_done)
        return self.cache[key]


class ClaimsEverything(ToyRollout):
    @hookimpl
    def rlctl_load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        pairs = [(name, tensor.clone()) for name, tensor in weights]
        ToyRollout.rlctl_load_weights(self, iter(pairs))
        return {"loaded": [name for name, _ in pairs], "missing": []}


class KeepsWhatWasLent(ToyRollout):
    """Reads the tensors when all have come."""

    @hookimpl
    def rlctl_load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        return ToyRollout.rlctl_load_weights(self, iter(list(weights)))


class FingerprintsOfOldWeights(ToyRollout):
    """Answers with the fingerprints it took first."""

    first: dict[str, str] | None = None

    @hookimpl
    def rlctl_weight_fingerprint(self, names: Sequence[str]) -> dict[str, str]:
        if self.first is None:
            self.first = ToyRollout.rlctl_weight_fingerprint(self, names)
        return self.first


class SaysNothingWhenDone(ToyRollout):
    @hookimpl
    def rlctl_generate(self, request: GenerateRequest) -> list[Completion]:
        return ToyRollout.rlctl_generate(self, request, None)
