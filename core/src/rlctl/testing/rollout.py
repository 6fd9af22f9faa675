"""The conformance suite of a rollout backend."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from rlctl.engine import Engine
from rlctl.errors import RlctlError
from rlctl.generation import Completion, FinishReason, GenerateRequest, SamplingParams, ScoreRequest
from rlctl.records import BackendKind
from rlctl.sync import fingerprint_tensor
from rlctl.testing.backend import BackendConformance, Weights

TOKENS = 6
_SHARED = pytest.StashKey[Engine]()


class RolloutConformance(BackendConformance):
    """Subclass it in a plugin's tests, set the attributes and write ``weights``.

    Beside the attributes of :class:`rlctl.testing.backend.BackendConformance`:

    Args:
        log_prob_tolerance: absolute, in nats, between generation and scoring, and alone and in a batch.
        fresh_engine: build an engine for each test. False shares one among them, for engines that are slow to start; each
            test then begins with a load of ``weights(0)``.
    """

    kind: ClassVar[BackendKind] = BackendKind.ROLLOUT
    log_prob_tolerance: ClassVar[float] = 1e-4
    fresh_engine: ClassVar[bool] = True

    def weights(self, seed: int) -> Weights:
        """A whole set of random weights by Hugging Face name; another one for each seed, with logits that differ."""
        raise NotImplementedError("write weights(self, seed) -> {name: tensor}")

    @pytest.fixture
    def engine(self, request: pytest.FixtureRequest, model_section: Mapping[str, Any]) -> Iterator[Engine]:
        """A built engine that serves ``weights(0)``."""
        suite = request.node.getparent(pytest.Class)
        engine = None if self.fresh_engine else suite.stash.get(_SHARED, None)
        if engine is None:
            engine = self.make_engine()
            self.build_engine(engine, model_section, forward_only=True)
            if not self.fresh_engine:
                suite.stash[_SHARED] = engine
                suite.addfinalizer(engine.shutdown)
        engine.load_weights(iter(self.weights(0).items()), 1)
        yield engine
        if self.fresh_engine:
            engine.shutdown()

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of unequal lengths."""
        v = self.vocab_size
        return [[t % v for t in ids] for ids in ([1, 2, 3], [4], [5, 6, 7, 8, 9, 2, 1], [3, 3])]

    def _generate(self, engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> list[Completion]:
        settings: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 0, **params}
        return engine.generate(GenerateRequest(prompts, SamplingParams(**settings)))

    def _assert_same(self, a: Sequence[Completion], b: Sequence[Completion]) -> None:
        assert [c.token_ids for c in a] == [c.token_ids for c in b]
        assert [c.finish_reason for c in a] == [c.finish_reason for c in b]
        for x, y in zip(a, b, strict=True):
            assert x.log_probs == pytest.approx(y.log_probs, abs=self.log_prob_tolerance)

    # ---- what comes back ------------------------------------------------------------------------------------------
    def test_build_reports_mesh_and_model(self, engine: Engine) -> None:
        """The mesh places this rank; the vocabulary holds the ids in use."""
        assert engine.mesh is not None
        assert engine.info is not None
        assert engine.mesh.world_size == self.topology.world_size
        assert 0 <= engine.mesh.rank < engine.mesh.world_size
        assert engine.mesh.device.partition(":")[0] == self.device
        assert engine.info.vocab_size >= self.vocab_size
        assert engine.info.model_family

    def test_count_and_order(self, engine: Engine) -> None:
        """Prompt-major, ``n`` consecutive samples each; one finite log-prob, at most 0, for each token."""
        out = self._generate(engine, self.prompts, n=3)
        assert [(c.prompt_index, c.sample_index) for c in out] == [(p, s) for p in range(4) for s in range(3)]
        assert engine.info is not None
        for c in out:
            assert len(c.log_probs) == len(c.token_ids)
            assert all(0 <= t < engine.info.vocab_size for t in c.token_ids)
            assert all(math.isfinite(x) and x <= 1e-6 for x in c.log_probs)

    def test_on_done_sees_each_completion_once(self, engine: Engine) -> None:
        """The callback gets the very completions of the answer, in whatever order they end."""
        seen: list[Completion] = []
        params = SamplingParams(n=2, max_tokens=TOKENS, seed=0, ignore_eos=True)
        out = engine.generate(GenerateRequest(self.prompts, params), seen.append)
        assert len(seen) == len(out)
        assert sorted(seen, key=lambda c: (c.prompt_index, c.sample_index)) == out

    def test_max_tokens(self, engine: Engine) -> None:
        """No row is longer, and a row that was cut says so."""
        for limit in (1, 4):
            for c in self._generate(engine, self.prompts, max_tokens=limit):
                assert len(c.token_ids) == limit
                assert c.finish_reason is FinishReason.LENGTH

    def test_stop_token_ids_end_a_row(self, engine: Engine) -> None:
        """A row ends with the first stop token, which is kept; others go on."""
        free = self._generate(engine, self.prompts, temperature=0.0)
        stop = free[0].token_ids[min(2, TOKENS - 1)]
        out = self._generate(engine, self.prompts, temperature=0.0, stop_token_ids=(stop,))
        for plain, c in zip(free, out, strict=True):
            if stop in plain.token_ids:
                end = plain.token_ids.index(stop) + 1
                assert c.token_ids == plain.token_ids[:end]
                assert c.finish_reason is FinishReason.STOP
            else:
                assert c.token_ids == plain.token_ids
                assert c.finish_reason is FinishReason.LENGTH

    # ---- determinism ------------------------------------------------------------------------------------------------
    def test_greedy_is_deterministic(self, engine: Engine) -> None:
        """Temperature 0 needs no seed, and ``n`` greedy samples are one."""
        first = self._generate(engine, self.prompts, temperature=0.0, seed=1)
        self._assert_same(first, self._generate(engine, self.prompts, temperature=0.0, seed=2))
        twice = self._generate(engine, self.prompts, temperature=0.0, n=2)
        assert [c.token_ids for c in twice[::2]] == [c.token_ids for c in twice[1::2]]

    def test_seed_decides_the_samples(self, engine: Engine) -> None:
        """Equal seeds, equal samples; other seeds and the samples of one prompt differ."""
        first = self._generate(engine, self.prompts, n=4, seed=5)
        self._assert_same(first, self._generate(engine, self.prompts, n=4, seed=5))
        other = self._generate(engine, self.prompts, n=4, seed=6)
        assert [c.token_ids for c in first] != [c.token_ids for c in other]
        assert len({tuple(c.token_ids) for c in first[:4]}) > 1

    @pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
    def test_a_row_does_not_depend_on_its_batch(self, engine: Engine, temperature: float) -> None:
        """Tokens and log-probs are the same alone and beside longer and shorter rows."""
        together = self._generate(engine, self.prompts, temperature=temperature)
        for count in (1, 2, 3):
            # Row i samples from the stream of (seed, i): a shorter request has the same first rows.
            some = self._generate(engine, self.prompts[:count], temperature=temperature)
            self._assert_same(some, together[:count])
        if temperature == 0.0:
            turned = self._generate(engine, self.prompts[::-1], temperature=temperature)[::-1]
            self._assert_same(
                [Completion(0, 0, c.token_ids, c.log_probs, c.finish_reason) for c in turned],
                [Completion(0, 0, c.token_ids, c.log_probs, c.finish_reason) for c in together],
            )

    def test_a_part_samples_what_the_whole_would(self, engine: Engine) -> None:
        """``row_offset`` is the number of a request's first row in a larger one: replicas share its prompts out so."""
        n = 3
        whole = self._generate(engine, self.prompts, n=n, seed=4)
        for first, stop in ((0, 1), (1, 3), (3, 4)):
            part = self._generate(engine, self.prompts[first:stop], n=n, seed=4, row_offset=first * n)
            assert [c.prompt_index for c in part] == [p for p in range(stop - first) for _ in range(n)]
            self._assert_same(part, whole[first * n : stop * n])

    def test_nothing_to_do_is_done(self, engine: Engine) -> None:
        """A replica that got no prompts is called like the others: it may have to take part in what they do."""
        assert self._generate(engine, []) == []
        if engine.provides("rlctl_score"):
            assert engine.score(ScoreRequest([])) == []

    # ---- log-probs -----------------------------------------------------------------------------------------------------
    def _score(self, engine: Engine, completions: Sequence[Completion], **request: Any) -> list[Any]:
        if not engine.provides("rlctl_score"):
            pytest.skip("this backend does not score (rlctl_score is optional)")
        sequences = [[*self.prompts[c.prompt_index], *c.token_ids] for c in completions]
        return engine.score(ScoreRequest(sequences, **request))

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    def test_log_probs_match_scores(self, engine: Engine, temperature: float) -> None:
        """The log-probs of sampled tokens are those of the same tokens, scored under the same temperature."""
        out = self._generate(engine, self.prompts, n=2, temperature=temperature)
        for c, scores in zip(out, self._score(engine, out, temperature=temperature), strict=True):
            prompt = self.prompts[c.prompt_index]
            assert len(scores.log_probs) == len(prompt) + len(c.token_ids)
            assert scores.log_probs[0] == 0.0
            assert scores.log_probs[len(prompt) :] == pytest.approx(c.log_probs, abs=self.log_prob_tolerance)

    def test_greedy_takes_the_most_probable_token(self, engine: Engine) -> None:
        """Greedy tokens head the top-k of their position, and carry log-probs of temperature 1."""
        out = self._generate(engine, self.prompts, temperature=0.0)
        for c, scores in zip(out, self._score(engine, out, topk=2), strict=True):
            at = len(self.prompts[c.prompt_index])
            for i, token in enumerate(c.token_ids):
                best, second = scores.topk_log_probs[at + i]
                assert best >= second
                assert token == scores.topk_ids[at + i][0] or best - second < self.log_prob_tolerance
                assert c.log_probs[i] == pytest.approx(best, abs=self.log_prob_tolerance)

    @pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}], ids=["top_k", "top_p"])
    def test_filters_shape_the_distribution(self, engine: Engine, filters: dict[str, Any]) -> None:
        """With one token left to choose from, the choice is greedy and certain: log-prob 0."""
        out = self._generate(engine, self.prompts, **filters)
        greedy = self._generate(engine, self.prompts, temperature=0.0)
        assert [c.token_ids for c in out] == [c.token_ids for c in greedy]
        for c in out:
            assert c.log_probs == pytest.approx([0.0] * TOKENS, abs=1e-6)

    def test_samples_follow_the_distribution(self, engine: Engine) -> None:
        """Among 600 first tokens, each comes about as often as its log-prob says (5 standard deviations)."""
        n = 600
        out = self._generate(engine, self.prompts[:1], n=n, max_tokens=1)
        counts = Counter(c.token_ids[0] for c in out)
        for token, count in counts.items():
            p = math.exp(next(c.log_probs[0] for c in out if c.token_ids[0] == token))
            assert abs(count - n * p) <= 5 * math.sqrt(n * p * (1 - p)) + 1, token

    # ---- weights ------------------------------------------------------------------------------------------------------
    def test_load_weights_changes_the_output(self, engine: Engine) -> None:
        """New weights are served at once, by no stale cache; the old ones give the old output again."""
        first = self._generate(engine, self.prompts)
        result = engine.load_weights(iter(self.weights(1).items()), 2)
        assert sorted(result["loaded"]) == sorted(self.weights(1))
        assert list(result["missing"]) == []
        second = self._generate(engine, self.prompts)
        assert [c.token_ids for c in first] != [c.token_ids for c in second]
        engine.load_weights(iter(self.weights(0).items()), 3)
        self._assert_same(self._generate(engine, self.prompts), first)

    def test_weights_are_lent(self, engine: Engine) -> None:
        """A tensor is good until the next one is asked for; what an engine keeps of it is a copy."""
        full = self.weights(1)

        def lent() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in full.items():
                own = tensor.clone()
                yield name, own
                own.zero_()

        engine.load_weights(lent(), 2)
        wanted = {name: fingerprint_tensor(tensor) for name, tensor in full.items()}
        assert engine.weight_fingerprint(list(full)) == wanted

    def test_coverage_is_reported(self, engine: Engine) -> None:
        """A tensor that was not sent is missing; one that the model does not have is refused, or not claimed."""
        full = self.weights(1)
        left_out = max(full, key=lambda name: full[name].numel())
        # A head that is sent beside the embedding it is tied to would stand in for it.
        twins = {n for n in full if full[n].shape == full[left_out].shape and torch.equal(full[n], full[left_out])}
        sent = [n for n in full if n not in twins]
        result = engine.load_weights(((name, full[name]) for name in sent), 2)
        assert left_out in result["missing"]
        assert not set(result["missing"]) & set(sent)
        assert sorted(result["loaded"]) == sorted(sent)
        try:
            result = engine.load_weights(iter([*full.items(), ("no.such.weight", torch.zeros(2))]), 3)
        except RlctlError as error:
            refused: str | None = str(error)
        else:
            refused = None
        assert "no.such.weight" in refused if refused is not None else "no.such.weight" not in result["loaded"]

    def test_fingerprints_are_of_what_was_loaded(self, engine: Engine) -> None:
        """Each equals :func:`rlctl.sync.fingerprint_tensor` of the tensor that was sent, and changes with it."""
        for version, seed in ((2, 1), (3, 0)):
            full = self.weights(seed)
            engine.load_weights(iter(full.items()), version)
            wanted = {name: fingerprint_tensor(tensor) for name, tensor in full.items()}
            assert engine.weight_fingerprint(list(full)) == wanted
        other = {name: fingerprint_tensor(tensor) for name, tensor in self.weights(1).items()}
        assert any(wanted[name] != other[name] for name in wanted)
