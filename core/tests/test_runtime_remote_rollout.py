"""Generation over replicas: a row samples the same wherever it is, and every rank takes part, without prompts too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from rlctl.engine import Engine, MeshInfo
from rlctl.generation import Completion, FinishReason, GenerateRequest, SamplingParams, ScoreRequest, TokenScores
from rlctl.hookspecs import hookimpl
from rlctl.records import BackendKind
from rlctl.runtime.records import Boot, BuildSpec
from rlctl.runtime.remote import RemoteEngine
from rlctl.testing.fake_engine import by_topology
from rlctl.testing.fake_transport import Fabric, fake_group
from rlctl.topology import Topology


class Streams:
    """A rollout engine whose samples name their stream: (seed, row), the token of the prompt, and the replica."""

    def __init__(self, fabric: Fabric, rank: int, tp: int) -> None:
        self.fabric, self.rank, self.tp = fabric, rank, tp
        self.seeds: list[int | None] = []

    @hookimpl
    def rlctl_build_mesh(self, topology: Topology) -> MeshInfo:
        self.world = topology.world_size
        return by_topology(topology, self.rank)

    @hookimpl
    def rlctl_engine_init(self) -> Any:
        from rlctl.engine import EngineInfo

        return EngineInfo(1, 1000, "streams")

    @hookimpl
    def rlctl_generate(
        self, request: GenerateRequest, on_done: Callable[[Completion], None] | None
    ) -> list[Completion]:
        # As with sharded weights: every rank takes part, one without prompts too.
        self.seeds = self.fabric.gather(range(self.world), self.rank, request.params.seed, "weights")
        out = []
        for p, prompt in enumerate(request.prompts):
            for s in range(request.params.n):
                row = request.params.row_offset + p * request.params.n + s
                out.append(Completion(p, s, [prompt[0], row], [0.0, 0.0], FinishReason.LENGTH))
                if on_done is not None:
                    on_done(out[-1])
        return out

    @hookimpl
    def rlctl_score(self, request: ScoreRequest) -> list[TokenScores]:
        self.fabric.gather(range(self.world), self.rank, None, "weights")
        return [TokenScores([float(t) for t in ids]) for ids in request.sequences]

    @hookimpl
    def rlctl_load_weights(self, weights: Any) -> dict[str, Any]:
        return {"loaded": [], "missing": []}

    @hookimpl
    def rlctl_weight_fingerprint(self, names: Sequence[str]) -> dict[str, str]:
        return {}


@contextmanager
def rollout(replicas: int, tp: int = 1) -> Iterator[tuple[RemoteEngine, list[Streams]]]:
    made: dict[int, Streams] = {}

    def make(spec: BuildSpec, boot: Boot, fabric: Fabric) -> Engine:
        made[boot.rank] = Streams(fabric, boot.rank, tp)
        return Engine(made[boot.rank], BackendKind.ROLLOUT, spec.backend)

    group = fake_group(replicas * tp, make, timeout_s=5.0)
    try:
        spec = BuildSpec("rollout", "rollout", "streams", {}, {}, {"dp_shard": 1, "dp_replicate": replicas, "tp": tp})
        yield RemoteEngine.build(group, spec), [made[r] for r in sorted(made)]
    finally:
        group.close()


@pytest.mark.parametrize(("replicas", "tp"), [(1, 1), (2, 1), (3, 2), (5, 1)])
@pytest.mark.parametrize("num_prompts", [0, 1, 2, 4, 7])
def test_rows_sample_the_same_on_any_replica(replicas: int, tp: int, num_prompts: int) -> None:
    prompts = [[100 + p, 1] for p in range(num_prompts)]
    with rollout(replicas, tp) as (engine, _):
        for n, offset in ((1, 0), (3, 0), (2, 40)):
            done: list[int] = []
            params = SamplingParams(n=n, seed=9, row_offset=offset)
            out = engine.generate(GenerateRequest(prompts, params), done.append)
            assert [(c.prompt_index, c.sample_index) for c in out] == [
                (p, s) for p in range(num_prompts) for s in range(n)
            ]
            assert [c.token_ids for c in out] == [[100 + i // n, offset + i] for i in range(num_prompts * n)]
            assert sum(done) == num_prompts * n, "each completion once, whatever the number of ranks that made it"


def test_one_fresh_seed_for_all_ranks() -> None:
    with rollout(2, tp=2) as (engine, ranks):
        seen = []
        for _ in range(2):
            engine.generate(GenerateRequest([[1], [2]], SamplingParams()))
            assert len(set(ranks[0].seeds)) == 1
            seen.append(ranks[0].seeds[0])
        assert None not in seen
        assert seen[0] != seen[1], "no seed means another one each time"


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_score_restores_the_order(replicas: int) -> None:
    random = Random(2)
    sequences = [[random.randrange(900) for _ in range(random.randrange(1, 40))] for _ in range(5)]
    with rollout(replicas) as (engine, _):
        found = engine.score(ScoreRequest(sequences, temperature=0.7))
        assert [s.log_probs for s in found] == [[float(t) for t in ids] for ids in sequences]
        assert engine.score(ScoreRequest([])) == []
