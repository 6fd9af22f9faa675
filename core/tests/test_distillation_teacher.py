"""The teacher role: which teacher scores a row, at which temperature, and which answers are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from rlctl.algorithms.distillation_loss import TEACHER_TEMPERATURE
from rlctl.batch import PackedBatch, pack
from rlctl.config.schema_distillation import DistillationConfig
from rlctl.data.rows import Row
from rlctl.engine_records import EngineInfo
from rlctl.errors import BatchError, DataError, EngineError
from rlctl.microbatch import MicroBatchPlan
from rlctl.readers import DenseReader
from rlctl.roles.teacher import ONE, TeacherRole, teacher_of
from rlctl.runtime.remote import RemoteEngine
from rlctl.scoring import ScoreLoss

V, K = 10, 3
PLAN = MicroBatchPlan(max_rows=8)


@dataclass
class BigramEngine:
    """A model whose logits depend on the last token alone, scored by the code that engines run."""

    seed: int
    vocab: int = V
    heard: list[PackedBatch] = field(default_factory=list)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(1, self.vocab, "bigram")

    def logits(self) -> torch.Tensor:
        return torch.randn(self.vocab, self.vocab, generator=torch.Generator().manual_seed(self.seed)) * 2

    def infer_batch(self, batch: PackedBatch, plan: MicroBatchPlan, want: Sequence[str]) -> dict[str, torch.Tensor]:
        self.heard.append(batch)
        reader = DenseReader(self.logits()[batch.items["input_ids"]], batch)
        return dict(ScoreLoss(tuple(want))(reader, batch).items)


def batch(temperature: float = 0.7) -> PackedBatch:
    ids = [[1, 5, 7, 2, 9], [3, 3, 8], [4, 0, 6, 6]]
    mask = [[False, False, True, True, True], [False, True, True], [False, False, True, True]]
    return pack(
        {"input_ids": ids, "loss_mask": mask}, meta={"temperature": temperature}, dtypes={"loss_mask": torch.bool}
    )


def role(mode: str = "forward_kl_topk", topk: int = K, student_vocab: int = V, **teachers: BigramEngine) -> TeacherRole:
    engines = cast("dict[str, RemoteEngine]", teachers or {ONE: BigramEngine(1)})
    config = DistillationConfig.model_validate({"loss_mode": mode, "topk": topk})
    return TeacherRole(engines, PLAN, config, student_vocab)


def annotate(
    asked: TeacherRole, given: PackedBatch, names: Sequence[str] = (ONE,) * 3, student: Any = None
) -> PackedBatch:
    return asked.annotate(given, names, cast(RemoteEngine, student or BigramEngine(2)), PLAN)


def at_temperature(engine: BigramEngine, given: PackedBatch) -> torch.Tensor:
    """``[N, V]`` log-probs of what each scored token could have been, zero elsewhere; written out."""
    ids = given.items["input_ids"]
    out = torch.zeros(len(ids), engine.vocab)
    for t in given.items["loss_mask"].nonzero().flatten().tolist():
        out[t] = (engine.logits()[ids[t - 1]] / given.meta["temperature"]).log_softmax(-1)
    return out


@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk", "reverse_kl_topk"])
def test_a_batch_is_scored_at_its_own_temperature(mode: str) -> None:
    given, student, teacher = batch(), BigramEngine(2), BigramEngine(1)
    got = annotate(role(mode, teacher=teacher), given, ("teacher",) * 3, student)
    want = at_temperature(teacher, given)
    mask, ids = given.items["loss_mask"], given.items["input_ids"]
    assert torch.allclose(got.items["teacher_log_probs"], want.gather(1, ids[:, None])[:, 0], atol=1e-6)
    assert got.meta[TEACHER_TEMPERATURE] == 0.7
    if mode == "k3":
        assert "teacher_topk_ids" not in got.items
        return
    owner = at_temperature(student, given) if mode == "reverse_kl_topk" else want
    picked = owner.topk(K).indices
    assert torch.equal(got.items["teacher_topk_ids"][mask], picked[mask])
    assert torch.allclose(got.items["teacher_topk_log_probs"], want.gather(1, got.items["teacher_topk_ids"]), atol=1e-6)
    assert bool(student.heard) == (mode == "reverse_kl_topk")
    # The student's own fields stay, and what was only for asking goes.
    assert set(got.items) - set(given.items) == {"teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs"}


@pytest.mark.parametrize("mode", ["k2", "jsd_topk", "reverse_kl_topk"])
def test_each_row_is_scored_by_its_own_teacher(mode: str) -> None:
    given = batch()
    a, b = BigramEngine(1), BigramEngine(5)
    got = annotate(role(mode, a=a, b=b), given, ["b", "a", "b"])
    alone = {name: annotate(role(mode, x=engine), given, ["x"] * 3) for name, engine in (("a", a), ("b", b))}
    for row, name in enumerate("bab"):
        start, stop = given.cu_seqlens[row : row + 2].tolist()
        for key in set(got.items) - set(given.items):
            assert torch.equal(got.items[key][start:stop], alone[name].items[key][start:stop]), (row, key)
    assert not torch.equal(alone["a"].items["teacher_log_probs"], alone["b"].items["teacher_log_probs"])
    assert [h.num_rows for h in (a.heard[0], b.heard[0])] == [1, 2]


def test_an_id_that_the_teacher_does_not_have_is_refused_before_it_is_asked() -> None:
    small = BigramEngine(1, vocab=9)
    with pytest.raises(BatchError, match="does not know a token") as caught:
        annotate(role("k3", teacher=small), batch(), ("teacher",) * 3)
    assert caught.value.found == "id 9 in its text"
    assert not small.heard
    text = pack({"input_ids": [[1, 2, 3]], "loss_mask": [[False, True, True]]}, dtypes={"loss_mask": torch.bool})
    # The student alone has token 9, and it is among its most probable ones.
    with pytest.raises(BatchError, match="does not know a token") as caught:
        annotate(role("reverse_kl_topk", topk=9, teacher=small), text, ("teacher",))
    assert caught.value.found == "id 9 in its top-k"


def test_a_padded_row_of_the_teacher_is_no_token_of_the_student() -> None:
    wide = BigramEngine(1, vocab=V + 6)
    with pytest.raises(EngineError, match="one that the student does not have"):
        annotate(role(topk=V, teacher=wide), batch(), ("teacher",) * 3)
    # Of one token only the sampled ids matter, which the student wrote itself.
    annotate(role("k3", teacher=wide), batch(), ("teacher",) * 3)


@pytest.mark.parametrize("value", [float("nan"), 0.5])
def test_an_answer_that_is_no_distribution_is_refused(value: float) -> None:
    class Broken(BigramEngine):
        def infer_batch(self, batch: PackedBatch, plan: MicroBatchPlan, want: Sequence[str]) -> dict[str, torch.Tensor]:
            out = super().infer_batch(batch, plan, want)
            broken = out["topk_log_probs"].clone()
            broken[3] = value
            return {**out, "topk_log_probs": broken}

    with pytest.raises(EngineError, match="no distribution"):
        annotate(role(teacher=Broken(1)), batch(), ("teacher",) * 3)


def test_more_tokens_than_the_smaller_vocabulary_are_refused_at_once() -> None:
    with pytest.raises(DataError, match=r"distillation\.topk") as caught:
        role(topk=V, teacher=BigramEngine(1, vocab=V - 2))
    assert caught.value.next == f"set distillation.topk={V - 2} for all of it"
    with pytest.raises(DataError, match=r"distillation\.topk"):
        role(topk=V, student_vocab=V - 1)
    role("k3", topk=99)


def test_rows_find_their_teacher_by_a_key() -> None:
    row = Row(7, "train.jsonl:8", "1 + 1", "2", None, "sums", {"level": 3})
    assert teacher_of(row, "data_source", [ONE]) == ONE
    assert teacher_of(row, "data_source", ["words", "sums"]) == "sums"
    assert teacher_of(row, "level", ["3"]) == "3"
    for route_by, names, found in (("data_source", ["words"], "data_source 'sums'"), ("lang", ["3"], "no lang")):
        with pytest.raises(DataError, match=r"row 7 of train\.jsonl:8 has no teacher") as caught:
            teacher_of(row, route_by, names)
        assert caught.value.found == found
