"""The check of choose_layout: legal, fits, and nearly as fast as the best; it prints the score."""

import time
from dataclasses import replace

import torch

from ranklab.baseline import transformer_flops
from ranklab.checks.exercise import Mistake
from ranklab.hardware import A100
from ranklab.hybrid import Cluster, Job, Layout, layout_memory, layout_seconds
from ranklab.hybrid.choose import legal
from ranklab.hybrid.costs import EFFICIENCY
from ranklab.models.gpt import GPTConfig

SLOWER, LIMIT = 1.05, 3  # how much slower than the best may be, and seconds for a search


def _gpt(layers, width):
    return GPTConfig(50304, n_ctx=2048, n_layer=layers, n_embd=width, n_head=width // 128)


SMALL = replace(A100, memory_bytes=24 * 10**9)
CASES = {
    "7B on one node": (Job(_gpt(32, 4096), 64), Cluster(8)),
    "13B on 8 nodes, a slow network": (Job(_gpt(40, 5120), 256),
                                       Cluster(64, links=((8, 300e9), (64, 2e9)))),
    "22B, three levels of links": (Job(_gpt(48, 6144), 128),
                                   Cluster(64, links=((4, 300e9), (16, 50e9), (64, 5e9)))),
    "7B on GPUs of 24 GB": (Job(_gpt(32, 4096), 64),
                            Cluster(16, SMALL, ((4, 25e9), (16, 10e9)))),
}
NONE_FITS = Job(_gpt(64, 8192), 64), Cluster(8)
FASTER = {
    "computing": "recompute costs a third more: only where nothing else fits; even stages help.",
    "bubble": "Fewer stages, smaller micro-batches or virtual stages make the bubble smaller.",
    "tensor": "Fewer tensor ranks, on the innermost links, talk less.",
    "pipeline": "Virtual stages send more; what crosses the slow links should be little.",
    "data": "Fewer data ranks: gradients of the whole stage travel along this axis.",
}


def check_choose_layout(choose_layout):
    for name, (job, cluster) in CASES.items():
        started = time.process_time()
        chosen = choose_layout(job, cluster)
        spent = time.process_time() - started
        if not (isinstance(chosen, tuple) and [*map(type, chosen)] == [Layout, int]):
            raise Mistake(f"{name}: {chosen!r} is returned", "Return (Layout, micro_batch).")
        yield f"{name}: {_score(f'{name}: {chosen[0]}, micro-batch {chosen[1]}', *chosen, job, cluster)}"
        if spent > LIMIT:
            raise Mistake(f"{name}: the search took {spent:.1f} s, more than {LIMIT}", "Most of "
                          "all layouts are illegal, or slower than one that fits: skip them early.")
    try:
        chosen = choose_layout(*NONE_FITS)
    except ValueError as error:
        if not any(letter.isdigit() for letter in str(error)):
            raise Mistake(f"where none fits: {error}", "Say how much memory is needed.") from None
    else:
        raise Mistake(f"{chosen} where none fits", "A ValueError says it before the job starts.")
    yield "where no layout fits a ValueError says what would be needed"


def _score(where, layout, size, job, cluster):
    """What is printed of a choice."""
    if wrong := _illegal(layout, size, job, cluster):
        raise Mistake(f"{where} is not legal: {wrong}", "Skip what is not legal before you rank.")
    trial = replace(job, micro_batch=size)
    needed = layout_memory(trial, layout).total
    if needed > cluster.room:
        raise Mistake(f"{where} needs {needed / 1e9:.1f} GB, and a GPU has room for "
                      f"{cluster.room / 1e9:.1f}", "layout_memory(replace(job, micro_batch=...), "
                      "layout).total <= cluster.room. zero=1, recompute and smaller micro-batches "
                      "save memory.")
    seconds = layout_seconds(trial, layout, cluster)
    best = _least_seconds(job, cluster)
    if seconds.total > SLOWER * best:
        extra = max(seconds._fields[1:], key=seconds._asdict().get)
        raise Mistake(f"{where}: a step takes {seconds.total:.2f} s, and {best:.2f} s are possible; "
                      f"computing is {seconds.computing:.2f} s, {extra} {getattr(seconds, extra):.2f}"
                      , f"{FASTER[extra]} {FASTER['computing']}")
    alone = transformer_flops(job.config, job.batch, job.config.n_ctx) / cluster.gpus / (
        EFFICIENCY * cluster.gpu.peak_flops(torch.bfloat16))
    return (f"{layout}, micro-batch {size}: {seconds.total:.2f} s a step; the library's "
            f"{best:.2f} s, compute alone {alone:.2f} s")


def _least_seconds(job, cluster):
    """Of all that are legal and fit."""
    found = [(replace(job, micro_batch=size), layout) for layout, size in legal(job, cluster)]
    found.sort(key=lambda each: layout_seconds(*each, cluster).total)
    return next(layout_seconds(*each, cluster).total for each in found
                if layout_memory(*each).total <= cluster.room)


def _illegal(layout, size, job, cluster):
    """The rule that is broken; None where none is."""
    dp, tp, pp, virtual = layout.dp, layout.tp, layout.pp, layout.virtual
    config, node = job.config, cluster.links[0][0]
    rules = {
        f"{layout.ranks} ranks on {cluster.gpus} GPUs": layout.ranks != cluster.gpus,
        f"tp={tp} must divide {config.n_head} heads": config.n_head % tp,
        f"tp={tp} must divide the {node} ranks of a node": node % tp,
        f"dp * micro_batch must divide batch={job.batch}": size < 1 or job.batch % (dp * size),
        f"{config.n_layer} blocks are too few for all stages": pp * virtual > config.n_layer,
        f"virtual={virtual} needs a multiple of pp={pp} micro-batches": virtual > 1 and (
            pp == 1 or job.batch // (dp * max(size, 1)) % pp),
        "its schedule is not 1F1B": layout.schedule != "1f1b",
        "its zero is not 0 or 1": layout.zero > 1}
    return next((rule for rule, broken in rules.items() if broken), None)
