"""Compare the two formulas, the library's or a learner's, with published runs and with counts."""

from ranklab.planner.domains import published_domains
from ranklab.planner.fp8 import matmul_share, published_pairs
from ranklab.planner.jobs import is_for_fit, jobs
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.model import Model
from ranklab.planner.plan import Plan
from ranklab.planner.rough import median_error, rough_jobs, rough_ratios
from ranklab.planner.score import memory_ratio, quantile, score, step_ratio
from ranklab.planner.step import step_time
from ranklab.projects.planner.files import dry_run
from ranklab.projects.planner.report import all_runs, score_table

TRAINED = (  # (model, node, the layout in which it was trained)
    ("llama-405b", "h100-dgx", Plan(  # arXiv 2407.21783, table 4
        dp=64, tp=8, pp=16, sequence=8192, micro_batches=32, virtual=8, zero=2,
        schedule="interleaved", sequence_parallel=True, tool="torchtitan")),
    ("glm-130b", "a100-40gb-dgx", Plan(  # arXiv 2210.02414, section 2.3
        dp=24, tp=4, pp=8, micro_batches=176, zero=1, recompute="full", hides=(),
        attention="unfused", gradient_bytes=2, tool="deepspeed")),
    ("bloom-176b", "a100-dgx", Plan(  # arXiv 2211.05100, section 3.4
        dp=8, tp=4, pp=12, micro_batch=2, micro_batches=128, zero=1, hides=(), recompute="full",
        attention="unfused", tool="deepspeed")),
)


def predicted():
    """Return [(source, published seconds of a step, predicted ones, model and GPUs)]."""
    return [(job.source, job.seconds, step_time(job.model, job.plan, job.machine).total,
             f"{job.name} on {job.plan.gpus:,} GPUs")
            for job in jobs(all_runs()) if job.seconds]


def errors(memory=memory_per_gpu, step=step_time):
    """Return the errors of these two functions on published runs, as text."""
    lines = [f"{'':28}{'rows':>6}{'median error':>14}{'90% are below':>15}"]
    all_jobs = jobs(all_runs())
    for part, in_fit in (("fitted on these", True), ("kept back", False)):
        rows = [job for job in all_jobs if is_for_fit(job.row_id) == in_fit]
        times = [abs(step_ratio(job, step=step) - 1) for job in rows if job.seconds]
        held = [abs(memory_ratio(job, memory=memory) - 1) for job in rows if job.memory]
        lines += [f"{f'{kind}, {part}':28}{len(ratios):6}{quantile(ratios, 0.5):14.1%}"
                  f"{quantile(ratios, 0.9):15.1%}"
                  for kind, ratios in (("step time", times), ("memory", held))]
    return "\n".join(lines)


def rough_errors(seconds_of):
    """Return as text a rough rule's error on each source's runs, next to step_time's error.

    seconds_of  rough_step_seconds, or a learner's
    """
    lines = [f"{'':20}{'runs':>6}{'median error':>14}{'too much or little':>20}{'step_time':>11}"]
    sources = sorted({job.source for job in rough_jobs()})
    for source in (*sources, "all"):
        rows = [job for job in rough_jobs() if source in (job.source, "all")]
        ratios = rough_ratios(seconds_of, rows)
        library = median_error([step_ratio(job) for job in rows])
        lines.append(f"{source:20}{len(rows):6}{median_error(ratios):14.0%}"
                     f"{quantile(ratios, 0.5) - 1:+20.0%}{library:11.0%}")
    return "\n".join(lines)


def fp8_gains(speedup):
    """Return as text the gain of FP8 in each published pair of runs of one layout: Amdahl's law,
    the planner's step_time, and what was published.

    speedup  fp8_speedup, or a learner's
    """
    lines = [f"{'':42}{'share':>7}{'Amdahl':>8}{'planner':>9}{'published':>11}"]
    pairs, count = published_pairs(), 0
    for bf16, fp8 in pairs:
        seconds = [step_time(bf16.model, job.plan, bf16.machine).total for job in (bf16, fp8)]
        name = (f"{bf16.name}, {bf16.plan.sequence:,} tokens, {bf16.plan.gpus} "
                f"{bf16.machine.family}")
        share = matmul_share(bf16.model, bf16.plan, bf16.machine)
        amdahl, published = speedup(bf16.model, bf16.plan, bf16.machine), bf16.seconds / fp8.seconds
        count += amdahl > published
        lines.append(f"{name:42}{share:7.0%}{amdahl:8.2f}{seconds[0] / seconds[1]:9.2f}"
                     f"{published:11.2f}" + f"  {fp8.plan.precision}" * (
                         fp8.plan.precision != "fp8"))
    return "\n".join([*lines, f"Amdahl's law promises more than was published in {count} of "
                      f"{len(pairs)} pairs."])


def racks():
    """Return as text what Megatron-Bridge publishes for DeepSeek-V3 on 256 GPUs, in nodes of 8 and
    in racks of 72: layouts, and tokens per second of a GPU.
    """
    lines = [f"{'release':9}{'nodes of 8 (B200)':>26}{'tokens/s':>10}{'racks of 72 (GB200)':>28}"
             f"{'tokens/s':>10}{'more':>7}"]
    for release, *sizes in published_domains():
        speeds = [job.plan.batch * job.plan.sequence / job.seconds / job.plan.gpus for job in sizes]
        peaks = [job.machine.peak_flops for job in sizes]
        words = [f"ep {job.plan.ep}, {job.plan.pp} stages" for job in sizes]
        lines.append(f"{release:9}{words[0]:>26}{speeds[0]:10,.0f}{words[1]:>28}{speeds[1]:10,.0f}"
                     f"{speeds[1] / speeds[0] - 1:7.0%}")
    return "\n".join([*lines, f"The peak of a GB200 is {peaks[1] / peaks[0] - 1:.0%} higher."])


def scores():
    """Return the errors by source, as `score` prints them."""
    return score_table({name: each for name, each in score(all_runs()).items() if each.used})


def counted():
    """Return as text the bytes that the first of 64 ranks holds and sends in lab 12's trainer."""
    model = Model(16, 512, 8, 2048, 4096, tied=True)
    plan = Plan(dp=4, tp=4, pp=4, sequence=512, micro_batches=8, zero=1, sequence_parallel=True,
                tool="ours")
    return "\n".join(dry_run(model, plan))
