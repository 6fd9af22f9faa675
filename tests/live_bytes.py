"""Bytes of live tensors, counted by torch itself: every storage that an operator returns, until it is freed or resized."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts storages while it is entered; :meth:`hold` names those that were there before.

    ``peak`` is the most bytes at once, ``at_peak`` the bytes of each held name at that moment (``made`` is what operators
    made since).
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._resize = torch.UntypedStorage.resize_
        self.by_name: Counter[str] = Counter()
        self.now = 0
        self.peak = 0
        self.at_peak: dict[str, int] = {}

    def hold(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._see(tensor.to_local() if hasattr(tensor, "to_local") else tensor, name)  # type: ignore[attr-defined]
        self._compare()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._see(value, "made")
        self._compare()
        return out

    def _see(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        entry = self._known.get(key)
        if entry is not None and entry[0]() is storage:
            self._set(key, entry[0], storage.nbytes(), entry[2])
            return
        if entry is not None:
            self._forget(key, entry[0])
        self._set(key, weakref.ref(storage, lambda ref, key=key: self._forget(key, ref)), storage.nbytes(), name)

    def _set(self, key: int, ref: weakref.ref[Any], size: int, name: str) -> None:
        before = self._known[key][1] if key in self._known else 0
        self._known[key] = (ref, size, name)
        self.now += size - before
        self.by_name[name] += size - before

    def _forget(self, key: int, ref: weakref.ref[Any]) -> None:
        entry = self._known.get(key)
        if entry is not None and entry[0] is ref:
            del self._known[key]
            self.now -= entry[1]
            self.by_name[entry[2]] -= entry[1]

    def _compare(self) -> None:
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, dict(self.by_name)

    def __enter__(self) -> LiveBytes:
        # FSDP frees gathered weights by resizing their storage to nothing, which no operator reports.
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = self._resize(storage, size)
            entry = self._known.get(id(storage))
            if entry is not None and entry[0]() is storage:
                self._set(id(storage), entry[0], storage.nbytes(), entry[2])
                self._compare()
            return out

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[arg-type]
