"""Weights row by row, new or from a Hugging Face folder; and a folder written for other tools.

If a model fits on no rank, make it on the meta device; each rank then reads its own rows:

    fill_shards(model, rows_in("models/Llama-2-7b"))
"""

import json
from pathlib import Path

import torch

from ranklab.models.initialise import normal_by_name


def rows_by_name(std):
    """Make a source of new weights for fill_shards: a function of (name, shape, first, stop).

    One parameter at a time is whole in memory, never the whole model.
    """
    def rows(name, shape, first, stop):
        parameter = torch.ones(shape)  # norms stay so
        if len(shape) > 1:
            normal_by_name(parameter, name, std)
        return parameter[first:stop]
    return rows


def rows_in(folder):
    """Make a source for fill_shards from the weights in a Hugging Face folder.

    Only the requested rows are read.
    Raises: ValueError, when rows are read, for a missing or incomplete file or a wrong shape.
    """
    from safetensors import SafetensorError, safe_open

    index = Path(folder, "model.safetensors.index.json")
    files = json.loads(index.read_text())["weight_map"] if index.exists() else {}

    def rows(name, shape, first, stop):
        path = Path(folder, files.get(name, "model.safetensors"))
        try:
            with safe_open(path, "pt") as file:
                part = file.get_slice(name)
                if part.get_shape() != list(shape):
                    raise ValueError(f"{path}: {name} has the shape {part.get_shape()} in it, "
                                     f"and {list(shape)} by config.json")
                return part[first:stop]
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(f"{path} has no whole {name}: {error}") from None
    return rows


def save_pretrained(folder, model, weights, tokenizer):
    """Write a `folder` for from_pretrained, with the weights of a full_state_dict."""
    from safetensors.torch import save_file

    Path(folder).mkdir(parents=True, exist_ok=True)
    dtype = model.config.dtype or torch.float32
    named = {name: weights[name].to(dtype).contiguous()  # a tied matrix has one name
             for name, _ in model.named_parameters()}  # fmt: skip
    save_file(named, Path(folder, "model.safetensors"), {"format": "pt"})
    model.config.save_pretrained(folder)
    if hasattr(tokenizer, "save_pretrained"):  # one of bytes has no files
        tokenizer.save_pretrained(folder)
