"""The commands that look at a config take image size and text length from the model's folder, as training does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers import CLIPConfig, CLIPModel

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
COMMANDS = {
    "bench": ["c.yaml", "--steps", "1", "--step-ms", "1000", "data.loading.num_workers=0"],
    "replay": ["c.yaml", "5", "--save", "row.png"],
    "report": ["c.yaml", "--out", "r.html"],
    "plan": ["c.yaml"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_takes_image_size_and_text_length_from_the_models_folder(
    name: str,
    data: dict[str, Any],
    tmp_path: Path,
    command: Callable[..., tuple[int, str, str]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    sizes = {
        "text_config": {**SMALL, "vocab_size": 300, "max_position_embeddings": 6},
        "vision_config": {**SMALL, "image_size": 24, "patch_size": 8},
    }
    CLIPModel(CLIPConfig(**sizes)).save_pretrained("clip")
    unset = {name: data[name] for name in ("shards", "tokenizer", "global_batch_size")}
    settings = {"data": unset, "model": {"name": "pretrained", "clip": "clip"}}
    Path("c.yaml").write_text(yaml.safe_dump(settings))
    with caplog.at_level(logging.INFO, "mmdata"):
        status, output, errors = command(name, *COMMANDS[name])
    assert status == 0, errors
    assert [record.getMessage() for record in caplog.records if "the folder of the model" in record.getMessage()] == [
        "data.image_size is 24, as the folder of the model says",
        "data.max_length is 6, as the folder of the model says",
    ]
    if name == "replay":
        assert Image.open("row.png").size == (24, 24)
        assert ": 6 tokens, " in output
