"""Training weights to rollout weights, fingerprinted.

Two in-process ways live here: the rollout engine generates from the training module itself (*shared*), or takes the
exported Hugging Face tensors (*copy*); :mod:`rlctl.runtime.transfer` has the ways between processes. After a copy, each
tensor's fingerprint is taken on both sides and compared, so a stale, partial or wrongly mapped sync stops the run instead
of shifting its reward.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.engine import Engine
from rlctl.errors import GuardError

_SAMPLE = 4096
_WORD = 8


def fingerprint_tensor(tensor: torch.Tensor) -> str:
    """Short hexadecimal fingerprint of a tensor: shape, dtype, an evenly strided sample of its bytes, and the sum of all
    its bytes taken eight at a time as whole numbers, modulo 2**64.

    The sum sees every single changed bit and is the same in whatever order a device adds; the sample tells permutations
    apart. It reads the memory once: a sum of the values themselves would first convert each of them.
    """
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // _SAMPLE)
    sample = flat[::stride][:_SAMPLE].contiguous().cpu()
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(sample.view(torch.uint8).numpy().tobytes())
    content = flat.contiguous().view(torch.uint8)
    if content.storage_offset() % _WORD:
        content = content.clone()  # a view that begins within a word
    whole = content.numel() // _WORD * _WORD
    total = content[:whole].view(torch.int64).sum().item() + content[whole:].sum(dtype=torch.int64).item()
    digest.update(f"{int(total) % 2**64:016x}".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class SyncReport:
    """What one sync did.

    Args:
        how: ``shared``, ``copy``, ``controller``, or the name of a link between processes (``gloo``, ``nccl``).
        num_bytes: of the tensors that were handed over, once, however many ranks got them.
        seconds: with export, loading and all checks.
        peak_bytes: the most that a rank held beside its engines: buckets and one tensor. 0 where nothing is packed.
    """

    version: int
    how: str
    num_tensors: int
    num_bytes: int
    seconds: float
    peak_bytes: int = 0

    @property
    def gb_per_s(self) -> float:
        """10**9 bytes a second over the whole sync; 0 where nothing was handed over."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0


class Ledger:
    """What an export has given out so far.

    Args:
        verify: take fingerprints.
    """

    def __init__(self, *, verify: bool) -> None:
        self.sent: dict[str, str] = {}
        """Name -> fingerprint, or an empty text."""
        self.num_bytes = 0
        self._verify = verify

    def note(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """``weights`` as they are, each written down before it is given out.

        Raises:
            GuardError: a name comes a second time.
        """
        for name, tensor in weights:
            if name in self.sent:
                raise GuardError(
                    f"the training engine exports weight {name!r} twice",
                    found=f"a second one of shape {tuple(tensor.shape)} after {len(self.sent)} tensors",
                    wanted="every tensor of the model exactly once",
                )
            self.sent[name] = fingerprint_tensor(tensor) if self._verify else ""
            self.num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor


def sync_weights(
    actor: Engine, rollout: Engine, version: int, *, share: bool, verify: bool, dtype: str | None
) -> SyncReport:
    """Make ``rollout`` serve the weights of ``actor``.

    Args:
        version: counts syncs; the rollout engine drops every cache of older versions.
        share: try to hand over the live module first.
        verify: compare fingerprints after a copy.
        dtype: dtype of the copy, None for the master weights'.

    Raises:
        GuardError: a name was exported twice or not loaded, or a fingerprint differs.
    """
    start = time.perf_counter()
    if share:
        module = actor.local_module()
        if module is not None and rollout.attach_module(module, version):
            return SyncReport(version, "shared", 0, 0, time.perf_counter() - start)
    ledger = Ledger(verify=verify)
    result = rollout.load_weights(ledger.note(actor.export_weights(dtype)), version)
    check_coverage(ledger.sent, result, version)
    if verify:
        check_fingerprints(ledger.sent, rollout.weight_fingerprint(list(ledger.sent)), version)
    return SyncReport(version, "copy", len(ledger.sent), ledger.num_bytes, time.perf_counter() - start)


def check_coverage(sent: Mapping[str, str], answer: Mapping[str, Any], version: int) -> None:
    """Compare what was sent with what ``rlctl_load_weights`` answered.

    Raises:
        GuardError: a tensor was not taken, or one was never sent.
    """
    not_loaded = sorted(set(sent) - set(answer["loaded"]))
    missing = list(answer.get("missing", []))
    if not_loaded or missing:
        raise GuardError(
            f"weight sync {version} does not cover the rollout model",
            found=f"not taken: {', '.join(not_loaded[:5]) or 'none'}; never sent: {', '.join(missing[:5]) or 'none'}",
            wanted="every tensor of the model exactly once",
            next="compare model.path of actor and rollout; `rlctl doctor` lists versions",
        )


def check_fingerprints(sent: Mapping[str, str], served: Mapping[str, str], version: int) -> None:
    """Compare the fingerprints of what was sent with those of what is served.

    Raises:
        GuardError: they differ.
    """
    differing = [name for name, value in sent.items() if served.get(name) != value]
    if differing:
        raise GuardError(
            f"weight sync {version}: the rollout engine serves other weights than were sent",
            found=f"{len(differing)} of {len(sent)} tensors differ, first {differing[0]}",
            wanted="equal fingerprints",
            next="set guards.weight_fingerprint=false only if the rollout engine converts weights on purpose",
        )
