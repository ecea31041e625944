"""Compare the two formulas, the library's or a learner's, with published runs and with counts."""

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
    every = jobs(all_runs())
    for part, wanted in (("fitted on these", True), ("kept back", False)):
        rows = [job for job in every if is_for_fit(job.row_id) == wanted]
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


def scores():
    """Return the errors by source, as `score` prints them."""
    return score_table({name: each for name, each in score(all_runs()).items() if each.used})


def counted():
    """Return as text the bytes that the first of 64 ranks holds and sends in lab 12's trainer."""
    model = Model(16, 512, 8, 2048, 4096, tied=True)
    plan = Plan(dp=4, tp=4, pp=4, sequence=512, micro_batches=8, zero=1, sequence_parallel=True,
                tool="ours")
    return "\n".join(dry_run(model, plan))
