"""Memory of one training engine on one rank, at the moments of a step when most is held.

Activations grow through the forward pass and gradients through the backward pass, so the peak is at the head, at either end
of the backward pass, or in the optimizer step. Every item names its formula.

Legend: D hidden, F feed-forward, V vocabulary, T tokens of a micro-batch on this rank, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.plan.activations import Precision, layer_bytes_a_token, passing_bytes_a_token
from rlctl.plan.head import HeadMemory
from rlctl.plan.memory import Item, Load, Moment, Setting
from rlctl.plan.parameters import DTYPE_BYTES, LayerCount, ParameterCount
from rlctl.plan.shapes import ModelShape


@dataclass(frozen=True)
class StateMemory:
    """Weights, gradients and optimizer state, which only need the number of weights.

    Args:
        total: weights of the model; ``trained`` of them get gradients and moments, ``experts`` are in experts.
    """

    role: str
    total: int
    trained: int
    precision: Precision
    setting: Setting
    experts: int = 0

    def _bytes(self, dtype: str) -> tuple[int, str]:
        known = {"master": self.precision.master, "compute": self.precision.compute, "main": "float32"}
        name = known.get(dtype, dtype)
        return DTYPE_BYTES[name], name

    def _share(self, part: str, number: int) -> tuple[float, str]:
        """(parameters of this rank, words)."""
        s = self.setting
        split, shards = s.tp * s.pp, s.shards if part in s.policy.sharded else 1
        if s.ep > 1 and not s.policy.gathers and self.experts:
            mine = (number - self.experts) / split + self.experts / (s.ep * s.pp)
            words = f" / tp {s.tp} x pp {s.pp}, experts / ep {s.ep} x pp {s.pp}" + (
                f", / {shards} ranks" if shards > 1 else ""
            )
            return mine / shards, words
        return number / (split * shards), f" / {split * shards} ranks" if split * shards > 1 else ""

    def item(self, name: str, num_bytes: float, formula: str) -> Item:
        return Item(name, self.role, round(num_bytes), formula)

    def weights(self) -> Item:
        size, dtype = self._bytes(self.setting.policy.weights)
        mine, over = self._share("weights", self.total)
        return self.item("weights", mine * size, f"{self.total:,} parameters x {size} bytes ({dtype}){over}")

    def gradients(self) -> Item:
        size, dtype = self._bytes(self.setting.policy.gradients)
        mine, over = self._share("gradients", self.trained)
        kept = ", in buffers that stay" if self.setting.policy.buffered_gradients else ""
        return self.item("gradients", mine * size, f"{self.trained:,} parameters x {size} bytes ({dtype}){over}{kept}")

    def waiting_gradients(self) -> Item:
        """Gradients of earlier micro-batches while a later one runs: whole where they are reduced once, at the end."""
        if not self.setting.wrapped:
            return self.gradients()
        size, split = DTYPE_BYTES[self.setting.reduce], self.setting.tp * self.setting.pp
        words = (
            f"{self.trained:,} parameters x {size} bytes ({self.setting.reduce}), whole on each rank until the last "
        )
        return self.item("gradients", self.trained * size / split, words + "micro-batch reduces them")

    def optimizer(self) -> Item:
        mine, over = self._share("optimizer", self.trained)
        kept = [
            (name, d) for name, d in self.setting.policy.optimizer if d != "main" or self.precision.compute != "float32"
        ]
        parts = [(name, *self._bytes(dtype)) for name, dtype in kept]
        words = " + ".join(f"{name} {size} bytes ({dtype})" for name, size, dtype in parts)
        return self.item(
            "optimizer", mine * sum(n for _, n, _ in parts), f"{self.trained:,} parameters x ({words}){over}"
        )


class TrainMemory:
    """The moments of one training engine's step.

    Args:
        trained: False for a role that only scores.
    """

    def __init__(
        self,
        role: str,
        shape: ModelShape,
        count: ParameterCount,
        precision: Precision,
        setting: Setting,
        load: Load,
        trained: bool = True,
    ) -> None:
        self.shape, self.count, self.p, self.s, self.load = shape, count, precision, setting, load
        self.trained = trained
        experts = shape.moe_layers * self._expert_matrices()
        self.state = StateMemory(role, count.total, count.trained, precision, setting, experts)
        self.head = HeadMemory(-(-shape.vocab_size // setting.tp), shape.hidden_size, precision, setting, load)
        self._item = self.state.item

    def under(self, setting: Setting, load: Load | None = None) -> TrainMemory:
        """The same engine under another setting, or with another micro-batch."""
        return TrainMemory(self.state.role, self.shape, self.count, self.p, setting, load or self.load, self.trained)

    # ---- activations -------------------------------------------------------------------------------------------
    def _is_moe(self, kind: LayerCount) -> bool:
        return bool(self.shape.moe_layers) and kind is self.count.layers[-1]

    def layer_bytes(self, kind: LayerCount) -> float:
        """Bytes that one layer keeps without checkpointing."""
        each = layer_bytes_a_token(
            self.shape, self.p, moe=self._is_moe(kind), flash=self.s.flash, ragged=self.load.ragged, tp=self.s.tp
        )
        return each * self.load.tokens + self._mask_bytes() / self.shape.num_layers

    def _mask_bytes(self) -> float:
        """Masks of sliding-window layers; a flash kernel needs none."""
        window = self.shape.sliding_window
        if self.s.flash or window is None or window >= self.load.longest:
            return 0.0
        return self.shape.sliding_layers * self.load.longest**2 * self.p.compute_bytes

    def activations(self, *, checkpointing: bool, at_head: bool = True) -> Item:
        """What the forward pass leaves for the backward pass, apart from logits."""
        t, d, r, stages = self.load.tokens, self.shape.hidden_size, self.p.stream_bytes, self.s.pp
        layers = self.shape.num_layers
        if checkpointing:
            size = layers * t * d * r / stages
            words = f"{layers} layers x T {t:,} x D {d:,} x {r} bytes: the input of each layer"
        else:
            size = sum(kind.num_layers * self.layer_bytes(kind) for kind in self.count.layers) / stages
            words = f"{layers} layers x T {t:,} x {size * stages / (layers * t):,.0f} bytes: all that their backward pass needs"
        words += f" / {stages} stages" if stages > 1 else ""
        size += 2 * t * self.shape.head_dim * r + (self._final_norm() if at_head else 0)
        return self._item("activations", size, words + (", and the last norm" if at_head else ""))

    def _final_norm(self) -> float:
        """The last norm and the hidden states that predict scored tokens."""
        kind, r = self.shape.family.norm, self.p.stream_bytes
        width = r if kind == "layer" else 4 + (4 if r == 4 or kind == "gemma" else self.p.compute_bytes)
        return self.shape.hidden_size * (self.load.tokens * width + self.load.scored * r)

    def _layer_working(self, kind: LayerCount) -> float:
        """Gradients of activations at the fullest moment of one layer's backward pass, its feed-forward."""
        d, c, r = self.shape.hidden_size, self.p.compute_bytes, self.p.stream_bytes
        if self._is_moe(kind):
            k, f = self.shape.experts_per_token, self.shape.expert_size
            e = self.p.master_bytes if self.p.autocast else c
            # The gated product's gradients, or the results' way back to their tokens (in float32).
            inner = max((2 * f - d) * k * e, 12 * k * d)
        else:
            inner = (2 if self.shape.family.gated else 1) * self.shape.intermediate_size * c
        return self.load.tokens * (inner / self.s.tp + 2 * d * r)

    # ---- weights that are whole or cast for a time ---------------------------------------------------------------
    def _whole(self, root: int, layers: float) -> list[Item]:
        """Whole weights of a wrapped module while it runs: of the root (embedding, head) and of layers."""
        if not self.s.wrapped:
            return []
        split, c = self.s.tp * self.s.pp, self.p.compute_bytes
        outside, one = self.count.outside_layers, self.count.largest_layer.parameters
        if not self.s.reshard:
            layers = max(layers, self.shape.num_layers)
        words = (
            f"({root} x {outside:,} of embedding and head + {layers:g} layers x {one:,}) x {c} bytes ({self.p.compute})"
        )
        return [self._item("gathered weights", (root * outside + layers * one) * c / split, words)]

    def _cast_weights(self) -> list[Item]:
        """Copies that autocast makes of matrices; they live as long as the graph that used them. Experts are not cast."""
        if not self.p.autocast:
            return []
        n, c = self.count.layer_matrices - self.state.experts, self.p.compute_bytes
        return [
            self._item("cast weights", n * c, f"{n:,} elements of the layers' matrices x {c} bytes ({self.p.compute})")
        ]

    def _expert_matrices(self) -> int:
        return self.shape.num_experts * 3 * self.shape.hidden_size * self.shape.expert_size

    @property
    def _gradient_bytes(self) -> int:
        """Of an element of a new gradient: it has the dtype of the weight that was computed with."""
        own = self.s.wrapped or self.s.policy.weights == "compute"
        return self.p.compute_bytes if own else self.p.master_bytes

    def _gradients_so_far(self, done: int, begun: float) -> list[Item]:
        """Gradients while a backward pass runs.

        Args:
            done: layers whose backward pass has ended.
            begun: the share of one more layer whose gradients are there.
        """
        grad = self._gradient_bytes
        split = self.s.tp * self.s.pp
        layer = sum(kind.num_layers * kind.parameters for kind in self.count.layers) / self.shape.num_layers / split
        wide = self.shape.vocab_size * self.shape.hidden_size / split
        fresh = begun * layer * grad
        words = f"the head's, {done} layers' and those that one more layer has made"
        first_batch = self.load.micro_batches == 1
        if self.s.policy.buffered_gradients:
            # A weight's own goes as soon as it is in the buffer: at a layer's end all have gone.
            new = begun * layer * grad if begun < 1 else 0
            return [self._item("new gradients", new, "those of one weight, before the buffer has them")]
        if first_batch or self.shape.tied or self.s.wrapped:
            fresh += wide * grad
        if self.s.wrapped and done:
            fresh += layer * DTYPE_BYTES[self.s.reduce]
            words += f", and the buffer of one layer's reduction ({self.s.reduce})"
        if first_batch:
            fresh += done * layer * self.p.master_bytes / (self.s.shards if self.s.wrapped else 1)
        else:
            words = "new ones, before they are added"
        return [self._item("gradients", fresh, words)]

    # ---- moments -----------------------------------------------------------------------------------------------
    def _resident(self, *, stepping: bool = False) -> list[Item]:
        items = [self.state.weights()]
        if self.trained:
            items += [self.state.optimizer()] if self.s.moments and (stepping or not self.s.moments_away) else []
            if self.s.policy.buffered_gradients:
                items.append(self.state.gradients())
            elif not stepping and self.load.micro_batches > 1:
                items.append(self.state.waiting_gradients())
        return items

    def moments(self) -> list[Moment]:
        """The moments at which a step can hold most, in the order of the step."""
        if not self.trained:
            return self._scoring()
        held, ck, cast = self._resident(), self.s.checkpointing, self._cast_weights()
        acts = self.activations(checkpointing=ck)
        kept_cast = [] if ck else cast
        gathering = [Moment("gathering", (*held, *self._whole(2, 2)))] if self.s.wrapped else []
        return [
            *gathering,
            Moment("loss", (*held, *self._whole(1, 1), acts, *cast, self._logits(False), self._of_head(False))),
            Moment(
                "head's backward",
                (*held, *self._whole(1, 1), acts, *kept_cast, self._logits(True), self._of_head(True)),
            ),
            *self._layer_moments(held, kept_cast),
            self._embedding_backward(held),
            Moment("optimizer step", (*self._resident(stepping=True), *self._full_gradients())),
        ]

    def _full_gradients(self) -> list[Item]:
        """All of them, unless they are among what is there at any time."""
        return [] if self.s.policy.buffered_gradients else [self.state.gradients()]

    def _layer_moments(self, held: list[Item], cast: list[Item]) -> list[Moment]:
        """Backward passes of the first two layers that run one (the last of the model), and of the last two.

        In each, most is held in the feed-forward, or at its end when all its gradients are there.
        """
        kind, ck, num = self.count.largest_layer, self.s.checkpointing, self.shape.num_layers
        layer, inside = self.layer_bytes(kind), self.activations(checkpointing=ck, at_head=False)
        kept = inside.num_bytes / num if ck else layer
        down = (
            self._expert_matrices() // 3
            if self._is_moe(kind)
            else self.shape.hidden_size * self.shape.intermediate_size
        )
        stream = 4 * self.load.tokens * self.shape.hidden_size * self.p.stream_bytes
        out = []
        names = {num - 1: "last", num - 2: "last but one", 1: "second", 0: "first"}
        for done, name in sorted(names.items()):
            if done < 0:
                continue
            share = (num - done) / num
            acts = self._item("activations", max(0.0, inside.num_bytes - done * kept), inside.formula)
            rest = self._item("activations", max(0.0, inside.num_bytes - (done + 1) * kept), inside.formula)
            casts = [self._item(c.name, c.num_bytes * share, c.formula) for c in cast]
            whole = self._whole(1, 2 if done < num - 1 else 1)
            feed = self._working(self._layer_working(kind) + (layer if ck else 0), _words_of_layer(ck))
            end = self._working(stream, "gradients of the residual stream and of one norm")
            begun = down / kind.parameters
            out += [
                Moment(
                    f"{name} layer's backward",
                    (*held, *whole, acts, *casts, *self._gradients_so_far(done, begun), feed),
                ),
                Moment(f"{name} layer's end", (*held, *whole, rest, *casts, *self._gradients_so_far(done, 1.0), end)),
            ]
        return out

    def _embedding_backward(self, held: list[Item]) -> Moment:
        """A tied matrix has the head's gradient, the embedding's and their sum; a wrapped root is reduced as a whole."""
        full = [] if self.load.micro_batches > 1 else self._full_gradients()
        split, outside = self.s.tp * self.s.pp, self.count.outside_layers
        wide = self.shape.vocab_size * self.shape.hidden_size / split
        grad = self._gradient_bytes
        whole: list[Item] = []
        size, words = 0.0, "nothing more"
        if self.s.wrapped:
            size, words = (
                outside * (grad + DTYPE_BYTES[self.s.reduce]) / split,
                "gradients of embedding and head, and their reduction",
            )
        if self.shape.tied:
            summed = wide * grad * (3 if self.s.wrapped else 2)
            if summed + (wide * grad if self.s.wrapped else 0) > size:
                whole, size, words = self._whole(1, 0), summed, "V x D: two gradients of a tied matrix and their sum"
        return Moment("embedding's backward", (*held, *whole, *full, self._working(size, words)))

    def _working(self, num_bytes: float, words: str) -> Item:
        return self._item("working memory", num_bytes, words)

    def _scoring(self) -> list[Moment]:
        """A forward pass without gradients: one layer's tensors at a time, and the head's."""
        held = self._resident()
        t, d, r = self.load.tokens, self.shape.hidden_size, self.p.stream_bytes
        each = passing_bytes_a_token(self.shape, self.p, moe=bool(self.shape.moe_layers), tp=self.s.tp)
        words = f"T {t:,} x {each:,.0f} bytes of one layer: nothing is kept for a backward pass"
        one = self._item("activations", t * each, words)
        hidden = self._item("activations", t * d * r + self.load.scored * d * r, "the last hidden states")
        out = [
            Moment("layers", (*held, *self._whole(1, 2), one, *self._cast_weights())),
            Moment(
                "log-probs",
                (*held, *self._whole(1, 1), hidden, *self._cast_weights(), self._logits(False), self._of_head(False)),
            ),
        ]
        return [Moment("gathering", (*held, *self._whole(2, 2))), *out] if self.s.wrapped else out

    def _logits(self, backward: bool) -> Item:
        return self._item("logits", *self.head.logits(backward=backward))

    def _of_head(self, backward: bool) -> Item:
        words = (
            "casts and gradients of the head's weight and hidden states" if backward else "cast of the head's weight"
        )
        return self._working(self.head.working(backward=backward), words)


def _words_of_layer(again: bool) -> str:
    return "gradients of one layer's activations" + (", and those activations computed again" if again else "")
