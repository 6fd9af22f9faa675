"""Weights under the names that a Hugging Face checkpoint has, one group at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlctl_fsdp.build import DTYPES
from rlctl_fsdp.lora.merge import Merged, Reader

_CONVERTS: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def persistent_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once, under their first name) and the buffers that a checkpoint holds."""
    keys = set(model.state_dict(keep_vars=True))
    buffers = {name: b for name, b in model.named_buffers() if name in keys}
    return {**dict(model.named_parameters()), **buffers}


def converts(model: PreTrainedModel, names: Iterable[str]) -> bool:
    """True where some weight of ``model`` has another name or form in a checkpoint. Asked of transformers once a model.

    Its answer for one group of names walks the whole model, so to ask it for every group would take longer than the copy.
    """
    if model not in _CONVERTS:
        probe = {name: torch.empty(0, device="meta") for name in names}
        try:
            found = revert_weight_conversion(model, dict(probe))
            _CONVERTS[model] = list(map(id, found.values())) != list(map(id, probe.values())) or list(found) != list(
                probe
            )
        except (RuntimeError, IndexError, ValueError):  # it takes tensors apart, which have no parts here
            _CONVERTS[model] = True
    return _CONVERTS[model]


@torch.no_grad()
def export_weights(model: PreTrainedModel, dtype: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (checkpoint name, whole tensor). Every rank must iterate to the end: gathering is collective.

    Tensors of one parent module are gathered together, because some models keep several checkpoint tensors fused in one
    weight (experts) or the other way round. Without sharding or ``dtype`` they share memory with the live weights, apart from
    those that an adapter is merged into.

    Raises:
        GuardError: adapters are at work and nothing that was yielded shows it; after the last tensor.
    """
    wanted = None if dtype is None else DTYPES[dtype]
    merged = Merged(model, persistent_tensors(model), wanted)
    groups: dict[str, dict[str, Reader]] = {}
    for name, read in merged.readers.items():
        groups.setdefault(name.rpartition(".")[0], {})[name] = read
    converted = converts(model, merged.readers)
    for group in groups.values():
        whole = {n: read() for n, read in group.items()}
        for name, tensor in (revert_weight_conversion(model, whole) if converted else whole).items():
            if wanted is not None and tensor.is_floating_point():
                tensor = tensor.to(wanted)
            yield name, tensor
    merged.check()
