"""A Hugging Face config.json as a Model, measured on the model that transformers builds from it.

A config leaves out its class's defaults, and each family has its own names. So sizes are not read
but measured: building transformers' model on the meta device, where matrices have shapes and no
memory, takes 0.1 s. Where transformers is not installed, or does not know the model_type, a short
list of families is read from the config's fields, and all others are refused.
"""

import contextlib
import json
import re
import textwrap
from dataclasses import replace
from typing import NamedTuple

from ranklab.planner.model import Model

OFF = 0.02  # with this many more matrices than a Model, it is of another kind
PLACES = re.compile(r"position|wpe|token_type")
RECURRENT = re.compile(r"linear_attn|mamba|ssm|rwkv|recurrent|conv|A_log|time_mix|rg_lru")
WINDOWS = {"sliding_attention", "chunked_attention"}
EXPERTS = "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts", "topk",
         "num_experts_per_token")
LAYERS = "num_hidden_layers", "n_layer", "n_layers"
HIDDEN = "hidden_size", "n_embd", "d_model"
HEADS = "num_attention_heads", "n_head", "n_heads"
FFN = "intermediate_size", "ffn_dim", "n_inner"
KV_HEADS = "num_key_value_heads", "num_kv_heads"
SIZES = (LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, ("vocab_size",), ("head_dim",),
         ("moe_intermediate_size",), EXPERTS, TOP_K)  # each under one of these names
# a language model without a class of its own: that of another type, with the same matrices
SAME = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2"}
QUOTED = 200  # letters of a reason that transformers gives


class Family(NamedTuple):
    """The values that a config of this model_type leaves out."""

    gated: bool = True
    tied: bool = False
    kv_heads: bool = True  # is num_key_value_heads given?


FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
                     "phi3", "olmo2", "granite", "deepseek_v3", "gpt_oss"), Family()),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "cohere"), Family(tied=True)),
    **dict.fromkeys(("gpt2", "opt", "bloom"), Family(False, True, False)),
    **dict.fromkeys(("gpt_neox", "gptj"), Family(False, False, False)),
}


def read_config(config):
    """Return (Model, notes) of a config.json's fields; each note is a sentence.

    Raises: ValueError for a kind of model that a plan does not know, or for a field that is missing
    or wrong.
    """
    try:
        return measured(config)
    except ImportError:
        reason = "transformers, which measures the model itself, is not installed"
    except Unknown as error:
        reason = str(error)
    return by_fields(config, reason), [f"read by its fields: {reason}"]


def of_config(config):
    """Return the Model of a config.json's fields; see read_config."""
    return read_config(config)[0]


def refuse_sizes(config):
    """Raise a ValueError for a size that is no whole number, or is too small.

    A list, with a number for each layer, passes: some classes of transformers take it.
    """
    for part in (config, config.get("text_config")):
        part = part if isinstance(part, dict) else {}
        for names in SIZES:
            least = 0 if names in (EXPERTS, TOP_K) else 1
            for name in (name for name in names if part.get(name) is not None):
                value = part[name]
                numbers = value if isinstance(value, list) else [value]
                if not all(type(number) is int and number >= least for number in numbers):
                    raise ValueError(f"{name}={textwrap.shorten(json.dumps(value), 40)} must be a "
                                     f"whole number of at least {least}")
        heads, kv_heads = (next((part[name] for name in names if type(part.get(name)) is int), 1)
                           for names in (HEADS, KV_HEADS))
        if heads > 1 and heads % kv_heads:
            raise ValueError(f"{kv_heads} key heads must divide the {heads} heads")


# --- by transformers ------------------------------------------------------------------------------

class Unknown(Exception):
    """transformers can't build the model; the text says why."""


