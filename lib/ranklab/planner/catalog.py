"""Models and nodes by name, by a size, or from a file: llama-70b, 13e9, config.json, h100-dgx."""

import dataclasses
import difflib
import json
from pathlib import Path

from ranklab.planner.hf_config import of_config, read_config  # noqa: F401 of_config: for others
from ranklab.planner.machine import (
    Machine, accelerators, machine, refuse_values, with_exponent,
)
from ranklab.planner.model import Model

# Shapes of public config.json files and papers (recalled); parameters are tested against names.
MODELS = {
    "gpt2-xl": Model(48, 1600, 25, 6400, 50257, tied=True),
    "gpt3-175b": Model(96, 12288, 96, 49152, 51200, tied=True),
    "bloom-176b": Model(70, 14336, 112, 57344, 250880, tied=True),
    "glm-130b": Model(70, 12288, 96, 32768, 150528, gated=True),
    "llama2-7b": Model(32, 4096, 32, 11008, 32000, gated=True),
    "llama2-13b": Model(40, 5120, 40, 13824, 32000, gated=True),
    "llama-1b": Model(16, 2048, 32, 8192, 128256, 8, gated=True, tied=True),
    "llama-8b": Model(32, 4096, 32, 14336, 128256, 8, gated=True),
    "llama-70b": Model(80, 8192, 64, 28672, 128256, 8, gated=True),
    "llama-405b": Model(126, 16384, 128, 53248, 128256, 8, gated=True),
    "qwen2.5-32b": Model(64, 5120, 40, 27648, 152064, 8, gated=True),
    "mixtral-8x7b": Model(32, 4096, 32, 0, 32000, 8, gated=True, experts=8, top_k=2,
                          expert_ffn=14336),
    "qwen3-30b-a3b": Model(48, 2048, 32, 0, 151936, 4, 128, True, experts=128, top_k=8,
                           expert_ffn=768),
    "qwen3-235b-a22b": Model(94, 4096, 64, 0, 151936, 4, 128, True, experts=128, top_k=8,
                             expert_ffn=1536),
    # every second layer sees 128 tokens: sliding_window and layer_types of openai/gpt-oss-120b
    "gpt-oss-120b": Model(36, 2880, 64, 0, 201088, 8, 64, True, experts=128, top_k=4,
                          expert_ffn=2880, window=128, windowed=18),
    "deepseek-v3": Model(61, 7168, 128, 18432, 129280, head_size=160, gated=True, experts=256,
                         top_k=8, shared=1, expert_ffn=2048, dense=3,
                         attention_numbers=187_107_328),
}
NODES = {  # name -> (accelerator, GPUs that NVLink or PCIe joins, network bytes/s of a GPU)
    "h100-dgx": ("H100-SXM-80GB", 8, 50e9), "h200-dgx": ("H200-SXM-141GB", 8, 50e9),
    "b200-dgx": ("B200-SXM-180GB", 8, 50e9), "b300-dgx": ("B300-SXM", 8, 100e9),
    "a100-dgx": ("A100-SXM-80GB", 8, 25e9), "v100-dgx": ("V100-SXM2-32GB", 8, 6.25e9),
    "a100-40gb-dgx": ("A100-SXM-40GB", 8, 25e9), "aws-p4d": ("A100-SXM-40GB", 8, 6.25e9),
    "aws-p5": ("H100-SXM-80GB", 8, 50e9), "aws-p5en": ("H200-SXM-141GB", 8, 50e9),
    "h800-dgx": ("H800-SXM-80GB", 8, 50e9),  # DeepSeek-V3's (arXiv 2412.19437, 3.2.2)
    "gcp-a3-high": ("H100-SXM-80GB", 8, 12.5e9), "gcp-a3-mega": ("H100-SXM-80GB", 8, 25e9),
    # 18 hosts of 4 GPUs, one NVLink domain
    "gb200-nvl72": ("GB200-NVL72", 72, 50e9), "gb300-nvl72": ("GB300-NVL72", 72, 100e9),
    # no NVLink, one card of 100 Gbit/s for four GPUs
    "a10-pcie": ("A10G", 4, 3.125e9), "l40s-pcie": ("L40S", 4, 3.125e9),
    "l4-pcie": ("L4", 4, 3.125e9), "rtx4090-pcie": ("RTX-4090", 4, 3.125e9),
    "rtx3090-pcie": ("RTX-3090", 4, 3.125e9),
}
# of a Machine; a node file without one of them needs an accelerator of the table. fp8=0, fp4=0 and
# peak_fp8=0 say that the GPU has none
NEEDED = ("peak_flops", "bf16", "fp8", "fp4", "peak_fp8", "memory_bytes", "memory_bandwidth",
          "node", "link", "network")


