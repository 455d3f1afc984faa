"""Groups of near neighbours, from features: the rows of a group lie together, and each row is in one group at most.

The similarities of all pairs are never computed, and features may be mapped from a file: memory is that of one cell's
similarities and one block of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from mmdata.batch import Batch, to_device
from mmdata.train.keys import check_keys
from mmdata.train.miners import top_k_mask

FeatureSide = Literal["pair", "image", "text", "both"]
"""Which features of a row: a pair's are the normalised sum of its image's and its text's, each of length 1; both are
the two, one after the other (2, D)."""

BLOCK_ROWS = 2**15
"""Rows of features on the device at a time."""
SAMPLE_ROWS = 4096
"""Rows that decide where a cell is cut."""
LLOYD_STEPS = 10
"""Steps of k-means on that sample, after which the two means hardly move."""
_APART = -4.0
"""Added to the cosine of two rows that may not stand together: it is then below that of any two that may."""

_Unit = Callable[[Tensor], Tensor]
"""The features of rows int64 (n,), float32 (n, D) and L2-normalised, on the device."""


@dataclass(frozen=True, kw_only=True)
class Hardness:
    """Which near rows are hard negatives of a row, and which may be false ones, and stand in no group with it.

    A row's image is compared with the captions of the others, and its caption with their images. A row that is too near
    in either direction is a false one.

    Args:
        range_min: of what the margins leave, so many of the nearest rows are taken for false.
        range_max: number of nearest rows among which the hard negatives of a row are; None: all.
        absolute_margin: a hard negative's cosine is at least so much below that of the row's own image and caption.
        relative_margin: likewise, as a share of the latter: 0.05 is TopK-PercPos of 95 %.
        max_similarity: the largest cosine of two rows' own features (pairs, images or texts).
        rescored: float (N, 2, E), images and captions of a second model: among the `range_max` nearest rows, it decides
            which are near and which are false.

    Source: sentence-transformers' mine_hard_negatives; Moreira et al. 2024, NV-Retriever (arXiv:2407.15831).
    """

    range_min: int = 0
    range_max: int | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    max_similarity: float | None = None
    rescored: Tensor | NDArray[Any] | None = None

    @property
    def compares_sides(self) -> bool:
        """Whether images are compared with captions, so that the features of both are needed."""
        return any(each is not None for each in (self.absolute_margin, self.relative_margin, self.rescored))

    @property
    def judges(self) -> bool:
        """Whether `judge` leaves out anything."""
        return self.compares_sides or self.range_min > 0 or self.range_max is not None

    def judge(self, scores: Tensor, rescored: Tensor) -> tuple[Tensor, Tensor]:
        """The hard negatives of each row, and those taken for false: bool (n, n) each.

        Args:
            scores: (n, n) cosines of images with captions, or of captions with images; own ones on the diagonal.
            rescored: (n, n), those of the model that decides.
        """
        own = rescored.diagonal()[:, None]
        left = ~torch.eye(len(scores), dtype=torch.bool, device=scores.device)
        if self.range_max is not None:  # and the row's own
            left &= top_k_mask(scores, torch.ones_like(left), self.range_max + 1)
        false = torch.zeros_like(left)
        if self.absolute_margin is not None:
            false |= rescored + self.absolute_margin > own
        if self.relative_margin is not None:
            false |= rescored > own - own.abs() * self.relative_margin
        left &= ~false
        if self.range_max is not None:
            left &= top_k_mask(rescored, left, self.range_max)
        if self.range_min:
            nearest = top_k_mask(rescored, left, self.range_min)
            left, false = left & ~nearest, false | nearest
        return left, false


def group_neighbours(
    features: Tensor | NDArray[Any],
    size: int,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    cell_rows: int = 4096,
    same: Tensor | NDArray[np.int64] | None = None,
    hardness: Hardness | None = None,
    on_cell: Callable[[int], object] | None = None,
) -> Tensor:
    """Put rows into groups of `size` with a high cosine similarity within each.

    A tree of halves, each cut across the two means of a sample, ends in cells of about `cell_rows`. In a cell the row
    with the nearest neighbours comes first, takes its `size` - 1 nearest rows, and so on with those that are free. The
    better half of all groups is kept. The rows of the others, which a cut or a greedy choice has separated from their
    neighbours, go through another tree, until one cell holds them all: twice the work of one tree.

    Args:
        features: float (N, D), of any length, or (N, 2, D) of images and captions, near as pairs; np.load(path,
            mmap_mode="c") maps a file. A row of zeros, or one that is not finite, has no neighbours.
        size: rows of a group, 2 … rows with features.
        seed: on one device, equal seeds give equal groups.
        device: where to compute; default: that of the features.
        cell_rows: rows compared with each other, at least 4 × `size`.
        same: int64 (N, K), such as hashes of image and caption: rows that are equal in one of the K never stand in one
            group, where they could not be negatives of each other. None: no rows are the same.
        hardness: nor do rows that it takes for false negatives. The first row of a group takes those that are hard.
            Ranks count within a cell, which has rows without a group only. None: the nearest, however similar.
        on_cell: called with the number of rows of each cell that is done; about 2 N in all.

    Returns:
        int64 (N,): the group of each row, 0 … at most N // size - 1; -1 for rows without neighbours, and for those left
        over.

    Raises:
        ValueError: features or `same` of another shape or type; `size` out of range; or no group can be made.

    Example:
        Four rows of angles 0°, 90°, 2°, 91° and size 2 give [1, 0, 1, 0].
    """
    features = torch.as_tensor(features)
    needs_both = hardness is not None and hardness.compares_sides
    if not _are_features(features) or (needs_both and features.ndim == 2):
        what = "(rows, 2, dimensions) of images and captions" if needs_both else "(rows, dimensions)"
        raise ValueError(f"features must be float {what}: got {features.dtype} {tuple(features.shape)}")
    keys = torch.empty(len(features), 0, dtype=torch.int64) if same is None else torch.as_tensor(same)
    if keys.ndim != 2 or len(keys) != len(features) or keys.dtype != torch.int64:
        raise ValueError(f"same must be int64 ({len(features):,}, K): got {keys.dtype} {tuple(keys.shape)}")
    rescored = None if hardness is None or hardness.rescored is None else torch.as_tensor(hardness.rescored)
    if rescored is not None and (len(rescored) != len(features) or rescored.ndim != 3 or not _are_features(rescored)):
        raise ValueError(f"rescored must be float ({len(features):,}, 2, E): got {tuple(rescored.shape)}")
    lengths = torch.cat([block.float().norm(dim=-1) for block in features.split(BLOCK_ROWS)]).cpu()
    lengths = lengths if lengths.ndim == 1 else lengths.prod(1)
    left = (lengths.isfinite() & (lengths > 0)).nonzero().squeeze(1)  # (n,), rising
    if not 2 <= size <= len(left):
        raise ValueError(
            f"groups of {size} rows: the size must be 2 to {len(left)}, "
            "the rows with features (finite, and not all zero)"
        )
    generator, unit = torch.Generator().manual_seed(seed), _pairs(features, device)
    decides = features if rescored is None else rescored
    cell_rows = max(cell_rows, 4 * size)
    groups = torch.full((len(features),), -1)
    made = 0
    while len(left) >= size:
        last = len(left) <= cell_rows
        found: list[tuple[Tensor, Tensor]] = []
        for rows in _cells(unit, left, size, cell_rows, generator):
            near, similarity, apart = _compare(features, decides, rows, hardness, device)
            apart |= (keys[rows].unsqueeze(0) == keys[rows].unsqueeze(1)).any(2)
            found.append(_group_cell(near, rows, size, similarity, apart))
            if on_cell:
                on_cell(len(rows))
        members = torch.cat([rows for rows, _ in found])  # (groups, size)
        if not len(members):  # what is left may not stand together
            break
        order = torch.cat([closeness for _, closeness in found]).argsort(descending=True, stable=True)
        kept = members[order[: len(order) if last else -(-len(order) // 2)]]
        groups[kept] = torch.arange(made, made + len(kept)).unsqueeze(1)
        made += len(kept)
        left = left[groups[left] < 0]
        if last:  # each has been tried, and ranks among fewer rows would be others
            break
    if not made:
        raise ValueError(
            f"no group of {size} rows: too many rows are the same, or too similar (max_similarity, ranks, margins)"
        )
    return groups


def mean_similarity(
    features: Tensor | NDArray[Any],
    groups: Tensor,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    sample_groups: int = 2**15,
) -> tuple[float, float]:
    """Mean cosine similarity of two rows of a group, and of two rows of random groups from the same rows.

    Args:
        features: float (N, D), as for `group_neighbours`.
        groups: int64 (N,), its result.
        seed: of the sample and of the random groups.
        device: where to compute; default: that of the features.
        sample_groups: at most this many groups are measured.

    Raises:
        ValueError: no row is in a group, or `groups` are no integers.
    """
    check_keys("groups", groups)
    if not bool((groups >= 0).any()):
        raise ValueError("mean similarity of 0 groups: no row is in a group")
    unit = _pairs(torch.as_tensor(features), device)
    rows = groups.argsort(stable=True)[int((groups < 0).sum()) :]
    members = rows.reshape(int(groups.max()) + 1, -1)  # (groups, size)
    generator = torch.Generator().manual_seed(seed)
    members = members[torch.randperm(len(members), generator=generator)[:sample_groups]]
    shuffled = members.flatten()[torch.randperm(members.numel(), generator=generator)].reshape(members.shape)

    def mean(groups_of_rows: Tensor) -> float:
        blocks = groups_of_rows.split(max(1, BLOCK_ROWS // members.shape[1]))
        return float(torch.cat([_closeness(unit(rows)) for rows in blocks]).mean())

    return mean(members), mean(shuffled)


@torch.no_grad()
def embed_rows(
    model: nn.Module, batches: Iterable[Batch], *, side: FeatureSide = "pair", autocast_dtype: torch.dtype | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers int64 (b,) and features float16 (b, D) or (b, 2, D), L2-normalised, of each batch, on the CPU.

    Rows that are not valid are left out.

    Args:
        model: as `DualEncoder`, in eval mode; its device is where the batches go.
        batches: of one epoch; a row's caption is that of the epoch.
        side: which features.
        autocast_dtype: of the towers; None: as they are.
    """
    device = next(model.parameters()).device
    for on_cpu in batches:
        batch = to_device(on_cpu, device)
        with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
            image, text = model(batch)[:2]
        yield on_cpu["rows"][on_cpu["valid"]], side_features(image, text, side)[batch["valid"]].half().cpu()