def measured(config):
    """Return (Model, notes) of transformers' model on the meta device.

    Raises: Unknown; ImportError; ValueError for a kind of model that a plan does not know.
    """
    refuse_sizes(config)
    model, text, notes = built(config)
    refuse_kinds(text, model)
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        if not isinstance(getattr(text, name, None), int):
            raise Unknown(f"its {name} is no number for all layers")
    layers, hidden = text.num_hidden_layers, text.hidden_size
    blocks = max((module for module in model.modules()
                  if type(module).__name__ == "ModuleList" and len(module) == layers),
                 key=lambda module: sum(p.numel() for p in module.parameters()), default=None)
    if blocks is None:
        raise Unknown(f"no list of its {layers} layers is found")
    experts = count_of(text, EXPERTS)
    sizes = [sizes_of(block, experts, hidden) for block in blocks]
    attention = sum(each.attention for each in sizes) / layers
    heads, head_size = text.num_attention_heads, head_size_of(text)
    kv_heads = attention / (2 * hidden * head_size) - heads
    is_plain = not getattr(text, "kv_lora_rank", None) and 0.9 < kv_heads < heads + 0.1 and (
        abs(kv_heads - round(kv_heads)) < 0.05)
    width, is_gated = width_of([each.mlp for each in sizes if not each.expert.numbers], hidden)
    windowed, window = windows_of(text)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    shape = Model(
        layers, hidden, heads, width, table.weight.shape[0], round(kv_heads) if is_plain else 0,
        head_size, is_gated, tied=head is not None and head.weight is table.weight,
        attention_numbers=0 if is_plain else round(attention), window=window, windowed=windowed)
    if any(each.expert.numbers for each in sizes):
        shape = with_experts(shape, sizes, experts, top_k_of(text))
    total = sum(p.numel() for name, p in model.named_parameters()
                if p.dim() > 1 and not name.endswith("bias") and not PLACES.search(name))
    if abs(shape.parameters / total - 1) > OFF:
        raise ValueError(f"{text.model_type} has {total / 1e9:.4g}B parameters, of which a plan "
                         f"knows {shape.parameters / 1e9:.4g}B: it has parts that are not those of "
                         "a decoder of equal layers")
    return shape, notes


def with_experts(shape, sizes, experts, top_k):
    """Return the Model with the experts of its layers."""
    sparse = [each for each in sizes if each.expert.numbers]
    dense = [i for i, each in enumerate(sizes) if not each.expert.numbers]
    of_one = [each.expert._replace(numbers=each.expert.numbers / experts) for each in sparse]
    width, is_gated = width_of(of_one, shape.hidden)
    shape = replace(shape, gated=is_gated, experts=experts, top_k=top_k, expert_ffn=width,
                    dense=len(dense), spread=dense != [*range(len(dense))])
    shared = sum(each.shared for each in sparse) / len(sparse) / shape.expert
    return replace(shape, shared=round(shared, 2))


def built(config):
    """Return (model on the meta device, its config, notes). No code that a config names is run."""
    import torch
    import transformers

    kind = config.get("model_type")
    if kind is None:
        raise Unknown("it names no model_type")
    exclusions = "model_type", "auto_map", "quantization_config"
    with errors_told(transformers):
        whole = transformers.AutoConfig.for_model(
            kind, **{name: value for name, value in config.items() if name not in exclusions})
        text = whole.get_text_config()
        if kind_of_text := SAME.get(text.model_type):
            text = transformers.AutoConfig.for_model(kind_of_text, **{
                **{name: value for name, value in text.to_dict().items()
                   if not name.startswith(("model_type", "rope"))},
                "tie_word_embeddings": whole.tie_word_embeddings})
    if text.is_encoder_decoder:
        raise ValueError(f"{kind} has an encoder and a decoder; a plan knows one stack of layers")
    if (type(text) in transformers.MODEL_FOR_MASKED_LM_MAPPING
            and not getattr(text, "is_decoder", False)):
        raise ValueError(f"{kind} is an encoder, in which a token attends to those after it too; a "
                         "plan knows decoders")
    with errors_told(transformers), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(text)
    left_out = [name for name in ("vision_config", "audio_config") if config.get(name)]
    notes = [f"its language model alone: {' and '.join(left_out)} "
             f"{'is' if len(left_out) == 1 else 'are'} left out"] if left_out else []
    return model, text, notes + defaults(config, text)


