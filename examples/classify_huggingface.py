"""python examples/classify_huggingface.py shards/flowers/train shards/flowers/val MODEL     # a folder or a hub's name
torchrun --nproc-per-node=2 examples/classify_huggingface.py shards/flowers/train shards/flowers/val MODEL

Fine-tune an image classifier with the Hugging Face Trainer. A folder for each class becomes shards with
`mmdata convert flowers shards/flowers --val-share 0.1`. After a stop or a kill, the same command continues from the
newest checkpoint. OUT/model has the names of the classes and the image processor:
`pipeline("image-classification", "OUT/model")` works.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, EvalPrediction, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import mmdata
from mmdata.integrations.huggingface import LoaderTrainer


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """The share of right answers among rows with a label; -100 stands for none."""
    known = found.label_ids >= 0
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids)[known].mean())}


def main() -> None:
    """Train for some epochs, and print the accuracy after each; an existing checkpoint is resumed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("val_shards")
    parser.add_argument("model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="over all processes")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--out", type=Path, default=Path("runs/classify-huggingface"))
    given = parser.parse_args()

    names = mmdata.Index.open(given.shards).class_names
    if not names or names != mmdata.Index.open(given.val_shards).class_names:  # labels are numbers, each folder's own
        parser.error("both folders of shards need labels, of the same classes")
    last = get_last_checkpoint(str(given.out)) if given.out.is_dir() else None
    model = AutoModelForImageClassification.from_pretrained(
        last or given.model,  # the Trainer itself leaves out weights with another name in files (transformers #43701)
        id2label=dict(enumerate(names)),
        label2id={name: label for label, name in enumerate(names)},
        ignore_mismatched_sizes=True,  # the head of other classes is made anew
    )
    data = {
        "shards": given.shards,
        "val": {"shards": given.val_shards},
        "global_batch_size": given.batch_size,  # no tokenizer
        "crop_scale": [0.25, 1.0],
        "augment": {"horizontal_flip_prob": 0.5},
    }
    arguments = TrainingArguments(
        str(given.out),
        num_train_epochs=given.epochs,
        learning_rate=given.lr,
        logging_steps=10,
        save_strategy="epoch",
        eval_strategy="epoch",
        report_to="none",
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        use_cpu=not torch.cuda.is_available(),  # under torchrun on CPUs the Trainer is otherwise alone in each process
    )
    processor = AutoImageProcessor.from_pretrained(given.model)  # its mean and deviation are those of the batches
    trainer = LoaderTrainer(data, model=model, args=arguments, processing_class=processor, compute_metrics=accuracy)
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(str(given.out / "model"))


if __name__ == "__main__":
    main()
