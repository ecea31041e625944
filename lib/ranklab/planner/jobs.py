"""A published run as the planner sees it: a Model, a Machine and a Plan; or why it can't be used.

What a source says in words (its network, its attention kernel, what its tool hides) is read here,
once, by rules that name no run. Where a cell is empty and one value is usual, that is assumed, and
said in Job.assumed.
"""

import hashlib
import re
from dataclasses import dataclass

from ranklab.planner.machine import is_gpu, machine
from ranklab.planner.model import Model
from ranklab.planner.plan import Plan

# Shapes of models with experts, of their public config.json (recalled): the tables have no widths.
EXPERTS = {
    "DeepSeekV3": Model(61, 7168, 128, 18432, 129280, head_size=160, gated=True, experts=256,
                        top_k=8, shared=1, expert_ffn=2048, dense=3, attention_numbers=187_107_328),
    "Qwen3_30B_a3B": Model(48, 2048, 32, 0, 151936, 4, 128, True, experts=128, top_k=8,
                           expert_ffn=768),
    "Qwen3_235B_a22B": Model(94, 4096, 64, 0, 151936, 4, 128, True, experts=128, top_k=8,
                             expert_ffn=1536),
    "GPT OSS 120B": Model(36, 2880, 64, 0, 201088, 8, 64, True, experts=128, top_k=4,
                          expert_ffn=2880),
}
NETWORKS = (  # words of a source -> bytes/s a GPU; hardware_nodes.csv has the same clusters
    (r"4x100 ?Gb|4 OmniPath", 6.25e9), (r"8x200 ?Gb", 25e9), (r"1600 ?Gb/s", 25e9),
    (r"2 Tb/s", 31.25e9), (r"800 ?Gb/s per node", 12.5e9), (r"400 ?Gb/s per node", 6.25e9))
UNFUSED = r"no FlashAttention|2104\.04473|2205\.05198|2201\.11990|bigscience|Megatron-LM@5281919420"
MODERN = "NeMo|Megatron-Bridge|images/model_table"  # Megatron Core with all that it overlaps
SCHEDULES = {"1f1b-i": "interleaved", "interleaved1f1b": "interleaved", "flexible interleaved":
             "interleaved", "interleaved-1f1b": "interleaved", "zb-1p": "zb-h1", "zb-2p": "zb-h2"}
VOCAB = 51200  # GPT-2's, padded: where none is printed
NEMOTRON_VOCAB = 256000  # arXiv 2402.16819 (recalled)
PACKED = 256  # tokens of a question and its answer in packed SQuAD, about
FIT_SHARE = 0.75  # of the rows: constants are fitted on these


class Unused(ValueError):
    """Why a row is not scored."""


@dataclass(frozen=True)
class Job:
    """A run that can be scored.

    seconds      of a step, as published; None: it is not
    memory       bytes of a GPU, the same; memory_kind: nvidia-smi's, torch's reserved or allocated
    assumed      what is not published, and was taken to be the usual
    """

    row_id: str
    source: str
    name: str
    model: Model
    plan: Plan
    machine: object
    seconds: float | None
    memory: float | None
    memory_kind: str = "nvidia-smi"
    assumed: tuple = ()


def is_for_fit(row_id):
    """Whether constants may be fitted on this row: a quarter is for validation, by a hash."""
    return int(hashlib.sha256(row_id.encode()).hexdigest(), 16) % 100 < 100 * FIT_SHARE


def job_of(run):
    """The Job of a Run.

    error  Unused that says why
    """
    refuse(run)
    assumed = []
    model = model_of(run, assumed)
    plan = plan_of(run, assumed)
    network = network_of(run)
    try:
        found = machine(run.hardware, network=network, node=16 if "DGX-2" in run.hardware else 0)
    except ValueError as error:
        raise Unused(f"hardware: {error}") from None
    seconds = seconds_of(run, model, plan)
    memory = run.mem_per_gpu and run.mem_per_gpu * (2**30 if run.mem_unit == "GiB" else 1e9)
    if not seconds and not memory:
        out = "mem_per_gpu" in run.unreadable
        raise Unused("out of memory: no time" if out else "no step time, tokens/s or TFLOP/s")
    return Job(run.row_id, run.file, run.model, model, plan, found, seconds, memory,
               memory_kind(run), tuple(assumed))


