"""Program of one rank for test_sharding.py: gradients and clipping under FSDP2, one file a case; retrieval.

usage: sharded_ranks.py FOLDER RANK. Three processes start; the first two also form a world of two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from mmdata.config.train import AverageConfig, TrainConfig
from mmdata.train import EMA, train_step
from mmdata.train.evaluation.retrieval import retrieval
from mmdata.train.ranks import collectives, parallel, sharding
from mmdata.train.run.optimizer import averages, load_averages, make_optimizer
from tests.train import ranks

CPU = torch.device("cpu")


def run_case(case: dict, rank: int, out: Path) -> None:
    torch.manual_seed(rank)  # rank 0's weights are what counts
    model = ranks.make_model(case.get("dropout", 0.0), **case.get("model", {}))
    if rank > 0:
        torch.nn.init.normal_(model.image_projection.weight)
    if case.get("compile"):
        parallel.BACKEND = "aot_eager"  # needs no compiler
        parallel.compile_blocks(model)
    sharding.shard(model, CPU)
    torch.manual_seed(50 + rank)
    batch = ranks.make_batch(rank, case)
    with torch.no_grad():
        found = model.eval()(batch)  # an evaluation between two steps changes nothing
        texts = model.encode_text(batch["input_ids"], batch["attention_mask"])  # as one of several captions a row does
        torch.testing.assert_close(texts, found.text_features)
    model.train()
    torch.manual_seed(50 + rank)
    step = train_step(model, batch, ranks.loss_function(case), micro_batch_size=case.get("micro_batch_size"))
    parameters = dict(model.named_parameters())
    gradients = {
        name: None if parameter.grad is None else sharding.whole(parameter.grad).clone()
        for name, parameter in parameters.items()
    }
    kept = {
        name: parameter.to_local().numel() for name, parameter in parameters.items() if sharding.is_shard(parameter)
    }
    norm = sharding.clip_grad_norm(model.parameters(), 0.01)
    clipped = sharding.whole(parameters["image_projection.weight"].grad)
    numbers = {"loss": step.loss, "gradients": gradients, "kept": kept, "norm": norm, "clipped": clipped}
    torch.save({**numbers, "scale": parameters["logit_scale"].grad}, out)


def bf16_case(case: dict, rank: int) -> dict:
    """Loss, gradients and the number formats within a block, of a step of a float32 model under autocast."""
    model = ranks.make_model(0.0, **case.get("model", {})).float()
    if case.get("compile"):
        parallel.BACKEND = "aot_eager"
        parallel.compile_blocks(model)
    formats: dict[str, list[str]] = {}
    block = sharding.towers_of(model)[1].transformer.blocks[1]
    parts = {"block": block, "norm": block.mlp_norm, "linear": block.mlp[0]}
    for name, part in parts.items() if not case.get("compile") else ():

        def note(part: torch.nn.Module, given: tuple, name: str = name) -> None:
            own = list(part.parameters())
            formats[name] = [str(given[0].dtype), str(own[0].dtype)]

        part.register_forward_pre_hook(note)
    wrapped: torch.nn.Module = model
    if case["way"] == "fsdp":
        sharding.shard(model, CPU, autocast_dtype=torch.bfloat16)
    else:
        wrapped = collectives.wrap(model, CPU)
    step = train_step(
        wrapped,
        ranks.make_batch(rank, case),
        ranks.loss_function(case),
        micro_batch_size=case.get("micro_batch_size"),
        autocast_dtype=torch.bfloat16,
    )
    gradients = {name: sharding.whole(p.grad).clone() for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        features = model.eval()(ranks.make_batch(rank, case)).text_features
    return {"loss": step.loss, "gradients": gradients, "formats": formats, "features": features}


def shared_retrieval(*, share: bool) -> dict[str, float]:
    """Retrieval over 11 rows of noise, some of which belong together."""
    noise = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(0))
    images, texts = torch.nn.functional.normalize(noise, dim=2)
    ids = torch.arange(11) // 2
    return retrieval(images, texts, image_ids=ids, text_ids=ids, share=share, tile=(1024, 3))


def counted_collectives() -> tuple[int, int]:
    """Of an update of the averaged weights of a sharded model, and, as a control, of making one weight whole."""
    model = ranks.make_model(0.0)
    average = EMA(model, AverageConfig(decay=0.5))
    sharding.shard(model, CPU)
    average.shard(CPU)
    with CommDebugMode() as of_update:
        average.update(model)
    with CommDebugMode() as of_whole:
        sharding.whole(model.image_projection.weight)
    return of_update.get_total_counts(), of_whole.get_total_counts()


def muon_update(*, is_sharded: bool) -> dict[str, torch.Tensor]:
    """What an update of muon, from gradients that equal the weights, adds to the matrices of a block."""
    model = ranks.make_model(0.0)
    if is_sharded:
        sharding.shard(model, CPU)
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", weight_decay=0.0))
    block = dict(model.text_tower.transformer.blocks[0].named_parameters())
    before = {name: sharding.whole(weight).detach().clone() for name, weight in block.items() if weight.ndim == 2}
    load_averages(model, optimizer, averages(model, optimizer, make=True))  # as a resumed run does
    for weight in model.parameters():
        weight.grad = weight.detach().clone()
    optimizer.step()
    return {name: sharding.whole(block[name]).detach() - weight for name, weight in before.items()}


def main() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    cases = json.loads((folder / "cases.json").read_text())
    for world_size in (3, 2):
        if rank >= world_size:
            break
        rendezvous = f"file://{folder}/rendezvous{world_size}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
        for name, case in cases.items():
            if len(case["valid"]) != world_size:
                continue
            if "way" in case:
                torch.save(bf16_case(case, rank), folder / f"{name}.{rank}.pt")
            else:
                run_case(case, rank, folder / f"{name}.{rank}.pt")
        torch.save(muon_update(is_sharded=True), folder / f"muon{world_size}.{rank}.pt")
        torch.save(counted_collectives(), folder / f"collectives{world_size}.{rank}.pt")
        torch.save(shared_retrieval(share=True), folder / f"retrieval{world_size}.{rank}.pt")
        collectives.finish()


if __name__ == "__main__":
    main()