def defaults(config, text):
    """Return [a note] on the sizes that the config leaves out, and its class has; or []."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    present = {name for part in parts for name, value in part.items() if value is not None}
    texts = []
    for names in SIZES:
        name = next((name for name in names if type(getattr(type(text), name, None)) is int), None)
        if name and not present & {*names} and getattr(text, name) == getattr(type(text), name):
            texts.append(f"{name} {getattr(text, name)}")
    return [f"left out, and so the default of {type(text).__name__}: {', '.join(texts)}"
            ] if texts else []


@contextlib.contextmanager
def errors_told(transformers):
    """Silence transformers inside the block; raise any error of its 400 families as an Unknown."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    except Exception as error:
        raise Unknown(f"transformers {transformers.__version__} can't build it "
                      f"({reason_of(error)})") from None
    finally:
        transformers.logging.set_verbosity(level)


def reason_of(error):
    """Return the line of an error that has its reason, whole words of it."""
    text = f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[1] if lines[0].endswith(":") and lines[1:] else lines[0]
    line = line.partition(" Should contain one of ")[0]  # all 400 types
    line = re.sub(r"\[[^\]]{40,}\]", "[...]", line)
    return textwrap.shorten(line, QUOTED, placeholder=" ...")


def refuse_kinds(text, model):
    """Raise a ValueError where layers have no attention, or one that a plan does not know."""
    kinds = {*(getattr(text, "layer_types", None) or ())} - WINDOWS - {"full_attention"}
    names = {match[0] for name, _ in model.named_parameters()
             if (match := RECURRENT.search(name))}
    if kinds == {"indexed_attention"}:
        raise ValueError(f"{text.model_type} attends to selected tokens ({text.index_topk} of "
                         "them, by an indexer), whose time and memory a plan does not know")
    if kinds or names:
        raise ValueError(f"{text.model_type} has layers without attention "
                         f"({', '.join(sorted(kinds or names))}); a plan does not know their time "
                         "and memory")


class Part(NamedTuple):
    numbers: int = 0
    width: int = 0


class Sizes(NamedTuple):
    """Numbers of one layer's matrices. The router is not among them: a Model counts it."""

    attention: int
    shared: int
    expert: Part
    mlp: Part


def sizes_of(block, experts, hidden):
    numbers, width = dict.fromkeys(("attention", "shared", "router", "expert", "mlp"), 0), {}
    for name, parameter in block.named_parameters():
        shape = [*parameter.shape]
        if len(shape) < 2 or name.endswith("bias"):  # gpt-oss has one of shape (experts, width)
            continue
        kind = ("shared" if "shared" in name else "expert" if experts and "experts" in name
                else "attention" if re.search("attn|attention", name)
                else "router" if experts in shape and hidden in shape and len(shape) == 2
                else "mlp")
        numbers[kind] += parameter.numel()
        if hidden in shape:
            shape.remove(hidden)  # the other size is the width; the last matrix is the one back
            width[kind] = shape[-1] // (experts if kind == "expert" and len(shape) == 1 else 1)
            if kind == "expert" and len(shape) == 2:
                width[kind] = shape[0] if shape[1] == experts else shape[1]
    return Sizes(numbers["attention"], numbers["shared"],
                 *(Part(numbers[kind], width.get(kind, 0)) for kind in ("expert", "mlp")))


def width_of(parts, hidden):
    """Return (width, is it gated) of the MLPs: they have two matrices, or three.

    With a different number of matrices: the width of three of the same total size. Without any:
    (0, True).
    """
    if not parts:
        return 0, True
    numbers = sum(part.numbers for part in parts) / len(parts)
    matrices = numbers / (hidden * parts[0].width)
    if round(matrices) in (2, 3) and abs(matrices - round(matrices)) < 0.05:
        return parts[0].width, round(matrices) == 3
    return round(numbers / (3 * hidden)), True


