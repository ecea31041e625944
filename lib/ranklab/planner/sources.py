"""How a run was done, from the words of its source: the network, the tool, hidden messages, ...

The rules name no run. They read the columns source, notes, sharding, precision, arch_notes.
"""

import re

NETWORKS = (  # words of a source -> bytes/s a GPU; hardware_nodes.csv has the same clusters
    (r"4x100 ?Gb|4 OmniPath", 6.25e9), (r"8x200 ?Gb", 25e9), (r"1600 ?Gb/s", 25e9),
    (r"2 Tb/s", 31.25e9), (r"800 ?Gb/s per node", 12.5e9), (r"400 ?Gb/s per node", 6.25e9))
UNFUSED = r"no FlashAttention|2104\.04473|2205\.05198|2201\.11990|bigscience|Megatron-LM@5281919420"
MODERN = "NeMo|Megatron-Bridge|images/model_table"  # Megatron Core with everything that it overlaps
SCHEDULES = {"1f1b-i": "interleaved", "interleaved1f1b": "interleaved", "flexible interleaved":
             "interleaved", "interleaved-1f1b": "interleaved", "zb-1p": "zb-h1", "zb-2p": "zb-h2"}


def memory_kind(run):
    """Return which count of memory is published; torch's allocated bytes if the source does not
    say.
    """
    if "nvidia-smi" in run.mem_kind:
        return "nvidia-smi"
    return "reserved" if "reserved" in run.mem_kind else "allocated"


def network_of(run):
    """Return the bytes/s of a GPU's share of the node's cards; 0: as in the vendor's own node."""
    return next((speed for words, speed in NETWORKS
                 if re.search(words, f"{run.notes} {run.hardware}")), 0.0)


def fuses_experts(run):
    """Return whether tokens are sorted by expert in the kernels that send them, while other work
    runs: Megatron-Bridge from release 26.06 (moe_permute_fusion_into_hybridep of its recipes).
    """
    release = re.search(r"mbridge-(\d+)\.(\d+)", run.row_id)
    return bool(release) and (int(release[1]), int(release[2])) >= (26, 6)


def graphs(run):
    """Return whether kernels are launched from CUDA graphs: Megatron-Bridge's recipes of models
    with experts do so where the host is Grace, and others mostly not (perf_recipes, v0.2.2 to
    v0.4.2).
    """
    return run.hardware.startswith("GB")


def virtual_of(run, pp, schedule, assumed):
    """Return the stages of a rank: as published, or one per layer if the tool interleaves."""
    if run.vpp or pp == 1:
        return run.vpp or 1
    is_printed = re.search(r"interleaved|1f1b", schedule) and run.pp_schedule
    if "interleaved" in schedule or not is_printed and re.search(MODERN, run.source):
        virtual = 2 if "torchtitan" in run.source else -(-run.layers // pp)
        assumed.append(f"vpp={virtual}")
        return virtual
    return 1


def tool_of(run):
    """Return the tool of a Plan that is nearest to this run's."""
    text = f"{run.sharding} {run.source} {run.pp_schedule}"
    other_fsdp = re.search("Megatron-FSDP|InternEvo", text)
    if re.search("FSDP|SHARD_GRAD_OP|torchtitan", text) and not other_fsdp:
        return "torchtitan"
    if re.search(r"DeepSpeed|ZeRO|bigscience|InternEvo", text) or run.zero_stage in (2, 3) and (
            run.pp or 1) == 1 and "Megatron-FSDP" not in text:
        return "deepspeed"
    return "megatron"


def recompute_of(run, assumed):
    """Return (kind, share of the blocks); FSDP's selective share follows from the published HFU and
    MFU.
    """
    recompute = run.recompute
    if recompute.startswith("selective"):
        if run.mfu_pct and run.hfu_pct and "fms-fsdp" in run.source:
            return "full", min(1.0, max(0.0, 3 * (run.hfu_pct / run.mfu_pct - 1)))
        return ("operators" if "op" in recompute else "selective"), 1.0
    if recompute not in ("none", "full"):
        assumed.append("recompute=none")
    return ("full" if recompute == "full" else "none"), 1.0


def attention_of(run):
    """Return the kind of attention kernels of this run."""
    if "no-flash" in run.arch_notes:
        return "unfused"
    if re.search(MODERN, run.source):
        return "tuned"
    if "2401.10241" in run.source:
        return "unfused"  # its memory shows it: 34 and 5as/h bytes for each number of x
    if "attention=flash" in run.arch_notes or "flash attention" in run.arch_notes:
        return "flash"
    return "unfused" if re.search(UNFUSED, f"{run.source} {run.notes}") else "flash"


def precision_of(run):
    """Return the precision of this run's matrix products."""
    precision = run.precision.lower()
    for words, name in (("nvfp4", "nvfp4"), ("rowwise", "fp8-rowwise"), ("fp8-cs", "fp8"),
                        ("mx", "mxfp8"), ("fp8", "fp8")):
        if words in precision:
            return name
    return "bf16"


def gradient_bytes(run):
    """Return the bytes of a gradient in its reduction: 2 if the source says so, or if Megatron
    reduces fp16.
    """
    if "PURE" in f"{run.precision} {run.sharding}" or run.precision.startswith("fp16"):
        return 2
    return 2 if re.search("NeMo|Megatron-Bridge|InternEvo|fms-fsdp", run.source) else 4


def hides(run):
    """Return the axes whose messages this tool overlapped with computing at that time.

    Megatron-Bridge hides messages of experts by interleaved stages, except on NVL72
    (moe_a2a_overlap of its recipes, v0.2.2 to v0.4.2).
    """
    if "2205.05198" in run.source:  # backward takes 1.55 times as long as forward (its table 4)
        return ("tensor backward",)
    if re.search(UNFUSED, f"{run.source} {run.notes}"):
        return ()  # of 2020 to 2022: all messages wait
    megascale = "parallel transformer block" in run.arch_notes  # it hides both (section 3.2)
    if megascale or "async" in run.precision.lower() or re.search(MODERN, run.source):
        experts = fuses_experts(run) or (run.vpp or 1) > 1 and not run.hardware.startswith("GB")
        return ("data", "context", "tensor", "pipeline", *["expert"] * experts)
    return ("data", "context", *["tensor backward"] * (tool_of(run) == "megatron"))


def fused(run, tool):
    """Return whether the layer's small operators are fused: the tool's own kernels, or
    torch.compile.
    """
    eager = tool == "torchtitan" and re.search("torchtitan|foundry", run.source)
    return not eager or "compile" in f"{run.precision} {run.notes}"


def shard_of(run):
    """Return the number of ranks that share sharded states, if the source gives it; 0: all."""
    ranks = re.search(r"over (\d+) ranks|FSDP (\d+)", run.sharding)
    if ranks:
        return int(ranks[1] or ranks[2])
    return run.gpus_per_node or 8 if "within node" in run.sharding else 0
