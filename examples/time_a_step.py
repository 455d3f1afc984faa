"""python examples/time_a_step.py SHARDS MODEL --batch-size 64     # MODEL: a folder with a tokenizer, or a hub name

Time a batch of the loader and a training step with torch.utils.benchmark: medians that can be compared.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.benchmark import Measurement, Timer
from transformers import CLIPModel

import mmdata
from mmdata.batch import Batch, normalized, to_device, valid_inputs


def time_it(name: str, **call: Any) -> Measurement:
    """Time one call, over and over for some seconds, after it was called a few times.

    blocked_autorange repeats until it has run for min_run_time and waits for the GPU before it looks at the clock: a
    call on a GPU returns before the work is done. Its num_threads, 1 by default, are those of torch in this thread.
    """
    timer = Timer("call()", globals=call, label=name, num_threads=torch.get_num_threads())
    timer.timeit(3)  # memory is allocated, kernels are chosen, files are in the page cache
    return timer.blocked_autorange(min_run_time=2.0)


def main() -> None:
    """Print milliseconds of a batch and of a step, and which of the two a loop would wait for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--num-workers", type=int, default=2)
    given = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = CLIPModel.from_pretrained(given.model).to(device).train()  # comes in eval mode
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader = mmdata.Loader.from_config(
        {
            "shards": given.shards,
            "tokenizer": given.model,
            "global_batch_size": given.batch_size,
            "image_size": model.config.vision_config.image_size,
            "max_length": model.config.text_config.max_position_embeddings,
            "loading": {"num_workers": given.num_workers},
        }
    )

    def endless() -> Any:
        while True:
            yield from loader  # epoch after epoch

    def step(batch: Batch) -> None:
        inputs = valid_inputs(batch)
        inputs["pixel_values"] = normalized(inputs["pixel_values"])
        loss = model(**inputs, return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batches = endless()
    ready = to_device(next(batches), device)
    # One after the other: a step that is timed while workers run shares its cores with them.
    load = time_it("batch", call=lambda: next(batches))
    batches.close()  # the workers rest
    train = time_it("step", call=lambda: step(ready))
    for found in (load, train):
        print(f"{found.label} {found.median * 1e3:.1f} ms (middle half within {found.iqr * 1e3:.1f} ms)")
    waits = max(0.0, 1 - train.median / load.median)
    print(f"a loop waits for data for {waits:.0%} of its time" + (" or more" if device.type == "cpu" else ""))


if __name__ == "__main__":
    main()
