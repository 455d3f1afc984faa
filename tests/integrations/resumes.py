"""Run by test_resumes.py: one loop of others trains an epoch of ten steps, undisturbed, killed and resumed.

Each process of a killed training ends itself by SIGKILL when its tenth batch has come; the checkpoint is that of its
ninth step. Processes are forked after the imports, and keep a digest of each row that their model got.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint

import mmdata
from mmdata.images.pixels import PixelTransform

STEPS, SAVED = 10, 9
ARGUMENTS: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "num_train_epochs": 1}
ARGUMENTS |= {"save_strategy": "steps", "save_steps": SAVED, "save_total_limit": 1, "bf16": False}


class Run:
    """One process of a training.

    Attributes:
        data: settings, whose loader decodes in the thread that asks for a batch: no batch is made ahead.
        model: a folder with a CLIP.
        out: for checkpoints.
        resumes: whether there is a checkpoint.
    """

    def __init__(self, spec: dict[str, Any], out: Path, phase: str, ranks: tuple[int, int]) -> None:
        self.data, self.model, self.out = spec["data"], spec["model"], out
        self.phase, (self.rank, self.world_size) = phase, ranks
        self.resumes = phase in ("resumed", "fewer")
        self.digests: list[list[str]] = []
        self.decoded = 0
        decode = PixelTransform.decode

        def counted(*positional: Any, **named: Any) -> Any:
            self.decoded += 1
            return decode(*positional, **named)

        PixelTransform.decode = counted

    def see(self, pixels: Any) -> None:
        """Keep the rows of a batch that has come; the killed training ends when its last one has."""
        rows = torch.as_tensor(pixels)
        self.digests.append([blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in rows])
        if self.phase == "killed" and len(self.digests) == STEPS:
            self.digests.pop()  # nothing was trained on it
            self.write()
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self) -> None:
        """Keep it in a file."""
        found = {"digests": self.digests, "decoded": self.decoded}
        (self.out.parent / f"{self.phase}-{self.world_size}-{self.rank}.json").write_text(json.dumps(found))

    def loader(self) -> mmdata.Loader:
        """This rank's loader."""
        return mmdata.Loader.from_config(self.data, rank=self.rank, world_size=self.world_size)

    def watch(self, module: nn.Module) -> None:
        """See the pixels that a model gets."""
        module.register_forward_pre_hook(lambda _, __, named: self.see(named["pixel_values"]), with_kwargs=True)


def huggingface(run: Run) -> None:
    from transformers import CLIPModel, TrainingArguments

    from mmdata.integrations.huggingface import LoaderTrainer

    clip = CLIPModel.from_pretrained(run.model)
    run.watch(clip)
    trainer = LoaderTrainer(run.data, model=clip, args=TrainingArguments(str(run.out), **ARGUMENTS))
    trainer.train(resume_from_checkpoint=run.resumes)


def accelerate(run: Run) -> None:
    from accelerate import Accelerator

    accelerator, loader = Accelerator(cpu=True), run.loader()
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.register_for_checkpointing(loader)
    if run.resumes:
        accelerator.load_state(str(run.out))
    for epoch in range(loader.state_dict()["epoch"], 1):
        loader.set_epoch(epoch)
        for batch in loader:
            run.see(batch["pixel_values"])
            accelerator.backward(model(batch["valid"].float()[:, None]).mean())
            if loader.state_dict()["step"] == SAVED:
                accelerator.save_state(str(run.out))


def in_lightning(run: Run) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from mmdata.integrations.lightning import LoaderDataModule

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Tensor:
            run.see(batch["pixel_values"])
            return self.layer(batch["valid"].float()[:, None]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    save = ModelCheckpoint(run.out, filename="last", every_n_train_steps=SAVED)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = "ddp" if run.world_size > 1 else "auto"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=run.world_size, strategy=strategy, max_epochs=1, callbacks=[save], **quiet
    )
    path = str(run.out / "last.ckpt") if run.resumes else None
    trainer.fit(Module(), datamodule=LoaderDataModule(run.data), ckpt_path=path)


def in_grain(run: Run) -> None:
    import grain

    from mmdata.integrations.grain import LoaderDataset

    batches, own = iter(LoaderDataset(run.loader())), run.out / str(run.rank)  # without jax Grain knows of one process
    own.mkdir(parents=True, exist_ok=True)
    handler = grain.checkpoint.CheckpointHandler()
    if run.resumes:
        handler.restore(own, batches)
    for step, batch in enumerate(batches):
        run.see(batch["pixel_values"])
        if step + 1 == SAVED:
            handler.save(own, batches)


