"""Rows as segments of one packed sequence, with a prompt that several rows share laid out once.

In group-based RL many rows of a micro-batch start with the same prompt. Nothing in it is scored, and causal attention
makes its hidden states the same in each of those rows, so it is computed once: the rows' remainders become segments of
their own that look back at the shared one. Values and gradients are those of separate rows.

A *root* segment starts a sequence (a whole row or a shared prompt); a *tail* continues its parent, a root. Roots come
first, by ascending length; tails follow by (parent's length, own length), so that equal shapes are neighbours.

Shapes: N tokens of the batch, M <= N tokens of the packed sequence, R rows, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Segments:
    """The packed sequence, in model order.

    Args:
        lengths: ``[S]`` tokens of each segment.
        parents: ``[S]`` index of the segment that a tail continues, -1 for roots.
        take: ``[M]`` index into the batch of each packed token.
        positions: ``[M]`` position of each packed token in its row.
        where: ``[N]`` packed index of each token of the batch.
    """

    lengths: Ints
    parents: Ints
    take: Ints
    positions: Ints
    where: Ints

    @property
    def bounds(self) -> Ints:
        """``[S + 1]`` starts of the segments, M at the end."""
        return _bounds(self.lengths)

    @property
    def shares(self) -> bool:
        """True when some prompt is laid out once for several rows."""
        return bool((self.parents >= 0).any())

    def keys(self) -> tuple[Ints, Ints]:
        """(``[K]`` packed index of every key that a segment's queries may see, ``[S + 1]`` starts of the segments' keys)."""
        starts: list[int] = self.bounds.tolist()
        index: list[Ints] = []
        for segment, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                index.append(np.arange(starts[parent], starts[parent + 1]))
            index.append(np.arange(starts[segment], starts[segment + 1]))
        sizes = self.lengths + np.where(self.parents >= 0, self.lengths[self.parents], 0)
        return np.concatenate(index), _bounds(sizes)


def _bounds(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def plan_segments(ids: Ints, mask: NDArray[np.bool_], starts: Ints, *, lean: bool, share: bool) -> Segments:
    """Segments of a batch.

    Args:
        ids: ``[N]`` token ids; mask ``[N]`` True where a token is scored.
        starts: ``[R + 1]`` starts of the rows, N at the end.
        lean: leave out tokens that no scored token depends on: the last of each row, and rows without scored tokens.
        share: lay equal prompts out once.
    """
    num_rows = len(starts) - 1
    first, last = _scored_spans(mask, starts)
    lengths = np.maximum(last, 0) if lean else np.diff(starts)
    if not lengths.any():
        # A micro-batch that scores nothing still runs, so that its gradients are there and zero.
        lengths[0] = 1
    split, owner = lengths.copy(), np.arange(num_rows)
    if share:
        _share_prompts(ids, starts, first, split, owner)
    roots = np.flatnonzero((owner == np.arange(num_rows)) & (split > 0))
    roots = roots[np.argsort(split[roots], kind="stable")]
    root_of_row = np.full(num_rows, -1)
    root_of_row[roots] = np.arange(len(roots))
    root_of_row = root_of_row[owner]
    rest = lengths - split
    tails = np.flatnonzero(rest > 0)
    tails = tails[np.lexsort((root_of_row[tails], rest[tails], split[tails]))]
    tail_of_row = np.full(num_rows, -1)
    tail_of_row[tails] = len(roots) + np.arange(len(tails))

    seg_lengths = np.concatenate([split[roots], rest[tails]])
    seg_sources = np.concatenate([starts[:-1][roots], (starts[:-1] + split)[tails]])
    seg_offsets = np.concatenate([np.zeros(len(roots), np.int64), split[tails]])
    seg_starts = _bounds(seg_lengths)
    within = np.arange(seg_starts[-1]) - np.repeat(seg_starts[:-1], seg_lengths)
    row = np.repeat(np.arange(num_rows), np.diff(starts))
    offset = np.arange(len(ids)) - starts[:-1][row]
    # What lean leaves out has no place; nothing asks for it.
    where = np.where(offset < split[row], seg_starts[root_of_row[row]] + offset, -1)
    in_tail = (offset >= split[row]) & (offset < lengths[row])
    where = np.where(in_tail, seg_starts[tail_of_row[row]] + offset - split[row], where)
    return Segments(
        lengths=seg_lengths,
        parents=np.concatenate([np.full(len(roots), -1), root_of_row[tails]]),
        take=within + np.repeat(seg_sources, seg_lengths),
        positions=within + np.repeat(seg_offsets, seg_lengths),
        where=where,
    )


def _scored_spans(mask: NDArray[np.bool_], starts: Ints) -> tuple[Ints, Ints]:
    """Per row: offset of its first and of its last scored token, -1 where nothing is scored."""
    first, last = np.full(len(starts) - 1, -1), np.full(len(starts) - 1, -1)
    scored = np.flatnonzero(mask)
    row = np.searchsorted(starts, scored, side="right") - 1
    last[row] = scored - starts[row]
    # Of several writes to one place numpy keeps the last.
    first[row[::-1]] = (scored - starts[row])[::-1]
    return first, last


def _share_prompts(ids: Ints, starts: Ints, first: Ints, split: Ints, owner: Ints) -> None:
    """Set ``split`` to the prompt's length and ``owner`` to the row that computes it where rows share a prompt.

    A prompt is what comes before a row's first scored token.
    """
    groups: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(first > 0):
        groups.setdefault(ids[starts[row] : starts[row] + first[row]].tobytes(), []).append(int(row))
    for members in groups.values():
        if len(members) > 1:
            split[members] = first[members[0]]
            owner[members] = members[0]
