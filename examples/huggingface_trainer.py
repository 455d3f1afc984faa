"""python examples/huggingface_trainer.py SHARDS MODEL --epochs 3     # MODEL: a folder with a tokenizer, or a hub name
torchrun --nproc-per-node=2 examples/huggingface_trainer.py SHARDS MODEL

Fine-tune a CLIP with the Hugging Face Trainer, on batches of mmdata. After a stop or a kill, the same command continues
from the newest checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, CLIPModel, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from mmdata.integrations.huggingface import LoaderTrainer


def main() -> None:
    """Train for some epochs; an existing checkpoint is resumed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="over all processes")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--save-steps", type=int, default=500, help="a checkpoint after so many, and at the end")
    parser.add_argument("--out", type=Path, default=Path("runs/huggingface"))
    given = parser.parse_args()

    torch.set_float32_matmul_precision("high")  # what is left in float32: TF32 on a GPU
    model = CLIPModel.from_pretrained(given.model)
    data = {
        "shards": given.shards,
        "tokenizer": given.model,
        "global_batch_size": given.batch_size,
        "image_size": model.config.vision_config.image_size,
        "max_length": model.config.text_config.max_position_embeddings,
    }
    arguments = TrainingArguments(
        str(given.out),
        num_train_epochs=given.epochs,
        learning_rate=given.lr,
        logging_steps=10,
        save_steps=given.save_steps,
        report_to="none",
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        use_cpu=not torch.cuda.is_available(),  # under torchrun on CPUs the Trainer is otherwise alone in each process
    )
    trainer = LoaderTrainer(data, model=model, args=arguments)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(given.out)) if given.out.is_dir() else None)
    trainer.save_model(str(given.out / "model"))
    AutoTokenizer.from_pretrained(given.model).save_pretrained(given.out / "model")


if __name__ == "__main__":
    main()
