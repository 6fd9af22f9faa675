"""Where weights come from: files of which each rank reads only its slices, or one seeded draw shared by all ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.hub import cached_file

from rlctl.errors import EngineError, RlctlError
from rlctl.parts import values
from rlctl.parts.values import VALUE_BIAS, VALUE_HEAD
from rlctl_megatron.families import Family
from rlctl_megatron.mapping import Slice

if TYPE_CHECKING:
    from rlctl_megatron.mesh import Place

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Request:
    """A slice of a checkpoint tensor.

    Args:
        name: as a checkpoint has it.
        shape: of the whole tensor, as the config describes it.
    """

    name: str
    shape: tuple[int, ...]
    cut: Slice


class Source(Protocol):
    """Gives slices of checkpoint tensors. ``notes`` says, after a stream, what a reader of the run should know."""

    notes: dict[str, str]

    def stream(self, family: Family, requests: Sequence[Request]) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate over (index of a request, its slice), each request once, in any order.

        Every rank iterates to the end; where weights are sent between ranks, this is collective.

        Raises:
            EngineError: the source does not hold what ``family`` needs.
        """
        ...


def draw_value_head(family: Family, seed: int) -> torch.Tensor:
    """A value head ``[1, D]`` from ``seed`` alone, with the model's own standard deviation."""
    return values.draw_value_head(family.sizes["hidden"], family.initializer_range, seed)


