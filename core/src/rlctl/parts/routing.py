"""Which experts a mixture of experts chose: read off the model's own routers, for whoever scores rows.

Shapes: M tokens of the packed sequence (of this rank's slice, where it holds one), N tokens of the batch, P scored tokens,
L layers with experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from rlctl.logits import LogitsReader
from rlctl.parts.layout import Layout
from rlctl.parts.ulysses import assemble


class Routing:
    """Keeps the choices of a model's last forward pass.

    Routers are the modules whose class is called so and that return whole numbers: the chosen experts ``[M, K]``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._chosen: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith("router"):
                module.register_forward_hook(self._keeper(name))

    def _keeper(self, name: str) -> Callable[[Any, Any, Any], None]:
        def keep(module: Any, args: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            for part in parts:
                if isinstance(part, torch.Tensor) and part.ndim >= 2 and not part.is_floating_point():
                    self._chosen[name] = part.detach().flatten(0, -2)

        return keep

    @property
    def note(self) -> str | None:
        """What is known after a forward pass, in words; None for a model whose choices cannot be read."""
        sizes = {t.shape[-1] for t in self._chosen.values()}
        if len(sizes) != 1:
            return None
        return f"choices of {len(self._chosen)} layers are reported, {sizes.pop()} experts a token"

    def chosen(self, layout: Layout, num_items: int) -> torch.Tensor:
        """``[N, L, K]`` float: of the position that predicts each scored token; -1 where nothing is scored."""
        whole = torch.stack(list(self._chosen.values()), 1)[layout.sources].float()
        if layout.mine is not None and layout.part is not None:
            whole = assemble(whole, layout.mine, layout.positions.numel(), layout.part.ulysses)
        out = whole.new_full((num_items, *whole.shape[1:]), -1.0)
        return out.index_copy(0, layout.positions, whole)


class RoutedReader:
    """A reader that also knows the experts.

    Args:
        reader: what answers everything else.
    """

    def __init__(self, reader: LogitsReader, experts: Callable[[], torch.Tensor]) -> None:
        self._reader = reader
        self.experts = experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)