def memory_kind(run):
    """Whose count of memory it is; where that is not said, what torch has allocated."""
    if "nvidia-smi" in run.mem_kind:
        return "nvidia-smi"
    return "reserved" if "reserved" in run.mem_kind else "allocated"


def network_of(run):
    """Bytes/s of a GPU's share of its node's cards; 0: those of the vendor's own node."""
    if "2104.04473" in run.source and run.zero_stage == 3:
        return 25e9 / 8  # DeepSpeed's gathers of 2021: no rings over all cards, one of the eight
    return next((speed for words, speed in NETWORKS
                 if re.search(words, f"{run.notes} {run.hardware}")), 0.0)


def refuse(run):
    """Raises Unused for what can be no Job."""
    if run.quality == "inconsistent":
        raise Unused("the source contradicts itself")
    if run.hardware.startswith("TPU") or not is_gpu(run.hardware):
        raise Unused(f"hardware: {run.hardware or 'none'}, no GPU")
    if run.quality.strip() == "C":
        raise Unused("a headline without a usable layout (quality C)")
    if "hybrid" in run.arch_notes and "dims not collected" in run.arch_notes:
        raise Unused("no plain transformer, and its sizes are not published")
    known = run.model in EXPERTS
    for name in ("gpus", "seq_len", *(() if known else ("layers", "hidden", "heads"))):
        if not getattr(run, name):
            raise Unused(f"missing column: {name}")
    if "MoE" in run.arch_notes and not known:
        raise Unused("missing column: width of the experts")


# --- the model ------------------------------------------------------------------------------------

def model_of(run, assumed):
    if run.model in EXPERTS:
        return EXPERTS[run.model]
    vocab = run.vocab or (NEMOTRON_VOCAB if "nemotron" in run.model else VOCAB)
    if not run.vocab:
        assumed.append(f"vocab={vocab}")
    if not run.ffn:
        assumed.append("ffn=4h")
    gated = bool(re.search("3-matrix|gated", run.arch_notes)) and "2-matrix" not in run.arch_notes
    tied = not gated and "squared-relu" not in run.arch_notes
    return Model(run.layers, run.hidden, run.heads, run.ffn or 4 * run.hidden, vocab,
                 run.kv_heads or 0, gated=gated, tied=tied, parallel="parallel" in run.arch_notes)


# --- the plan -------------------------------------------------------------------------------------

def plan_of(run, assumed):
    tp, pp, cp = run.tp or 1, run.pp or 1, run.cp or 1
    dp = run.dp or run.gpus // (tp * pp * cp)
    if dp * tp * pp * cp != run.gpus:
        raise Unused(f"dp x tp x pp x cp = {dp * tp * pp * cp}, but {run.gpus} GPUs")
    micro, pieces = batches(run, dp, assumed)
    schedule = re.sub(r" *\(.*", "", run.pp_schedule.lower()) or "1f1b"
    virtual = virtual_of(run, pp, schedule, assumed)
    tool = tool_of(run)
    kind, share = recompute_of(run, assumed)
    zero = run.zero_stage if run.zero_stage is not None else 1 if tool == "megatron" else 0
    parallel = {"yes": True, "no": False}.get(run.sequence_parallel, tool == "megatron")
    return Plan(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=run.ep or 1, sequence=run.seq_len, micro_batch=micro,
        micro_batches=pieces, virtual=virtual,
        schedule=SCHEDULES.get(schedule, schedule) if pp > 1 else "1f1b", zero=zero,
        shard=shard_of(run), sequence_parallel=parallel and tp > 1,
        recompute=kind, recomputed=share, attention=attention_of(run), precision=precision_of(run),
        gradient_bytes=gradient_bytes(run), hides=hides(run, tool), fused=fused(run, tool),
        attended=PACKED if "packed" in run.notes else 0, frozen=run.task == "LoRA", tool=tool,
        fused_experts=bool(re.search(r"26\.0[6-9]", run.row_id)))