def torchtitan(run: Run) -> None:
    from tests.integrations.titan import photos_loader

    loader = photos_loader(run.data).build(dp_rank=run.rank, dp_world_size=run.world_size, local_batch_size=4)
    if run.resumes:
        checkpoint.load({"dataloader": loader}, checkpoint_id=run.out)
    for step, (inputs, _) in enumerate(loader):
        run.see(inputs["input"])
        if step + 1 == SAVED:
            checkpoint.save({"dataloader": loader}, checkpoint_id=run.out)


def sentence_transformers(run: Run) -> None:
    import sentence_transformers as library
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    from mmdata.integrations.huggingface import as_dataset

    class Loss(CachedMultipleNegativesRankingLoss):
        def forward(self, sentence_features: Any, labels: Any) -> Any:
            features = list(sentence_features)
            run.see(features[0]["pixel_values"])
            return super().forward(features, labels)

    model, rows = library.SentenceTransformer(run.model, device="cpu"), 8 // run.world_size
    arguments: Any = library.SentenceTransformerTrainingArguments
    trainer = library.SentenceTransformerTrainer(
        model=model,
        args=arguments(str(run.out), per_device_train_batch_size=rows, **ARGUMENTS),
        train_dataset=as_dataset(run.loader()),
        loss=Loss(model, mini_batch_size=2),
    )
    trainer.train(resume_from_checkpoint=run.resumes)


def trl(run: Run) -> None:
    from tests.integrations.vision_language import fine_tuner

    trainer = fine_tuner(run.loader(), run.model, run.out, 8 // run.world_size, ARGUMENTS)
    run.watch(trainer.model)
    trainer.train(resume_from_checkpoint=run.resumes)


LOOPS: dict[str, tuple[Callable[[Run], None], list[str]]] = {
    "huggingface": (huggingface, ["transformers", "mmdata.integrations.huggingface"]),
    "accelerate": (accelerate, ["accelerate"]),
    "lightning": (in_lightning, ["lightning.pytorch", "mmdata.integrations.lightning"]),
    "sentence-transformers": (sentence_transformers, ["sentence_transformers", "mmdata.integrations.huggingface"]),
    "grain": (in_grain, ["mmdata.integrations.grain"]),
    "torchtitan": (torchtitan, ["tests.integrations.titan"]),
    "trl": (trl, ["tests.integrations.vision_language"]),
}
"""By name: the training, and what it imports."""


def process(name: str, spec: dict[str, Any], out: Path, phase: str, ranks: tuple[int, int], port: int) -> None:
    """One process of a training, with the environment that torchrun would give it."""
    rank, world_size = ranks
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if world_size > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
        os.environ.update({key: str(value) for key, value in names.items()})
        if name in ("torchtitan", "grain"):
            torch.distributed.init_process_group("gloo")
    folder = {"resumed": f"killed-{world_size}"}.get(phase, f"{phase}-{world_size}")
    run = Run(spec, out / folder, phase, ranks)
    LOOPS[name][0](run)
    run.write()


def train(name: str, spec: dict[str, Any], out: Path, phase: str, world_size: int) -> list[int]:
    """The exit statuses of the processes of a training."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    ranks = [(rank, world_size) for rank in range(world_size)]
    processes = [context.Process(target=process, args=(name, spec, out, phase, pair, port)) for pair in ranks]
    for started in processes:
        started.start()
    for started in processes:
        started.join()
    return [started.exitcode or 0 for started in processes]


def main(name: str, spec: dict[str, Any], out: Path) -> None:
    """All trainings of a loop, and a file of their exit statuses."""
    for module in LOOPS[name][1]:
        import_module(module)
    statuses = {f"{phase} 1": train(name, spec, out, phase, 1) for phase in ("whole", "killed", "resumed")}
    statuses["killed 2"] = train(name, spec, out, "killed", 2)
    shutil.copytree(out / "killed-2", out / "fewer-1")
    statuses |= {"resumed 2": train(name, spec, out, "resumed", 2), "fewer 1": train(name, spec, out, "fewer", 1)}
    (out / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
