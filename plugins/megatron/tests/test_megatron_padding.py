"""A padding token among the others of a row: its row of the embedding gets the gradient that transformers gives it."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_tiny import CONFIGS, by_transformers, compare, engine_on, one_step, save_model

from rlctl.batch import pack
from rlctl.normalizer import item_weights

ROWS = ([5, 60, 7, 60, 9], [11, 12, 60])


@pytest.mark.parametrize(("padding", "tied"), [(60, False), (60, True), (-1, True)])
def test_looking_the_padding_token_up_does_not_train_it(tmp_path: Path, padding: int, tied: bool) -> None:
    config = {**CONFIGS["llama-tied" if tied else "llama"], "pad_token_id": padding}
    directory = save_model(tmp_path / "m", config)
    batch = pack({"input_ids": [list(r) for r in ROWS], "loss_mask": [[False] + [True] * (len(r) - 1) for r in ROWS]})
    batch = batch.with_items(item_weight=item_weights(batch, "token-mean"))
    wanted = by_transformers(directory, batch)
    embedding = wanted.gradients["model.embed_tokens.weight"]
    assert bool(embedding[60].any()) is tied, "nothing but a tied head trains it"
    assert embedding[5].any()
    with engine_on(directory) as engine:
        found = one_step(engine, batch)
    assert compare(found, wanted).largest() < 1e-4, compare(found, wanted)