def batches(run, dp, assumed):
    """(sequences of a micro-batch, micro-batches of a step)."""
    micro, pieces, batch = run.micro_batch, run.grad_accum, run.global_batch_seqs
    if not micro:
        each = batch / dp if batch else 1
        micro = round(each / pieces) if pieces else 1 if run.pp != 1 else max(1, min(4, int(each)))
        assumed.append(f"micro_batch={micro}")
    if batch:  # what a step really has: where a printed grad_accum differs, the batch is right
        pieces = batch / dp / micro
    if not pieces:
        raise Unused("missing column: global_batch_seqs and grad_accum")
    if pieces < 1:
        raise Unused(f"a batch of {batch:g} is no micro-batch of {micro} on each of {dp} data ranks")
    return micro, max(1, round(pieces))


def virtual_of(run, pp, schedule, assumed):
    """Stages of a rank: as printed, else as many as there are layers where the tool interleaves."""
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
    if re.search(r"FSDP|SHARD_GRAD_OP|torchtitan", text) and not re.search("Megatron-FSDP|InternEvo",
                                                                           text):
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
    """Of a gradient on its way: 16 bits where the source says so, or Megatron reduces fp16."""
    said = f"{run.precision} {run.sharding}"
    if "PURE" in said or run.precision.startswith("fp16"):
        return 2
    return 2 if re.search("NeMo|Megatron-Bridge|InternEvo|fms-fsdp", run.source) else 4


def hides(run, tool):
    """The axes whose messages run beside computing in this tool at that time."""
    if re.search(UNFUSED, f"{run.source} {run.notes}") and (run.zero_stage or 0) < 3:
        return ()  # Megatron-LM of 2020 to 2022: all messages wait
    found = ["data", "context"]
    if "async" in run.precision.lower() or re.search(MODERN, run.source) or (
            "parallel transformer block" in run.arch_notes):  # MegaScale overlaps both (section 3.2)
        found += ["tensor", "pipeline", *["expert"] * bool(re.search(r"26\.0[6-9]", run.row_id))]
    return tuple(found)


def fused(run, tool):
    """Whether the layer's small operators are fused: the tool's own kernels, or torch.compile."""
    return tool != "torchtitan" or "torchtitan" not in run.source and "foundry" not in run.source or (
        "compile" in f"{run.precision} {run.notes}")


def shard_of(run):
    """Ranks over which states are sharded, where the source says so; 0: all."""
    found = re.search(r"over (\d+) ranks|FSDP (\d+)", run.sharding)
    if found:
        return int(found[1] or found[2])
    return run.gpus_per_node or 8 if "within node" in run.sharding else 0


# --- what was measured ----------------------------------------------------------------------------

def seconds_of(run, model, plan):
    """Seconds of a step, of the first of these that is printed: step time, tokens/s, samples/s,
    TFLOP/s by its own convention; None.
    """
    tokens = plan.batch * plan.sequence
    if run.iter_time_s:
        return run.iter_time_s
    if run.tokens_per_s:
        return tokens / run.tokens_per_s
    if run.tokens_per_s_per_gpu:
        return tokens / (run.tokens_per_s_per_gpu * run.gpus)
    if run.samples_per_s_per_gpu:
        return plan.batch / (run.samples_per_s_per_gpu * run.gpus)
    kind = run.tflops_kind
    if "attention convention not stated" in kind:
        raise Unused("TFLOP/s whose convention for attention is not stated")
    if not run.tflops_per_gpu or not kind.startswith(("model", "hardware")):
        return None
    forwards = 2 if kind.startswith("hardware") else 1
    flops = model.flops_per_token(plan.sequence, causal="halved" in kind and "not halved"
                                  not in kind, forwards=forwards)
    return flops * tokens / (run.tflops_per_gpu * 1e12 * run.gpus)