def side_features(image: Tensor, text: Tensor, side: FeatureSide) -> Tensor:
    """Features (B, D) in which neighbours are searched, float32 and L2-normalised; (B, 2, D) of both sides."""
    image, text = image.float(), text.float()
    if side == "both":
        return F.normalize(torch.stack([image, text], dim=1), dim=2)
    return F.normalize({"pair": image + text, "image": image, "text": text}[side], dim=1)


def _are_features(values: Tensor) -> bool:
    return values.is_floating_point() and (values.ndim == 2 or (values.ndim == 3 and values.shape[1] == 2))


def _unit(features: Tensor, device: torch.device | str | None) -> _Unit:
    """Gives features of rows (…), as (…, D), or (…, 2, D) of both sides."""
    there = torch.device(device or features.device)
    return lambda rows: F.normalize(features[rows.to(features.device)].to(there).float(), dim=-1)


def _pairs(features: Tensor, device: torch.device | str | None) -> _Unit:
    """Gives features of rows (…), as (…, D): those of the pair where there are both sides."""
    unit = _unit(features, device)
    return unit if features.ndim == 2 else lambda rows: F.normalize(unit(rows).sum(-2), dim=-1)


def _compare(
    features: Tensor, decides: Tensor, rows: Tensor, hardness: Hardness | None, device: torch.device | str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The features (n, D) of the rows of a cell; how near each row finds the others, and which are apart, (n, n) each.

    Args:
        features: of all rows.
        decides: of all rows, those by which rows are near.
        rows: int64 (n,), of the cell.
        hardness: says which may stand together, and which of them a row takes; None: any.
        device: where to compute; the results (n, n) are on the CPU.
    """
    near = _pairs(decides, device)(rows)
    similarity = (near @ near.T).cpu()
    apart = torch.zeros_like(similarity, dtype=torch.bool)
    if hardness is not None and hardness.max_similarity is not None:
        apart |= similarity > hardness.max_similarity
    if hardness is None or not hardness.judges:
        return near, similarity, apart
    both = (_unit(each, device)(rows) for each in (features, decides))
    scores, rescored = (x @ x.T if x.ndim == 2 else x[:, 0] @ x[:, 1].T for x in both)
    hard, false = hardness.judge(scores, rescored)
    if features.ndim == 3:
        of_texts = hardness.judge(scores.T, rescored.T)
        hard, false = hard | of_texts[0], false | of_texts[1]
    return near, similarity + _APART * ~hard.cpu(), apart | (false | false.T).cpu()


def _cells(unit: _Unit, rows: Tensor, size: int, cell_rows: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The leaves of a tree over `rows`; all but one have a multiple of `size` rows."""
    if len(rows) <= cell_rows:
        yield rows
        return
    sample = rows[torch.randint(len(rows), (SAMPLE_ROWS,), generator=generator)]
    across = _two_means(unit(sample))  # (D,)
    score = torch.cat([(unit(block) @ across).cpu() for block in rows.split(BLOCK_ROWS)])
    order = score.argsort(stable=True)
    half = len(rows) // 2 // size * size
    for side in (order[:half], order[half:]):
        # rising row numbers: a mapped file is read from front to back
        yield from _cells(unit, rows[side.sort().values], size, cell_rows, generator)


def _two_means(sample: Tensor) -> Tensor:
    """(D,): from one mean to the other of two spherical clusters of `sample`, (n, D), which is in a random order."""
    means = torch.stack([sample[0], sample[(sample @ sample[0]).argmin()]])
    for _ in range(LLOYD_STEPS):
        second = (sample @ (means[1] - means[0]) > 0).float().unsqueeze(1)  # (n, 1)
        sums = torch.stack([(sample * (1 - second)).sum(0), (sample * second).sum(0)])
        means = F.normalize(sums, dim=1)
    return means[1] - means[0]


def _group_cell(features: Tensor, rows: Tensor, size: int, similarity: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
    """Groups of a cell, int64 (at most n // size, size), and how close the rows of each are, float (groups,).

    Args:
        features: (n, D), L2-normalised.
        rows: int64 (n,), their numbers.
        size: of a group.
        similarity: (n, n) on the CPU: row i's group takes the columns with the highest of row i.
        apart: bool (n, n), rows that may not stand together.
    """
    apart.fill_diagonal_(True)
    similarity = similarity + _APART * apart
    closest = similarity.topk(size - 1, dim=1).values.mean(1).argsort(descending=True, stable=True)
    taken = torch.zeros(len(rows))
    members: list[list[int]] = []
    for row in closest.tolist():
        if len(members) == len(rows) // size:
            break
        if taken[row] == 0 and (group := _nearest_free(row, similarity[row] + taken, apart, size)):
            taken[group] = _APART
            members.append(group)
    places = torch.tensor(members, dtype=torch.int64).reshape(-1, size)
    return rows[places], _closeness(features[places.to(features.device)])


def _nearest_free(row: int, nearest: Tensor, apart: Tensor, size: int) -> list[int]:
    """A row and its nearest free rows of which any two may stand together; empty if there are not enough."""
    group = [row]
    while len(group) < size:
        best = int(nearest.argmax())
        if nearest[best] < -1.5:  # a cosine is -1 or more: this row is taken, or may not join
            return []
        group.append(best)
        nearest = nearest + _APART * apart[best]
    return group


def _closeness(features: Tensor) -> Tensor:
    """Mean cosine similarity of two rows of each group: unit features (g, m, D) to float (g,), on the CPU.

    The squared length of the sum of m unit vectors is m and the m (m - 1) similarities of two.
    """
    size = features.shape[1]
    return ((features.sum(1).square().sum(1) - size) / (size * (size - 1))).cpu()
