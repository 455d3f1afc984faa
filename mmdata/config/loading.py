"""Settings of data.loading: who makes the batches, and where files lie. A resumed run may change all of them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mmdata.config.settings import NOT_BOOLEAN, Count, Location, Positive, Settings, Share


class LoadingConfig(Settings):
    """How batches are made, and where files are kept. No setting here changes a batch."""

    MAY_CHANGE: ClassVar[bool] = True

    num_workers: Count | Literal["auto"] = "auto"
    """Number of threads that make batches. auto: one for each CPU core that this rank may use. 0: batches are made in
    the training loop's own thread, whatever `num_processes` is."""
    num_processes: Count | Literal["auto"] = "auto"
    """Number of worker processes that share the `num_workers` threads, so that the loop never waits for Python's lock
    (the GIL); each takes the memory of one more interpreter. More than 1 helps if a transform of your own is slow
    Python code. 0: the threads are those of the training process. auto: 1 if there is a GPU, otherwise 0."""
    prefetch_batches: Positive = 2
    """Number of batches that are made before the loop asks for them, by all workers together. More helps if steps take
    unequally long, and takes the memory of so many batches."""
    cache_dir: Location | None = None
    """Folder where files of shards behind URLs are kept, shared by all processes of the machine. null: mmdata/shards in
    the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    cache_gb: Annotated[float, Field(gt=0.0), NOT_BOOLEAN] = 100.0
    """Largest size of `cache_dir`, in gigabytes (10⁹ bytes); the least recently used files are removed to make room."""
    max_bad_share: Share = 0.05
    """Largest share of rows that may fail to load, such as damaged images; above it the run ends with an error. In a
    loop of your own on several ranks this is a warning, unless `check_rows` is called on every rank."""

    @model_validator(mode="after")
    def _check(self) -> LoadingConfig:
        workers, processes = self.num_workers, self.num_processes
        if workers != "auto" and processes != "auto" and 1 < processes > workers:
            raise ValueError(
                f"num_processes ({self.num_processes}) share num_workers ({self.num_workers}): set num_workers to as "
                "many or more, or leave num_processes out"
            )
        return self
