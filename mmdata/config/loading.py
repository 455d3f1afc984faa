"""Settings of data.loading: who makes the batches, and where files lie. A resumed run may change all of them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mmdata.config.settings import Count, Location, Positive, Settings, Share


class LoadingConfig(Settings):
    """Who makes the batches, and where files lie. Batches do not depend on it."""

    MAY_CHANGE: ClassVar[bool] = True

    num_workers: Count | Literal["auto"] = "auto"
    """Threads that make batches together; 0 loads in the caller's thread, whatever `worker_type` is. auto: as many as
    this rank has usable cores."""
    worker_type: Literal["auto", "thread", "process"] = "auto"
    """thread: the workers run in the process of the training loop. process: they run in a process of their own, whose
    batches lie in shared memory. The loop then never waits for their Python code, as one of many small operations does;
    the price is the memory of one more interpreter. auto: a process if there is a GPU, otherwise
    threads."""
    num_processes: Positive = 1
    """With `worker_type: process`, processes that share the `num_workers` threads: more than one for a transform that
    is much Python code."""
    prefetch_batches: Positive = 2
    """Batches made ahead of the one in use, by all workers together: they share the rows of one after the other."""
    cache_dir: Location | None = None
    """Folder for shards behind URLs, shared by all processes; default: mmdata/shards in the user's folder of caches."""
    cache_gb: Annotated[float, Field(gt=0.0)] = 100.0
    """Gigabytes (10⁹ bytes) that folder may hold; the least recently used shards make room."""
    max_bad_share: Share = 0.05
    """A run ends when more than this share of the rows seen could not be loaded. In a loop of your own on several ranks
    this is a warning, unless `check_rows` is called on every rank."""
    check_images: Literal["auto", "always", "never"] = "auto"
    """Compares each image with its hash in the index; a row whose image changed is masked with reason file_changed.
    auto: by XXH3, about 1 % of a photo's time. An index of an earlier mmdata has no XXH3; its images are not compared,
    and the log says so. always: by SHA-256 if there is no XXH3, about 5 %. never: a changed image is decoded as it
    is."""

    @model_validator(mode="after")
    def _check(self) -> LoadingConfig:
        if self.num_processes > 1 and self.worker_type != "process":
            raise ValueError(
                f"num_processes ({self.num_processes}) are worker processes that share num_workers: set worker_type to "
                f"process (it is {self.worker_type})"
            )
        if self.num_workers != "auto" and 1 < self.num_processes > self.num_workers:
            raise ValueError(
                f"num_processes ({self.num_processes}) share num_workers ({self.num_workers}): set num_workers to as "
                "many or more, or leave num_processes out"
            )
        return self
