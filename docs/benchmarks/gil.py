"""How much of a sample's time holds the GIL, stage by stage, and what one process can reach on a host of many cores.

pip install py-spy
PYTHONPATH=. python docs/benchmarks/gil.py photos          # after docs/benchmarks/loading.py make

One thread makes batches, and py-spy looks at it from outside 500 times a second: where is it, does it hold the lock?
The share of looks with the lock, times the processor time of a row, is what a row holds it for; threads of one process
cannot make more rows a second than one over that. The error of a count of n looks is about 1 / sqrt(n) of it; and
processor time grows with what else runs on the machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from docs.benchmarks.loading import HOME, LENGTH

BATCH, SECONDS, LOOKS_PER_S = 64, 20, 500
AUGMENT = {"horizontal_flip_prob": 0.5, "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
STAGES = {
    "IndexSamples.image": "read image",
    "IndexSamples.caption": "read caption",
    "uniforms": "random numbers",
    "apply_changes": "flip and colour",
    "Images.decode": "decode",
    "Images.write": "crop and resize",
    "Tokenizer.encode": "tokenize",
}
"""Functions whose samples are a stage's; the first of them that is in the stack counts."""


def make_batches(workload: str, transform: str, *, augment: bool) -> None:
    """Make batches in this thread, say the processor time of a row in µs, and end."""
    import torch

    from mmdata.config import DataConfig
    from mmdata.loader.batch_maker import BatchMaker
    from mmdata.loader.work import Task
    from mmdata.plan.from_config import build_plan

    torch.set_num_threads(1)
    data = DataConfig(
        shards=str(HOME / workload),
        tokenizer=str(HOME / "tokenizer"),
        global_batch_size=BATCH,
        text_buckets=[LENGTH],
        transform=transform,
        augment=AUGMENT if augment else None,
    )
    worker = BatchMaker.from_config(data)
    plan = build_plan(data, worker.index, worker.tokenizer)
    steps = plan.steps(0, start=0, rank=0, world_size=1)
    tasks = cycle([Task(0, step.number, step.bucket, step.rows, step.passes) for step in islice(steps, 10)])
    worker.make(next(tasks))
    print("ready", flush=True)
    rows, started, busy_s = 0, time.monotonic(), time.process_time()
    while time.monotonic() < started + SECONDS + 4:
        worker.make(next(tasks))
        rows += BATCH
    print((time.process_time() - busy_s) / rows * 1e6)


def looks(options: list[str], *, gil: bool) -> tuple[Counter[str], float]:
    """How often a thread was seen in each stage, with the GIL or at all, and its processor time a row in µs."""
    with tempfile.NamedTemporaryFile("r") as stacks:
        maker = subprocess.Popen([sys.executable, __file__, *options, "--make"], stdout=subprocess.PIPE, text=True)
        assert maker.stdout is not None
        maker.stdout.readline()
        command = f"py-spy record --pid {maker.pid} --duration {SECONDS} --rate {LOOKS_PER_S} --format raw".split()
        subprocess.run(
            [*command, "--output", stacks.name, *(["--gil"] if gil else [])], check=True, capture_output=True
        )
        found: Counter[str] = Counter()
        for line in Path(stacks.name).read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            functions = {frame.partition(" (")[0] for frame in stack.split(";")}
            found[next((stage for name, stage in STAGES.items() if name in functions), "the rest")] += int(count)
        return found, float(maker.communicate()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--transform", default="train")
    parser.add_argument("--augment", action="store_true", help="flip and colour")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make:
        make_batches(given.workload, given.transform, augment=given.augment)
        return
    options = [given.workload, "--transform", given.transform, *(["--augment"] if given.augment else [])]
    (held, held_cpu_us), (seen, seen_cpu_us) = looks(options, gil=True), looks(options, gil=False)
    row_us = min(held_cpu_us, seen_cpu_us)
    total, locked = seen.total(), held.total()
    print(f"{' '.join(options)}: {row_us:.0f} µs of processor time a row, {locked} of {total} looks with the GIL")
    for stage, count in seen.most_common():
        print(f"{stage:16} {row_us * count / total:7.0f} µs, with the GIL {row_us * held[stage] / total:6.0f} µs")
    print(f"with the GIL {row_us * locked / total:.0f} µs: {1e6 * total / locked / row_us:,.0f} rows/s at most")


if __name__ == "__main__":
    main()
