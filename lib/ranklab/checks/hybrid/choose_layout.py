"""The check of choose_layout: legal, fits, and nearly as fast as the best; it prints the score."""

import functools
import itertools
import re
from dataclasses import replace

import torch

from ranklab.baseline import transformer_flops
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.hardware import A100
from ranklab.hybrid import Cluster, Job, Layout, layout_memory, layout_seconds
from ranklab.hybrid.choose import legal
from ranklab.hybrid.costs import EFFICIENCY
from ranklab.models.gpt import GPTConfig

SLOWER, CALLS = 1.01, 100_000  # than the best; of layout_seconds() in one search


def _gpt(layers, width):
    return GPTConfig(50304, n_ctx=2048, n_layer=layers, n_embd=width, n_head=width // 128)


CASES = {  # each job's own micro-batch is not the best one
    "7B on one node": (Job(_gpt(32, 4096), 64, 8), Cluster(8)),
    "13B on 8 nodes, a slow network": (
        Job(_gpt(40, 5120), 256, 8), Cluster(64, links=((8, 300e9), (64, 2e9)))),
    "22B, three levels of links": (
        Job(_gpt(48, 6144), 128, 8), Cluster(64, links=((4, 300e9), (16, 50e9), (64, 5e9)))),
    "3B on two nodes without fast links": (
        Job(_gpt(32, 2560), 256, 8),
        Cluster(16, replace(A100, memory_bytes=24 * 10**9), ((8, 25e9), (16, 2e9)))),
    "7B on GPUs of 24 GB": (
        Job(_gpt(32, 4096), 64, 8),
        Cluster(16, replace(A100, memory_bytes=24 * 10**9), ((4, 25e9), (16, 10e9)))),
    "3B, 120 sequences": (  # for some layouts not a multiple of the stages
        Job(_gpt(24, 3072), 120, 8), Cluster(16, links=((8, 25e9), (16, 5e9)))),
    "6 wide blocks, two GPUs in a node": (  # here more tensor ranks would be faster
        Job(_gpt(6, 8192), 96, 8),
        Cluster(8, replace(A100, memory_bytes=32 * 10**9), ((2, 300e9), (8, 100e9)))),
    # 25 heads: no tensor ranks. The weights travel for each micro-batch: larger ones are faster,
    # the largest that fits, or one between.
    "3 wide blocks, 25 heads": (
        Job(GPTConfig(50304, n_ctx=1024, n_layer=3, n_embd=6400, n_head=25), 64, 8),
        Cluster(16, replace(A100, memory_bytes=24 * 10**9), ((16, 100e9),))),
    "the same on GPUs of 16 GB": (
        Job(GPTConfig(50304, n_ctx=1024, n_layer=3, n_embd=6400, n_head=25), 192, 8),
        Cluster(16, replace(A100, memory_bytes=16 * 10**9), ((16, 25e9),))),
}
NONE_FITS = Job(_gpt(64, 8192), 64), Cluster(8)
ROOM = ("layout_memory(replace(job, micro_batch=...), layout).total <= cluster.memory_budget. "
        "zero, "
        "recompute and smaller micro-batches save memory.")
ROUNDS = "With virtual > 1 the micro-batches, batch // (dp * micro_batch), are a multiple of pp."
BLOCKS = "Each of the pp * virtual stages has a block: n_layer is at least as many."
FASTER = ("Compare layout_seconds(replace(job, micro_batch=...), layout, cluster).total of all "
          "that fit, with every micro-batch and every option: each gains in one part and loses in "
          "another.")


def check_choose_layout(choose_layout):
    for name, (job, cluster) in CASES.items():
        with hinted({"ValueError: .*must be between 1 and the.*": BLOCKS,
                     "ValueError: .*a multiple of ranks.*": ROUNDS}):
            chosen = _chosen(choose_layout, name, job, cluster)
        if not isinstance(chosen, tuple) or [*map(type, chosen)] != [Layout, int]:
            raise Mistake(f"{name}: {chosen!r} is returned", "Return (Layout, micro_batch).")
        yield f"{name}: {_score(name, *chosen, job, cluster)}"
    try:
        raise Mistake(f"{choose_layout(*NONE_FITS)} where none fits", "That is a ValueError.")
    except ValueError as error:
        if not _says(str(error), least := _least(*NONE_FITS)):
            raise Mistake(f"where none fits: {error}", "Say how much memory is needed: the "
                          f"smallest layout takes {least / 1e9:.1f} GB.") from None
    yield "where no layout fits a ValueError says what would be needed"


def _chosen(choose_layout, name, job, cluster):
    calls = itertools.count()

    class Counted(Cluster):
        def bandwidth(self, mesh, axis):  # layout_seconds() asks once for each axis
            if next(calls) >= 3 * CALLS:
                raise Mistake(f"{name}: more than {CALLS:,} calls of layout_seconds()", "There are "
                              "some thousand legal choices: ask once for each of them.")
            return super().bandwidth(mesh, axis)

    try:
        return choose_layout(job, Counted(**vars(cluster)))
    except ValueError as error:
        raise Mistake(f"{job.config.n_layer} blocks: a ValueError, {error}") from None


def _score(name, layout, size, job, cluster):
    """What is printed of a choice."""
    where = f"{name}: {layout}, micro-batch {size},"
    if wrong := _illegal(layout, size, job, cluster):
        raise Mistake(f"{where} is not legal: {wrong}", "Skip what is not legal before you rank.")
    needed = layout_memory(replace(job, micro_batch=size), layout).total
    if needed > cluster.memory_budget:
        raise Mistake(f"{where} needs {needed / 1e9:.1f} GB, and a GPU has room for "
                      f"{cluster.memory_budget / 1e9:.1f}", ROOM)
    seconds, best = layout_seconds(replace(job, micro_batch=size), layout, cluster), _best(name)
    if seconds.total > SLOWER * best:
        parts = ", ".join(f"{part} {n:.2f}" for part, n in seconds._asdict().items())
        raise Mistake(f"{where} takes {seconds.total:.2f} s a step, and {best:.2f} s are possible; "
                      f"its parts: {parts}", FASTER)
    flops = transformer_flops(job.config, job.batch, job.config.n_ctx) / EFFICIENCY
    alone = flops / cluster.gpus / cluster.gpu.peak_flops(torch.bfloat16)
    return (f"{layout}, micro-batch {size}: {seconds.total:.2f} s a step; the library's "
            f"{best:.2f} s, compute alone {alone:.2f} s")


def _least(job, cluster):
    """Bytes of the smallest layout."""
    return min(layout_memory(replace(job, micro_batch=size), layout).total
               for layout, size in legal(job, cluster))


def _says(text, nbytes):
    """Whether one of the numbers in it is that of the bytes, or their GB, to 10%: `legal` leaves
    out zero=3 on one data rank, which holds a little less.
    """
    numbers = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", re.sub(r"[,_]", "", text))]
    return any(abs(n - right) <= 0.1 * right for n in numbers for right in (nbytes, nbytes / 1e9))


@functools.cache
def _best(name):
    """Seconds of the fastest that is legal and fits."""
    job, cluster = CASES[name]
    found = [(replace(job, micro_batch=size), layout) for layout, size in legal(job, cluster)]
    found.sort(key=lambda each: layout_seconds(*each, cluster).total)
    return next(layout_seconds(*each, cluster).total for each in found
                if layout_memory(*each).total <= cluster.memory_budget)


def _illegal(layout, size, job, cluster):
    """The rule that is broken; None where none is."""
    dp, tp, pp, virtual = layout.dp, layout.tp, layout.pp, layout.virtual
    heads, blocks, node = job.config.n_head, job.config.n_layer, cluster.links[0][0]
    rules = {
        f"{layout.ranks} ranks on {cluster.gpus} GPUs": layout.ranks != cluster.gpus,
        f"tp={tp} must divide {heads} heads and the {node} ranks of a node": heads % tp + node % tp,
        f"dp * micro_batch must divide batch={job.batch}": size < 1 or job.batch % (dp * size),
        f"{blocks} blocks are too few for all stages": pp * virtual > blocks,
        f"virtual={virtual} needs a multiple of pp={pp} micro-batches": virtual > 1 and (
            pp == 1 or job.batch // (dp * max(size, 1)) % pp),
        f"virtual={virtual} is not 1, 2 or 4": virtual not in (1, 2, 4),
        f"tp={tp} must divide n_ctx": layout.sequence_parallel and job.config.n_ctx % tp,
        f"its schedule is {layout.schedule}": layout.schedule != "1f1b"}
    return next((rule for rule, broken in rules.items() if broken), None)
