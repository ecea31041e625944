"""Reads how a run was done from its source's words: its network, its tool, what that hides, ...

The rules name no run. They read the columns source, notes, sharding, precision, arch_notes.
"""

import re

NETWORKS = (  # words of a source -> bytes/s a GPU; hardware_nodes.csv has the same clusters
    (r"4x100 ?Gb|4 OmniPath", 6.25e9), (r"8x200 ?Gb", 25e9), (r"1600 ?Gb/s", 25e9),
    (r"2 Tb/s", 31.25e9), (r"800 ?Gb/s per node", 12.5e9), (r"400 ?Gb/s per node", 6.25e9))
UNFUSED = r"no FlashAttention|2104\.04473|2205\.05198|2201\.11990|bigscience|Megatron-LM@5281919420"
MODERN = "NeMo|Megatron-Bridge|images/model_table"  # Megatron Core with all that it overlaps
SCHEDULES = {"1f1b-i": "interleaved", "interleaved1f1b": "interleaved", "flexible interleaved":
             "interleaved", "interleaved-1f1b": "interleaved", "zb-1p": "zb-h1", "zb-2p": "zb-h2"}


def memory_kind(run):
    """Which count of memory it is; if the source does not say, what torch has allocated."""
    if "nvidia-smi" in run.mem_kind:
        return "nvidia-smi"
    return "reserved" if "reserved" in run.mem_kind else "allocated"


def network_of(run):
    """Bytes/s of a GPU's share of its node's cards; 0: as in the vendor's own node."""
    return next((speed for words, speed in NETWORKS
                 if re.search(words, f"{run.notes} {run.hardware}")), 0.0)


def fuses_experts(run):
    """Whether tokens are sorted by expert in the kernels that send them, beside other work:
    Megatron-Bridge from release 26.06 (moe_permute_fusion_into_hybridep of its recipes).
    """
    found = re.search(r"mbridge-(\d+)\.(\d+)", run.row_id)
    return bool(found) and (int(found[1]), int(found[2])) >= (26, 6)


def graphs(run):
    """Whether kernels are launched from CUDA graphs: Megatron-Bridge's recipes of models with
    experts do so where the host is Grace, and others mostly not (perf_recipes, v0.2.2 to v0.4.2).
    """
    return run.hardware.startswith("GB")


def virtual_of(run, pp, schedule, assumed):
    """Stages of a rank: as printed; or one for each layer, if the tool interleaves."""
    if run.vpp or pp == 1:
        return run.vpp or 1
    known = re.search(r"interleaved|1f1b", schedule) and run.pp_schedule
    if "interleaved" in schedule or not known and re.search(MODERN, run.source):
        virtual = 2 if "torchtitan" in run.source else -(-run.layers // pp)
        assumed.append(f"vpp={virtual}")
        return virtual
    return 1


def tool_of(run):
    text = f"{run.sharding} {run.source} {run.pp_schedule}"
    others = re.search("Megatron-FSDP|InternEvo", text)
    if re.search("FSDP|SHARD_GRAD_OP|torchtitan", text) and not others:
        return "torchtitan"
    if re.search(r"DeepSpeed|ZeRO|bigscience|InternEvo", text) or run.zero_stage in (2, 3) and (
            run.pp or 1) == 1 and "Megatron-FSDP" not in text:
        return "deepspeed"
    return "megatron"


def recompute_of(run, assumed):
    """(kind, share of the blocks); FSDP's selective share follows from the printed HFU and MFU."""
    said = run.recompute
    if said.startswith("selective"):
        if run.mfu_pct and run.hfu_pct and "fms-fsdp" in run.source:
            return "full", min(1.0, max(0.0, 3 * (run.hfu_pct / run.mfu_pct - 1)))
        return ("operators" if "op" in said else "selective"), 1.0
    if said not in ("none", "full"):
        assumed.append("recompute=none")
    return ("full" if said == "full" else "none"), 1.0


def attention_of(run):
    if "no-flash" in run.arch_notes:
        return "unfused"
    if re.search(MODERN, run.source):
        return "tuned"
    if "2401.10241" in run.source:
        return "unfused"  # its memory says so: 34 and 5as/h bytes for each number of x
    if "attention=flash" in run.arch_notes or "flash attention" in run.arch_notes:
        return "flash"
    return "unfused" if re.search(UNFUSED, f"{run.source} {run.notes}") else "flash"


def precision_of(run):
    said = run.precision.lower()
    for words, name in (("nvfp4", "nvfp4"), ("rowwise", "fp8-rowwise"), ("fp8-cs", "fp8"),
                        ("mx", "mxfp8"), ("fp8", "fp8")):
        if words in said:
            return name
    return "bf16"


def gradient_bytes(run):
    """Of a gradient on its way: 2 if the source says so, or if Megatron reduces fp16."""
    said = f"{run.precision} {run.sharding}"
    if "PURE" in said or run.precision.startswith("fp16"):
        return 2
    return 2 if re.search("NeMo|Megatron-Bridge|InternEvo|fms-fsdp", run.source) else 4


def hides(run):
    """The axes whose messages run beside computing in this tool at that time. Megatron-Bridge hides
    experts' by interleaved stages, but on NVL72 (moe_a2a_overlap of its recipes, v0.2.2 to v0.4.2).
    """
    if "2205.05198" in run.source:  # backward takes 1.55 times as long as forward (its table 4)
        return ("tensor backward",)
    if re.search(UNFUSED, f"{run.source} {run.notes}"):
        return ()  # of 2020 to 2022: all messages wait
    found = ["data", "context", *["tensor backward"] * (tool_of(run) == "megatron")]
    megascale = "parallel transformer block" in run.arch_notes  # it hides both (section 3.2)
    if megascale or "async" in run.precision.lower() or re.search(MODERN, run.source):
        experts = fuses_experts(run) or (run.vpp or 1) > 1 and not run.hardware.startswith("GB")
        found = ["data", "context", "tensor", "pipeline", *["expert"] * experts]
    return tuple(found)


def fused(run, tool):
    """Whether the layer's small operators are fused: the tool's own kernels, or torch.compile."""
    eager = tool == "torchtitan" and re.search("torchtitan|foundry", run.source)
    return not eager or "compile" in f"{run.precision} {run.notes}"


def shard_of(run):
    """How many ranks share sharded states, if the source says so; 0: all."""
    found = re.search(r"over (\d+) ranks|FSDP (\d+)", run.sharding)
    if found:
        return int(found[1] or found[2])
    return run.gpus_per_node or 8 if "within node" in run.sharding else 0
