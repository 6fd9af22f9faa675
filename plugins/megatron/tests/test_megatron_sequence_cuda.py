"""The CUDA paths of attention and reader: the varlen kernel with whole rows and with chunks of rows, half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_sequence_ranks import (
    attention_module,
    draw,
    draw_batch,
    everything,
    moved,
    off_by,
    plain_attention,
    sources,
)

from rlctl.topology import Topology
from rlctl_megatron import attention
from rlctl_megatron.layout import lay_out
from rlctl_megatron.mesh import Place
from rlctl_megatron.reader import VocabParallelReader
from rlctl_megatron.token_stats import VocabShard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers here")

LENGTHS = (7, 63, 1, 128, 30, 30, 30, 17)
H, G, E = 8, 2, 32


class _Rank:
    """A process group's size and rank, without one."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_varlen_kernel_equals_the_masked_product(monkeypatch, cp, window) -> None:
    device = torch.device("cuda")
    if attention._varlen_kernel()[0] is None:
        pytest.skip("this torch has no varlen attention")
    batch = draw_batch(LENGTHS, 11)
    full = [draw(sum(LENGTHS), heads, E, seed=i).to(device, torch.bfloat16) for i, heads in enumerate((H, G, G))]
    weights = draw(sum(LENGTHS), H, E, seed=9).to(device)
    exact = [t.float().cpu().requires_grad_() for t in full]
    want = plain_attention(exact[0], exact[1], exact[2], LENGTHS, window)
    (want * weights.cpu()).sum().backward()

    def another_path(*_: Any, **__: Any) -> Any:
        raise AssertionError("not the kernel")

    monkeypatch.setattr(attention, "scaled_dot_product_attention", another_path)
    q, k, v = (t.clone().requires_grad_() for t in full)
    places = [Place(Topology(world_size=cp, cp=cp), device, cp_rank=rank) for rank in range(cp)]
    at = [sources(batch, place, False) for place in places]
    everyone = torch.cat([torch.cat([k, v], -1)[one] for one in at])
    monkeypatch.setattr(attention, "gather_tokens", lambda mine, group: everyone)
    total = torch.zeros((), device=device)
    for place, one in zip(places, at, strict=True):
        group = _Rank(cp, place.cp_rank) if cp > 1 else None
        laid = lay_out(batch, device, place, False)
        out = attention_module(H, G, E, cp, group, window)(q[one], k[one], v[one], None, packed_seq_params=laid.packed)
        real = torch.ones_like(one, dtype=torch.bool) if laid.padding is None else ~laid.padding[0]
        assert off_by([out[real].cpu()], [want[one[real].cpu()]]) < 2e-2
        total = total + (out[real].float() * weights[one[real]]).sum()
    total.backward()
    for mine, other in zip((q, k, v), exact, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert off_by([mine.grad.cpu()], [other.grad]) < 2e-2


def test_float32_on_the_device_takes_the_exact_path() -> None:
    device = torch.device("cuda")
    laid = lay_out(draw_batch(LENGTHS, 11), device, Place(Topology(world_size=1), device), False)
    full = [draw(sum(LENGTHS), heads, E, seed=i).to(device) for i, heads in enumerate((H, G, G))]
    torch.backends.cuda.matmul.allow_tf32 = False
    out = attention_module(H, G, E)(*full, None, packed_seq_params=laid.packed)
    q, k, v = (t.cpu() for t in full)
    assert off_by([out.cpu()], [plain_attention(q, k, v, LENGTHS, -1)]) < 1e-5


def test_the_reader_on_the_device_equals_the_one_on_the_cpu() -> None:
    batch, vocab = draw_batch(LENGTHS, 1000), 1000
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        laid = lay_out(batch, device, Place(Topology(world_size=1), device), False)
        hidden = draw(laid.positions.numel(), 64, seed=1).to(device, torch.bfloat16).requires_grad_()
        weight = (draw(vocab, 64, seed=2) * 0.2).to(device, torch.bfloat16).requires_grad_()
        here = moved(batch, device)
        reader = VocabParallelReader(hidden, laid, here.items["input_ids"], VocabShard(weight, vocab))
        number, values = everything(reader, here, vocab)
        number.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        found.append([t.detach().cpu().float() for t in (*values, hidden.grad, weight.grad)])
    assert off_by(found[1], found[0]) < 2e-2