# ---- files --------------------------------------------------------------------------------------------------------
@dataclass
class FileSource:
    """The safetensors files of a local directory or a hub id.

    A file is opened (and, from the hub, fetched) only when a slice of it is needed. Slices are views of the mapped file: pages
    without an asked row stay on disk. A slice of columns has a part of every row, so of the few tensors that are split so
    (two a layer) a rank may touch all pages, though it copies its columns alone.

    Args:
        path: directory, or hub id.
        revision: of the hub id.
        seed: draws the value head where the files hold a language model.
    """

    path: str
    revision: str | None = None
    seed: int = 0
    notes: dict[str, str] = field(default_factory=dict, init=False)
    _files: dict[str, str] = field(default_factory=dict, init=False)
    _open: dict[str, Any] = field(default_factory=dict, init=False)
    _bytes_read: int = field(default=0, init=False)

    @property
    def bytes_read(self) -> int:
        """Bytes of the slices that were given so far."""
        return self._bytes_read

    def stream(self, family: Family, requests: Sequence[Request]) -> Iterator[tuple[int, torch.Tensor]]:
        """See :class:`Source`. No collective runs here.

        Raises:
            EngineError: files that are missing, damaged or of another model.
        """
        try:
            self._files = self._locate()
            self._check_names(family)
            for index, request in enumerate(requests):
                if request.name == VALUE_HEAD and VALUE_HEAD not in self._files:
                    yield index, request.cut.of(draw_value_head(family, self.seed))
                else:
                    yield index, self._read(request)
        finally:
            self._open.clear()

    def _locate(self) -> dict[str, str]:
        """Tensor name to file name."""
        problem: EngineError | None = None
        for name in (SINGLE, INDEX):
            try:
                found = self._fetch(name)
            except EngineError as error:
                # The hub may fail for another reason than a missing file; the first word is kept for that.
                problem = problem or error
                continue
            if name == SINGLE:
                return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
            return self._read_index(found)
        assert problem is not None
        raise problem

    def _read_index(self, file: Path) -> dict[str, str]:
        try:
            listed = json.loads(file.read_text())["weight_map"]
            return {str(k): str(v) for k, v in listed.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(
                f"the index of {self.path} cannot be read",
                found=f"{INDEX}: {type(error).__name__}: {error}",
                wanted="a JSON object with weight_map, tensor name to file name",
                next="fetch or save the model again",
            ) from error

    def _fetch(self, name: str) -> Path:
        local = Path(self.path)
        if local.is_dir():
            if (local / name).is_file():
                return local / name
            raise EngineError(
                f"{self.path} holds no {name}",
                found=", ".join(sorted(p.name for p in local.iterdir())[:8]) or "an empty directory",
                wanted=f"{SINGLE}, or {INDEX} and the files that it lists",
                next="save the model with transformers' save_pretrained, which writes safetensors",
            )
        try:
            found = cached_file(self.path, name, revision=self.revision)
        except (OSError, ValueError) as error:
            raise EngineError(
                f"the weights of {self.path} cannot be fetched",
                found=str(error).strip().split("\n")[0],
                wanted=f"a local directory, or a hub id, with {name}",
                next="check model.path (a path in a file is relative to that file)",
            ) from error
        assert found is not None, name
        return Path(found)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._fetch(file), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from error
        return self._open[file]

    def _damaged(self, file: str, error: Exception) -> EngineError:
        return EngineError(
            f"{file} of {self.path} is damaged",
            found=str(error),
            wanted="a complete safetensors file",
            next="fetch or save the model again",
        )

    def _read(self, request: Request) -> torch.Tensor:
        file = self._files[request.name]
        try:
            stored = self._handle(file).get_slice(request.name)
            shape, kind = tuple(stored.get_shape()), str(stored.get_dtype())
            if shape != request.shape:
                raise EngineError(
                    f"{request.name} of {self.path} has another shape than its config describes",
                    found=list(shape),
                    wanted=list(request.shape),
                    next="check that config.json belongs to the weight files",
                )
            if kind not in ("F32", "BF16", "F16"):
                raise EngineError(
                    f"{request.name} of {self.path} is not stored as plain floating point numbers",
                    found=kind,
                    wanted="float32, bfloat16 or float16",
                    next="save the model without quantisation",
                )
            cut = request.cut
            window = [slice(None)] * len(shape)
            window[cut.axis] = slice(cut.start, cut.stop)
            # An empty slice is one of rows that only pad the vocabulary.
            part = stored[tuple(window)] if cut.stop > cut.start else torch.empty(0, *shape[1:])
        except SafetensorError as error:
            raise self._damaged(file, error) from error
        self._bytes_read += part.nbytes
        return part

    def _check_names(self, family: Family) -> None:
        """Compare the files' names with the table: the same on every rank, whichever part it reads.

        Raises:
            EngineError: names are missing, or a layer has weights that the family has no place for.
        """
        wanted = family.checkpoint()
        if VALUE_HEAD in wanted and VALUE_HEAD not in self._files:
            del wanted[VALUE_HEAD]
            self.notes["value_head"] = f"{self.path} has none: drawn from the seed"
        missing = [n for n in wanted if n not in self._files]
        fused = [n for n in self._files if n.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
        if missing:
            raise EngineError(
                f"{self.path} lacks weights of a {family.model_type} {family.head}",
                found=f"{len(missing)} missing, first {missing[0]}"
                + (f"; experts are fused in {fused[0]}" if fused else ""),
                wanted=f"{len(wanted)} tensors under Hugging Face's checkpoint names",
                next="load it in transformers and save_pretrained it, which writes one tensor an expert"
                if fused
                else "set model.init=random to train it from nothing",
            )
        # What transformers drops as well: buffers that are computed, an output layer that is tied or not used, and layers
        # after the model's last. A weight inside a layer is another architecture.
        layers = tuple(f"model.layers.{i}." for i in range(family.num_layers))
        rest = [n for n in self._files if n not in wanted and not n.endswith(".rotary_emb.inv_freq")]
        inside = [n for n in rest if n.startswith(layers)]
        if inside:
            raise EngineError(
                f"{self.path} holds weights that a {family.model_type} has no place for",
                found=f"{len(inside)}, first {inside[0]}",
                wanted="the weights that its config describes",
                next="check that config.json belongs to the weight files",
            )
        self._check_value_bias(family)
        unused = [n for n in rest if n not in ("lm_head.weight", VALUE_BIAS)]
        if unused:
            self.notes["unused_weights"] = f"{len(unused)} in {self.path}, first {unused[0]}"

    def _check_value_bias(self, family: Family) -> None:
        """megatron's value head has no bias: one that is not zero would be lost without a word."""
        if VALUE_HEAD not in family.checkpoint() or VALUE_BIAS not in self._files:
            return
        bias = self._read(Request(VALUE_BIAS, (1,), Slice(0, 0, 1)))
        if bias.item():
            raise EngineError(
                f"the value head of {self.path} has a bias",
                found=f"{VALUE_BIAS} {bias.item():.6g}",
                wanted="a head without bias, or a bias of zero",
                next="save it with token_classification_bias=False",
            )


# ---- random numbers -----------------------------------------------------------------------------------------------
@dataclass
class DrawnSource:
    """Random weights that depend on the seed alone: rank 0 draws the Hugging Face model and sends it tensor by tensor.

    The draw is the one that every backend of ours makes from this config and seed. No other rank holds more than one whole
    tensor at a time.

    Args:
        config: a loaded Hugging Face config.
        dtype: of the master weights; the draw depends on it.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    seed: int
    place: Place
    trust_remote_code: bool = False
    notes: dict[str, str] = field(default_factory=dict, init=False)

    def stream(self, family: Family, requests: Sequence[Request]) -> Iterator[tuple[int, torch.Tensor]]:
        """See :class:`Source`. Collective over all ranks.

        Raises:
            EngineError: on every rank, when transformers cannot build the model on rank 0.
        """
        shared = self.place.topology.world_size > 1
        drawing = not shared or dist.get_rank() == 0
        saved: Iterator[tuple[str, torch.Tensor]] | None = None
        order: list[tuple[str, tuple[int, ...]]] = []
        problem: Exception | None = None
        if drawing:
            try:
                model = self._draw()
                order = [(n, tuple(t.shape)) for n, t in _saved(model, {n: t.to("meta") for n, t in _own(model)})]
                saved = _saved(model, dict(_own(model)))
            except Exception as error:
                # Whatever it is: the other ranks wait for the list. It is raised below.
                problem = error
        if shared:
            word: list[Any] = [order, None if problem is None else _in_words(problem)]
            dist.broadcast_object_list(word, src=0, device=self._object_device())
            order = word[0]
            if problem is None and word[1] is not None:
                raise EngineError("rank 0 could not build the model", found=word[1], next="see rank 0's own message")
        if problem is not None:
            raise problem
        wanted = family.checkpoint()
        drawn = {n: s for n, s in order if n in wanted}
        assert drawn == {n: s for n, s in wanted.items() if n != VALUE_HEAD}, (
            "the table does not fit transformers' model"
        )
        yield from self._send(family, requests, order, saved, shared)

    def _send(
        self,
        family: Family,
        requests: Sequence[Request],
        order: Sequence[tuple[str, tuple[int, ...]]],
        saved: Iterator[tuple[str, torch.Tensor]] | None,
        shared: bool,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        by_name: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_name.setdefault(request.name, []).append(index)
        problem: Exception | None = None
        for name, shape in order:
            whole: torch.Tensor | None = None
            if saved is not None and problem is None:
                try:
                    drawn = next(saved, None)
                    assert drawn is not None, f"the draw ends before {name}"
                    whole = drawn[1]
                except Exception as error:
                    # Whatever it is: the other ranks wait for all tensors of the list, and get some. It is raised at the end.
                    problem = error
            if shared:
                sent = torch.empty(shape, dtype=self.dtype, device=self.place.device)
                if whole is not None:
                    sent.copy_(whole)
                dist.broadcast(sent, src=0)
                whole = sent
                del sent
            if whole is not None:
                for index in by_name.get(name, ()):
                    # A copy, so that a slice does not keep the whole tensor.
                    yield index, requests[index].cut.of(whole).clone()
            # Let go before there is room for the next one.
            del whole
        if problem is not None:
            raise problem
        for index in by_name.get(VALUE_HEAD, ()):
            yield index, draw_value_head(family, self.seed)

    def _draw(self) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            try:
                return AutoModelForCausalLM.from_config(
                    self.config, dtype=self.dtype, trust_remote_code=self.trust_remote_code
                )
            except (ValueError, KeyError, ImportError) as error:
                raise EngineError(
                    f"transformers builds no causal language model of type {self.config.model_type!r}",
                    found=str(error).split("\n")[0],
                ) from error

    def _object_device(self) -> torch.device | None:
        return self.place.device if self.place.device.type != "cpu" else None


def _in_words(problem: Exception) -> str:
    return problem.what if isinstance(problem, RlctlError) else f"{type(problem).__name__}: {problem}"


def _own(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, a tied one once under its first name."""
    yield from ((n, p.detach()) for n, p in model.named_parameters())


def _saved(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (checkpoint name, tensor), in a fixed order.

    transformers keeps the experts of a layer in one tensor and saves them apart. Only one module's tensors are taken apart
    at a time: it copies them.
    """
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(name.rpartition(".")[0], {})[name] = tensor
    for group in groups.values():
        yield from revert_weight_conversion(model, group).items()
