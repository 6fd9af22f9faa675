"""The reader: one distribution behind every method, rows that do not see each other, no look into the future."""

from __future__ import annotations

from typing import ClassVar

import torch

from rlctl.batch import PackedBatch, pack
from rlctl.logits import LogitsReader
from rlctl.microbatch import MicroBatchPlan
from rlctl.testing.backend import BackendConformance, Build
from rlctl.testing.train_batches import LENGTHS, LONGEST, cross_entropy, read, rows


class ReaderConformance(BackendConformance):
    """See the attributes of :class:`rlctl.testing.train.TrainConformance`."""

    log_prob_tolerance: ClassVar[float] = 1e-5

    def _close(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.allclose(a, b, rtol=0.0, atol=self.log_prob_tolerance)

    def _full(self, build: Build, batch: PackedBatch) -> dict[str, torch.Tensor]:
        """Everything a reader tells about ``batch``, with the whole distribution as its top-k."""
        engine = build(forward_only=True)
        engine.set_mode(False)
        assert engine.info is not None
        vocab = engine.info.vocab_size

        def look(reader: LogitsReader, micro_batch: PackedBatch) -> dict[str, torch.Tensor]:
            values, ids = reader.topk(vocab)
            two = torch.stack([torch.full_like(micro_batch.items["input_ids"], 1), micro_batch.items["input_ids"]], 1)
            both = reader.log_prob_and_entropy()
            squared = getattr(reader, "sum_p2", None)
            return {
                **({} if squared is None else {"sum_p2": squared()}),
                "log_prob": reader.log_prob(),
                "other": reader.log_prob(torch.full_like(micro_batch.items["input_ids"], 1)),
                "entropy": reader.entropy(),
                "both_log_prob": both[0],
                "both_entropy": both[1],
                "two": reader.log_prob_at(two),
                "all": values,
                "ids": ids,
                "top3": reader.topk(3)[0],
            }

        return read(engine, batch, look)

    def test_reader_gives_one_distribution(self, build: Build) -> None:
        """Sums to one; log-probs, entropy, chosen tokens and top-k agree with each other."""
        batch = rows(self.vocab_size)
        full = self._full(build, batch)
        mask = batch.items["loss_mask"]
        log_p, ids = full["all"][mask], full["ids"][mask]
        assert self._close(log_p.exp().sum(-1), torch.ones(len(log_p)))
        assert bool((log_p[:, :-1] >= log_p[:, 1:]).all()), "top-k is sorted"
        assert torch.equal(ids.sort(-1).values, torch.arange(ids.shape[1]).expand_as(ids)), "every token once"
        by_id = torch.empty_like(log_p).scatter_(1, ids, log_p)
        own = by_id.gather(1, batch.items["input_ids"][mask][:, None])[:, 0]
        assert self._close(full["log_prob"][mask], own)
        assert self._close(full["other"][mask], by_id[:, 1])
        assert self._close(full["two"][mask], torch.stack([by_id[:, 1], own], 1))
        assert self._close(full["entropy"][mask], -(log_p.exp() * log_p).sum(-1))
        assert self._close(full["both_log_prob"], full["log_prob"])
        assert self._close(full["both_entropy"], full["entropy"])
        assert self._close(full["top3"][mask], log_p[:, :3])
        if "sum_p2" in full:
            assert self._close(full["sum_p2"][mask], log_p.exp().square().sum(-1))
        assert float(own.std()) > 1e-4, "every token is as likely as any other: this model cannot show anything"

    def test_unscored_positions_are_zero(self, build: Build) -> None:
        """float32, one value an item, zero where ``loss_mask`` is False, with padding too."""
        batch = rows(self.vocab_size)
        full = self._full(build, batch)
        for name, value in full.items():
            assert value.shape[0] == batch.num_items, name
            assert not value[~batch.items["loss_mask"]].any(), name
            assert name == "ids" or value.dtype == torch.float32, name

    def test_temperature_divides_the_logits(self, build: Build) -> None:
        """At temperature 2 the distribution is the normalised square root of that at 1."""
        batch = rows(self.vocab_size)
        one, two = self._full(build, batch), self._full(build, batch.with_meta(temperature=2.0))
        mask = batch.items["loss_mask"]
        wanted = torch.log_softmax(one["all"][mask] / 2.0, -1)
        assert self._close(two["all"][mask], wanted)
        assert float((two["all"][mask] - one["all"][mask]).abs().max()) > 10 * self.log_prob_tolerance

    def test_rows_do_not_see_each_other(self, build: Build) -> None:
        """A row's log-probs are the same alone and packed between others, in any order."""
        batch = rows(self.vocab_size)
        engine = build(forward_only=True)
        together = engine.infer_batch(batch, MicroBatchPlan(max_rows=len(LENGTHS)))["log_probs"]
        alone = torch.cat(
            [
                engine.infer_batch(batch.select([i]), MicroBatchPlan(max_rows=1))["log_probs"]
                for i in range(batch.num_rows)
            ]
        )
        assert float((together - alone).abs().max()) <= self.log_prob_tolerance
        order = list(reversed(range(batch.num_rows)))
        turned = engine.infer_batch(batch.select(order), MicroBatchPlan(max_rows=len(LENGTHS)))["log_probs"]
        back = torch.cat(list(reversed(turned.split([LENGTHS[i] for i in order]))))
        assert float((together - back).abs().max()) <= self.log_prob_tolerance

    def test_later_tokens_do_not_matter(self, build: Build) -> None:
        """Changing a row's last token changes no log-prob before it, and an earlier token does change later ones."""
        ids = torch.arange(LONGEST) % self.vocab_size
        last, first = ids.clone(), ids.clone()
        last[-1] = (last[-1] + 1) % self.vocab_size
        first[0] = (first[0] + 1) % self.vocab_size
        batch = pack({"input_ids": [ids, last, first], "loss_mask": [[t > 0 for t in range(LONGEST)]] * 3})
        engine = build(forward_only=True)
        a, b, c = batch.split_items(engine.infer_batch(batch, MicroBatchPlan(max_rows=1))["log_probs"])
        assert float((a - b)[:-1].abs().max()) <= self.log_prob_tolerance
        assert float((a - c)[1:].abs().max()) > 1e-4, "log-probs do not depend on the tokens before"

    def test_infer_equals_the_training_reader(self, build: Build) -> None:
        """What scoring says is what a loss sees in training, whatever the micro-batches."""
        batch = rows(self.vocab_size)
        engine = build()
        scored = engine.infer_batch(batch, MicroBatchPlan(max_tokens=LONGEST), ("log_probs", "entropy"))
        engine.set_mode(True)
        trained = engine.forward_backward([batch], cross_entropy, forward_only=False)[0].items["log_probs"]
        assert float((scored["log_probs"] - trained.float().cpu()).abs().max()) <= self.log_prob_tolerance
        assert bool((scored["entropy"][batch.items["loss_mask"]] > 0).all())
