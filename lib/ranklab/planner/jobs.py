"""A published run as the planner sees it: a Model, a Machine and a Plan; or why it can't be used.

sources.py interprets the words of a source. If a cell is empty and there is a usual value, we
assume that value and note it in Job.assumed.
"""

import hashlib
import re
from dataclasses import dataclass, replace

from ranklab.planner import sources
from ranklab.planner.catalog import MODELS
from ranklab.planner.machine import is_gpu, machine
from ranklab.planner.model import Model
from ranklab.planner.plan import Plan

EXPERTS = {name: MODELS[model] for name, model in (  # the tables have no widths of experts
    ("DeepSeekV3", "deepseek-v3"), ("Qwen3_30B_a3B", "qwen3-30b-a3b"),
    ("Qwen3_235B_a22B", "qwen3-235b-a22b"))}
# without its windows, as when the constants were fitted: they make a predicted step 2 to 7% shorter
# at the 4,096 and 8,192 tokens of these 28 runs, nearer to the published one in 8, further in 20
EXPERTS["GPT OSS 120B"] = replace(MODELS["gpt-oss-120b"], window=0, windowed=0)
VOCAB = 51200  # GPT-2's, padded: where none is published
NEMOTRON_VOCAB = 256000  # arXiv 2402.16819 (recalled)
PACKED = 256  # tokens of a question and its answer in packed SQuAD, about
FIT_SHARE = 0.75  # of the rows: constants are fitted on these


class Unused(ValueError):
    """The reason why a row is not scored."""


@dataclass(frozen=True)
class Job:
    """A run that can be scored.

    seconds      per step, as published; None if not published
    memory       bytes of a GPU, likewise; memory_kind: nvidia-smi's, torch's reserved or allocated
    assumed      unpublished fields, whose usual value was assumed
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
    """Return whether constants may be fitted on this row: a quarter is for validation, by a hash.
    """
    return int(hashlib.sha256(row_id.encode()).hexdigest(), 16) % 100 < 100 * FIT_SHARE


def jobs(runs):
    """Return the Jobs of the runs that can be used."""
    return [job for _, job in with_jobs(runs)]


def with_jobs(runs):
    """Return [(run, its Job)] of the runs that can be used."""
    usable = []
    for run in runs:
        try:
            usable.append((run, job_of(run)))
        except Unused:
            continue
    return usable


def job_of(run):
    """Return the Job of a Run. Raises Unused, which says why there is none."""
    refuse(run)
    assumed = []
    try:
        model = model_of(run, assumed)
        plan = plan_of(run, assumed)
        gpu = machine(run.hardware, 16 if "DGX-2" in run.hardware else 0,
                      sources.network_of(run))
    except ValueError as error:
        raise error if isinstance(error, Unused) else Unused(str(error)) from None
    seconds = seconds_of(run, model, plan)
    memory = run.mem_per_gpu and run.mem_per_gpu * (2**30 if run.mem_unit == "GiB" else 1e9)
    if not seconds and not memory:
        out_of_memory = "mem_per_gpu" in run.unreadable
        raise Unused("out of memory: no time" if out_of_memory
                     else "no step time, tokens/s or TFLOP/s")
    return Job(run.row_id, run.file, run.model, model, plan, gpu, seconds, memory,
               sources.memory_kind(run), tuple(assumed))


def refuse(run):
    """Raise Unused for a run that can't be a Job."""
    if run.quality == "inconsistent":
        raise Unused("the source contradicts itself")
    if run.hardware.startswith("TPU") or not is_gpu(run.hardware):
        raise Unused(f"hardware: {run.hardware or 'none'}, no GPU")
    if run.quality.strip() == "C":
        raise Unused("a headline without a usable layout (quality C)")
    if "hybrid" in run.arch_notes and "dims not collected" in run.arch_notes:
        raise Unused("no plain transformer, and its sizes are not published")
    has_shape = run.model in EXPERTS
    for name in ("gpus", "seq_len", *(() if has_shape else ("layers", "hidden", "heads"))):
        if not getattr(run, name):
            raise Unused(f"missing column: {name}")
    if "MoE" in run.arch_notes and not has_shape:
        raise Unused("missing column: width of the experts")


# --- the model ------------------------------------------------------------------------------------

def model_of(run, assumed):
    """Return the Model of a Run; add unpublished fields to `assumed`."""
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
    """Return the Plan of a Run; add unpublished fields to `assumed`."""
    tp, pp, cp = run.tp or 1, run.pp or 1, run.cp or 1
    dp = run.dp or run.gpus // (tp * pp * cp)
    if dp * tp * pp * cp != run.gpus:
        raise Unused(f"dp x tp x pp x cp = {dp * tp * pp * cp}, but {run.gpus} GPUs")
    micro, pieces = batches(run, dp, assumed)
    schedule = re.sub(r" *\(.*", "", run.pp_schedule.lower()) or "1f1b"
    virtual = sources.virtual_of(run, pp, schedule, assumed)
    tool = sources.tool_of(run)
    kind, share = sources.recompute_of(run, assumed)
    zero = run.zero_stage if run.zero_stage is not None else 1 if tool == "megatron" else 0
    parallel = {"yes": True, "no": False}.get(run.sequence_parallel, tool == "megatron")
    return Plan(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=run.ep or 1, sequence=run.seq_len, micro_batch=micro,
        micro_batches=pieces, virtual=virtual,
        schedule=sources.SCHEDULES.get(schedule, schedule) if pp > 1 else "1f1b", zero=zero,
        shard=sources.shard_of(run), sequence_parallel=parallel and tp > 1, recompute=kind,
        recomputed=share, attention=sources.attention_of(run), tool=tool,
        precision=sources.precision_of(run), gradient_bytes=sources.gradient_bytes(run),
        hides=sources.hides(run), fused=sources.fused(run, tool),
        fused_experts=sources.fuses_experts(run), graphs=sources.graphs(run),
        attended=PACKED if "packed" in run.notes else 0, frozen=run.task == "LoRA")


def batches(run, dp, assumed):
    """Return (sequences per micro-batch, micro-batches per step)."""
    micro, pieces, batch = run.micro_batch, run.grad_accum, run.global_batch_seqs
    if not micro:
        sequences = batch / dp if batch else 1
        micro = sequences / pieces if pieces else min(4, sequences) if run.pp == 1 else 1
        micro = max(1, int(micro))
        assumed.append(f"micro_batch={micro}")
    if batch:  # if a published grad_accum differs, the batch is right
        pieces = batch / dp / micro
    if not pieces:
        raise Unused("missing column: global_batch_seqs and grad_accum")
    if pieces < 1:
        raise Unused(f"a batch of {batch:g} is less than {micro} on each of {dp} ranks")
    return micro, max(1, round(pieces))


# --- what was measured ----------------------------------------------------------------------------

def seconds_of(run, model, plan):
    """Return the seconds of a step, from the first of these that is published: step time, tokens/s,
    samples/s, TFLOP/s by the convention of the source; None if none is.
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
