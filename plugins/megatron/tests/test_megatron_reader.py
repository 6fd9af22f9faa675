"""The vocab-parallel reader in one process: against the dense reader, a computation in double, and its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_sequence_ranks import LENGTHS, D, compare_reader, compare_values, draw, draw_batch, everything, off_by
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlctl.errors import BatchError, EngineError
from rlctl.topology import Topology
from rlctl_megatron import token_stats as stats_module
from rlctl_megatron.layout import lay_out
from rlctl_megatron.mesh import Place
from rlctl_megatron.reader import ValueReader, VocabParallelReader
from rlctl_megatron.token_stats import VocabShard, chunk_rows, raw_logits, squared_probs, token_stats, top_tokens

CPU = torch.device("cpu")
ALONE = Place(Topology(world_size=1), CPU)
VOCAB = 37


def _reader(hidden: torch.Tensor, weight: torch.Tensor, keep_bytes: int = 0, temperature: float = 1.0):
    batch = draw_batch(LENGTHS, VOCAB, temperature)
    laid = lay_out(batch, CPU, ALONE, sp=False)
    shard = VocabShard(weight, VOCAB, temperature=temperature)
    return VocabParallelReader(hidden[laid.predictors], laid, batch.items["input_ids"], shard, None, keep_bytes), batch


def _exact(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: float):
    """Log-probs ``[P, K]`` and entropy ``[P]``, written out in double."""
    log_p = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    return log_p.gather(-1, ids), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 20], ids=["made again", "kept"])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_reader_equals_the_dense_one(temperature, chunk, keep_bytes) -> None:
    found = compare_reader(ALONE, VOCAB, temperature=temperature, keep_bytes=keep_bytes, chunk=chunk)
    assert max(found.values()) < 1e-6, found


def test_values_equal_the_dense_reader() -> None:
    assert max(compare_values(ALONE).values()) < 1e-6


@pytest.mark.parametrize("rows", [VOCAB, VOCAB + 3], ids=["exact", "padded"])
@pytest.mark.parametrize("chunk", [2, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_double_stays_double(monkeypatch, temperature, chunk, rows) -> None:
    monkeypatch.setattr(stats_module, "chunk_rows", lambda *_: chunk)
    hidden = draw(7, D, seed=1, dtype=torch.float64).requires_grad_()
    weight = draw(rows, D, seed=2, dtype=torch.float64).requires_grad_()
    ids = torch.randint(0, VOCAB, (7, 3), generator=torch.Generator().manual_seed(0))
    shard = VocabShard(weight, VOCAB, temperature=temperature)
    got = token_stats(hidden, shard, ids, entropy=True)
    assert got[0] is not None
    assert got[1] is not None
    assert got[0].dtype == got[1].dtype == torch.float64
    (got[0].pow(2).sum() + got[1].pow(3).sum()).backward()
    h, w = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    want = _exact(h, w[:VOCAB], ids, temperature)
    (want[0].pow(2).sum() + want[1].pow(3).sum()).backward()
    assert off_by([got[0], got[1]], want) < 1e-13
    for mine, exact in ((hidden, h), (weight, w)):
        assert mine.grad is not None
        assert exact.grad is not None
        assert off_by([mine.grad], [exact.grad]) < 1e-13
    assert weight.grad is not None
    assert not weight.grad[VOCAB:].any()


def test_filling_of_the_vocabulary_has_no_probability() -> None:
    hidden = draw(5, D, seed=1)
    weight = torch.cat([draw(VOCAB, D, seed=2), 100 * draw(3, D, seed=3)])
    shard = VocabShard(weight, VOCAB)
    every = token_stats(hidden, shard, torch.arange(VOCAB).expand(5, VOCAB), entropy=False)[0]
    assert every is not None
    torch.testing.assert_close(every.exp().sum(-1), torch.ones(5))
    assert int(top_tokens(hidden, shard, 5)[1].max()) < VOCAB
    torch.testing.assert_close(squared_probs(hidden, shard), (2 * every).exp().sum(-1))


def test_large_logits_keep_their_entropy() -> None:
    hidden, weight = draw(6, D, seed=1) * 100, draw(VOCAB, D, seed=2) * 10
    weight[1] = weight[0] + 1e-4
    shard = VocabShard(weight, VOCAB)
    ids = torch.zeros(6, 1, dtype=torch.long)
    got = token_stats(hidden, shard, ids, entropy=True)
    z = raw_logits(hidden, shard).double()
    assert float(z.abs().max()) > 3e3
    log_p = z.log_softmax(-1)
    assert got[1] is not None
    torch.testing.assert_close(got[1].double(), -(log_p.exp() * log_p).sum(-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 20], ids=["made again", "kept"])
def test_inputs_stay_as_they_were(keep_bytes) -> None:
    hidden = draw(sum(LENGTHS), D, seed=1).requires_grad_()
    weight = draw(VOCAB, D, seed=2).requires_grad_()
    before = [hidden.detach().clone(), weight.detach().clone()]
    found, batch = _reader(hidden, weight, keep_bytes)
    first = everything(found, batch, VOCAB)
    first[0].backward()
    found.topk(3)
    assert off_by([hidden, weight], before) == 0.0
    # With kept logits in place of their exponentials, the second reading would be another.
    second = everything(found, batch, VOCAB)
    assert off_by(second[1], first[1]) == 0.0


def test_nothing_scored_gives_zero_gradients_that_exist() -> None:
    batch = draw_batch((1, 1, 1), VOCAB)
    laid = lay_out(batch, CPU, ALONE, sp=False)
    hidden, weight = draw(3, D, seed=1).requires_grad_(), draw(VOCAB, D, seed=2).requires_grad_()
    for keep_bytes in (0, 1 << 20):
        picked = hidden[laid.predictors]
        found = VocabParallelReader(picked, laid, batch.items["input_ids"], VocabShard(weight, VOCAB), None, keep_bytes)
        log_probs, entropy = found.log_prob_and_entropy()
        assert torch.equal(log_probs, torch.zeros(3))
        (log_probs.sum() + entropy.sum()).backward()
        for leaf in (hidden, weight):
            assert leaf.grad is not None
            assert not leaf.grad.any()
            leaf.grad = None


def test_half_precision_weights_give_float32_numbers() -> None:
    hidden, weight = draw(sum(LENGTHS), D, seed=1).bfloat16(), draw(VOCAB, D, seed=2).bfloat16().requires_grad_()
    hidden.requires_grad_()
    found, batch = _reader(hidden, weight)
    log_probs, entropy = found.log_prob_and_entropy()
    assert log_probs.dtype == entropy.dtype == torch.float32
    scored = batch.items["loss_mask"]
    want = _exact(
        hidden.detach()[found._laid.predictors], weight.detach(), batch.items["input_ids"][scored][:, None], 1.0
    )
    assert off_by([log_probs[scored], entropy[scored]], [want[0][:, 0], want[1]]) < 1e-2
    log_probs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_ids_outside_the_vocabulary_are_refused() -> None:
    found, batch = _reader(draw(sum(LENGTHS), D, seed=1), draw(VOCAB + 3, D, seed=2))
    ids = batch.items["input_ids"].clone()
    first = int(batch.items["loss_mask"].nonzero()[0])
    for bad in (VOCAB, -1):
        ids[first] = bad
        with pytest.raises(BatchError, match="outside the model's vocabulary"):
            found.log_prob(ids)
        with pytest.raises(BatchError, match="outside the model's vocabulary"):
            found.log_prob_at(ids[:, None])
    # Where nothing is scored, anything may stand.
    ids[first] = 0
    ids[0] = -100
    found.log_prob(ids)


def test_more_top_tokens_than_the_vocabulary_has_are_refused() -> None:
    found, _ = _reader(draw(sum(LENGTHS), D, seed=1), draw(VOCAB + 3, D, seed=2))
    assert found.topk(VOCAB)[1].shape == (sum(LENGTHS), VOCAB)
    with pytest.raises(EngineError, match="than the vocabulary has"):
        found.topk(VOCAB + 1)


def test_a_shard_without_its_group_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="rows are missing"):
        VocabShard(draw(10, D, seed=1), 20)
    with pytest.raises(AssertionError, match="rows are missing"):
        VocabShard(draw(10, D, seed=1), 20, start=10)
    laid = lay_out(draw_batch(LENGTHS, VOCAB), CPU, ALONE, sp=False)
    with pytest.raises(AssertionError):
        ValueReader(draw(3, D, seed=1), laid, draw(1, D, seed=2))
    with pytest.raises(AssertionError, match="the ranks that have the rest"):
        ValueReader(draw(3, D, seed=1), replace(laid, mine=torch.arange(3)), draw(1, D, seed=2))


class _Watch(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes, and which operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return out


def test_no_logits_of_all_tokens_exist() -> None:
    tokens, vocab = 3000, 8000
    hidden, weight = draw(tokens, 4, seed=1).requires_grad_(), draw(vocab, 4, seed=2).requires_grad_()
    ids = torch.zeros(tokens, 1, dtype=torch.long)
    watch = _Watch()
    with watch:
        log_probs, entropy = token_stats(hidden, VocabShard(weight, vocab), ids, entropy=True)
        assert log_probs is not None
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    chunk = chunk_rows(vocab, "cpu") * vocab * 4
    assert watch.largest == chunk
    assert tokens * vocab * 4 > 10 * chunk


def test_a_loss_of_log_probs_does_not_pay_for_the_entropy() -> None:
    hidden, weight = draw(9, D, seed=1).requires_grad_(), draw(VOCAB, D, seed=2).requires_grad_()
    ids = torch.zeros(9, 1, dtype=torch.long)

    def operations(use_entropy: bool) -> list[str]:
        log_probs, entropy = token_stats(hidden, VocabShard(weight, VOCAB), ids, entropy=True)
        assert log_probs is not None
        assert entropy is not None
        number = log_probs.sum() + (entropy.sum() if use_entropy else 0.0)
        with (watch := _Watch()):
            number.backward()
        return watch.names

    with_entropy, without = operations(True), operations(False)
    assert len(without) < len(with_entropy)
    assert "aten::exp_" in without