def head_size_of(text):
    if getattr(text, "kv_lora_rank", None):
        return (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim) // 2
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def top_k_of(text):
    if top_k := count_of(text, TOP_K):
        return top_k
    raise ValueError(f"{text.model_type} has experts, and it is not known how many of them a token "
                     f"meets: none of {', '.join(TOP_K)} is there")


def count_of(text, names):
    """Return the first of these counts in the config or a part of it; 0 if there is none."""
    parts = [text, *(value for value in vars(text).values() if hasattr(value, "to_dict"))]
    counts = (getattr(part, name, None) for name in names for part in parts)
    return next((count for count in counts if isinstance(count, int) and count > 0), 0)


def windows_of(text):
    """Return (layers whose tokens see only a window, its tokens)."""
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    if not window or getattr(text, "use_sliding_window", True) is False:
        return 0, 0
    kinds = getattr(text, "layer_types", None)
    return sum(kind in WINDOWS for kind in kinds) if kinds else text.num_hidden_layers, window


# --- by fields ------------------------------------------------------------------------------------

def by_fields(config, reason=""):
    """Return the Model of a family that is known without transformers.

    reason: why transformers can't be used
    """
    config = config.get("text_config") or config
    kind = config.get("model_type")
    if kind and kind not in FAMILIES:
        raise ValueError(f"a config.json of {kind!r} can't be read: {reason}; by its fields a plan "
                         f"knows {', '.join(FAMILIES)}")
    family = FAMILIES.get(kind, Family(kv_heads=False))

    def first(*names, default=None):
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if value is None:
            raise ValueError(f"this config.json has no {names[0]}")
        if isinstance(value, list):
            raise ValueError(f"{next(name for name in names if name in config)} is a list of "
                             f"{len(value)} numbers; by its fields a plan knows one for all layers")
        return value

    refuse_sizes(config)
    hidden, heads, experts = first(*HIDDEN), first(*HEADS), first(*EXPERTS, default=0)
    ffn = first(*FFN, default=4 * hidden)
    head_size, attention = attention_sizes(config, hidden, heads)
    if hidden % heads and not attention and not config.get("head_dim"):
        raise ValueError(f"{heads} heads must divide hidden_size={hidden}, or head_dim be given")
    expert_ffn = first("moe_intermediate_size", *FFN) if experts else 0
    shared = first("n_shared_experts", default=0)
    if width := config.get("shared_expert_intermediate_size"):
        shared = width / expert_ffn
    dense = config.get("first_k_dense_replace") or 0
    return Model(
        first(*LAYERS), hidden, heads, ffn if dense or not experts else 0, first("vocab_size"),
        first("num_key_value_heads", default=None if family.kv_heads and not attention else heads),
        head_size if attention else first("head_dim", default=head_size),
        gated=family.gated, tied=first("tie_word_embeddings", default=family.tied),
        experts=experts, top_k=first(*TOP_K) if experts else 0,
        shared=shared, dense=dense, expert_ffn=expert_ffn, attention_numbers=attention)


def attention_sizes(config, hidden, heads):
    """Return (head size, attention parameters) of a config's layer.

    For DeepSeek's low-rank attention (MLA, arXiv 2405.04434, 2.1): (mean head size of keys and
    values, parameters). For plain attention: (head size, 0).
    """
    if not config.get("kv_lora_rank"):
        return hidden // heads, 0
    rope, values, rank = config["qk_rope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
    key, query = config["qk_nope_head_dim"] + rope, config.get("q_lora_rank")
    queries = query * (hidden + heads * key) if query else hidden * heads * key
    keys = hidden * (rank + rope) + rank * heads * (key - rope + values)
    return (key + values) // 2, queries + keys + heads * values * hidden