def find_node(name):
    """Return the Machine for a node's name, an accelerator's name, or a JSON file.

    A file has the fields of Machine that differ: {"accelerator": "H100-SXM-80GB", "node": 8,
    "network": 25e9, "island": 256, "far": 5e9}.
    Any case of letters will do. Raises ValueError with the known names, and those like this one.
    """
    if name.lower() in NODES:
        return dataclasses.replace(machine(*NODES[name.lower()]), name=name.lower())
    if name.endswith(".json"):
        return node_of_file(name)
    try:
        return machine(name)
    except ValueError:
        like = similar(name, [*NODES, *accelerators()])
        raise ValueError(f"{name!r} is no node: {', '.join(NODES)}, an accelerator's name, or a "
                         f".json file{'; similar: ' * bool(like)}{', '.join(like)}") from None


def similar(name, names, most=4):
    """Return the names that begin with this one, and those spelled nearly so."""
    lower = {each.lower(): each for each in names}
    starts = [each for each in lower if each.startswith(name.lower())]
    close = difflib.get_close_matches(name.lower(), lower, most, 0.7)
    return [lower[each] for each in dict.fromkeys(starts + close)][:most]


def node_of_file(name):
    """Return the Machine of a JSON file. An accelerator of the table fills what the file leaves
    out; without one the file has all of NEEDED, as `measure` writes them.
    """
    if not Path(name).exists():
        raise ValueError(f"{name} is not there; on a node this writes it: torchrun "
                         "--nproc-per-node 8 -m ranklab.projects.planner measure --write "
                         f"{name}")
    values = {"name": Path(name).stem, **read_json(name)}
    try:
        return node_of_values(values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def node_of_values(values):
    """Return the Machine of a node file's fields."""
    names = {field.name for field in dataclasses.fields(Machine)}
    if unknown := set(values) - names:
        raise ValueError(f"{', '.join(sorted(unknown))} is unknown; a node has "
                         f"{', '.join(sorted(names))}")
    for field in ("name", "accelerator"):
        if not isinstance(values.get(field, ""), str):
            raise ValueError(f"{field}={json.dumps(values[field])} must be a text")
    refuse_values(values)
    if base := accelerator_of(values):
        node = dataclasses.replace(base, **values)
    else:
        node = Machine(**values)
    if node.bf16 > node.peak_flops:
        raise ValueError(f"bf16={with_exponent(node.bf16)} FLOP/s of measured products is above "
                         f"the peak, peak_flops={with_exponent(node.peak_flops)}")
    if node.island and not node.far:
        raise ValueError(f"island={node.island} needs far, a GPU's bytes/s between islands")
    return node


def accelerator_of(values):
    """Return the Machine of the accelerator that these fields name; None if the table has none.

    Raises: ValueError if the table has none, and fields are missing
    """
    missing, name = [field for field in NEEDED if field not in values], values.get("accelerator")
    try:
        return machine(name or "")
    except ValueError as error:
        if not missing:
            return None
        rest = f"and {error}" if name else ("and names no accelerator, such as H100-SXM-80GB, "
                                            "for which the planner knows them")
        raise ValueError(f"it lacks {', '.join(missing)}, {rest}") from None


def find_model(name):
    """Return (name, Model) for a model's name, a Hugging Face config.json, or a folder with one;
    notes from reading a config follow its name.

    Raises ValueError with the known names.
    """
    if name in MODELS:
        return name, MODELS[name]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json":
        raise ValueError(f"{name!r} is no model: {', '.join(MODELS)}, or a config.json")
    config = read_json(path)
    name = config.get("_name_or_path") or config.get("model_type") or path.parent.name
    model, notes = read_config(config)
    return " ".join([name, *(f"({note})" for note in notes)]), model


def read_json(path):
    """Return the object in a JSON file. Raises ValueError if there is none."""
    try:
        values = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: "
                         f"{getattr(error, 'strerror', error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no JSON object")
    return values


def model_of_size(numbers, vocab=128256):
    """Return a Model of about this many parameters, shaped like Llama: heads of 128, h = 100 to
    128 L, an MLP of three matrices 3.5 h wide, 8 heads for keys.

    Raises ValueError for fewer than 30 million parameters, or more than 2 trillion.
    """
    if not 3e7 <= numbers <= 2e12:
        raise ValueError(f"{numbers:g} parameters are not between 3e7 and 2e12")
    vocab = vocab if numbers > 2e9 else 32000
    models = [Model(layers, 128 * heads, heads, 448 * heads, vocab, 8 if heads % 8 == 0 else heads,
                    gated=True, tied=numbers < 2e9)
              for heads in (*range(2, 16), *range(16, 257, 8))
              for layers in range(heads // 2, 2 * heads + 8)
              if layers >= 4 and (layers % 4 == 0 or heads < 16)]
    # sizes within 3% of the target count as equally good
    return min(models, key=lambda model: abs(model.parameters / numbers - 1) // 0.03
               + abs(model.hidden / model.layers - 114) / 114)
