"""New groups of near neighbours between two epochs, from the features that the run has computed on the way."""

from __future__ import annotations

import time

import torch

from mmdata.train.batches import Batches, LoaderExtras
from mmdata.train.memory.feature_cache import FeatureCache
from mmdata.train.memory.neighbours import group_neighbours, mean_similarity
from mmdata.train.ranks import collectives
from mmdata.train.ranks.lockstep import check_same_batches, on_all, on_first


def regroup(
    batches: Batches, cache: FeatureCache | None, epoch: int, *, seed: int, device: torch.device
) -> dict[str, float]:
    """Let a loader go on with the neighbours of now, at the start of an epoch where it is due. A collective.

    Rank 0 computes.

    Args:
        batches: the loader.
        cache: features of the rows; those that no batch has held have no group.
        epoch: that begins.
        seed: of the search.
        device: of the search.

    Returns:
        seconds; and similarity of two rows of a group, random_similarity of two of random groups (mean cosines), which
        are there on the rank that computed and not where the run has made these groups before. Empty where the loader
        takes no groups now.
    """
    regroups = LoaderExtras.of(batches).regroups
    if regroups is None or cache is None or not regroups.is_due(epoch):
        return {}
    group, started, found = collectives.cpu_group(), time.perf_counter(), dict[str, float]()

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
    check_same_batches(LoaderExtras.of(batches).identity, group)
    return {"seconds": time.perf_counter() - started, **found}
