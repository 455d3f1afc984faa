"""New groups of near neighbours between two epochs, from the features that the run has computed on the way."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from mmdata.train.batches import Regroups
from mmdata.train.memory.feature_cache import FeatureCache
from mmdata.train.memory.neighbours import group_neighbours, mean_similarity
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import on_all, on_first


def regroup(
    regroups: Regroups,
    cache: FeatureCache,
    epoch: int,
    *,
    seed: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Let a loader go on with the neighbours of now, at the start of an epoch. A collective; rank 0 computes.

    Args:
        regroups: the loader.
        cache: features of the rows; those that no batch has held have no group.
        epoch: that begins.
        seed: of the search.
        device: of the search.
        group: of the ranks.

    Returns:
        seconds; and similarity of two rows of a group, random_similarity of two of random groups (mean cosines), which
        are there on the rank that computed and not where the run has made these groups before.
    """
    started, found = time.perf_counter(), dict[str, float]()

    def make() -> None:
        if regroups.has_groups(epoch):
            return
        features = cache.features()
        of_rows = group_neighbours(
            features,
            regroups.group_size,
            seed=seed + epoch,
            device=device,
            same=regroups.rows_alike(),
        )
        near, random = mean_similarity(features, of_rows, seed=seed + epoch, device=device)
        found.update(similarity=near, random_similarity=random)
        regroups.write_groups(epoch, of_rows.numpy())

    on_first(make, group, takes=collectives.LONG)
    on_all(lambda: regroups.use_groups(epoch), group)
    return {"seconds": time.perf_counter() - started, **found}
