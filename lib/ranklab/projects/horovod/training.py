"""A BERT is fine-tuned with Horovod's API, ours or the real one, on all ranks; and the report."""

import dataclasses
import importlib
import os

import torch

from ranklab.engine import launch
from ranklab.horovod.compression import compress_fp16
from ranklab.projects.authors import authors
from ranklab.projects.command import ranks_to_come
from ranklab.projects.horovod import bert
from ranklab.projects.horovod import tuning
from ranklab.projects.horovod.bert import FineTuning

OURS, REAL = "ranklab.horovod", "horovod.torch"


def run(config=FineTuning(), ranks=None, nodes=1, data=None, timeline=None,
        compressions=("none", "fp16"), thresholds=(), tune=None, calls=6,
        compress=compress_fp16):  # fmt: skip
    """The model is trained once for each compression; returns what was found, or None where
    transformers is not installed.

    timeline    the file for the timeline of the first of these trainings
    thresholds  of the fusion buffer, in bytes: some steps with each of them
    tune        tune_fusion, or a learner's own: it chooses a threshold, by `calls` measurements
    compress    for the compression fp16: a learner's own will do
    """
    if not bert.is_here():
        return None
    config.check(ranks_to_come(ranks))  # refuses now, not on the ranks
    tokens = bert.read_tokens(config, data)
    config.check(ranks_to_come(ranks), len(tokens.train))
    seen = launch(work, OURS, tokens, config, compressions, timeline, thresholds, tune, calls,
                  compress, ranks=ranks, nodes=nodes, preload=bert.PRELOAD,
                  timeout=24 * 3600 if config.weights else 300)
    return summary(tokens, config, seen[0])


def summary(tokens, config, found):
    """What rank 0 found, and what was known before."""
    return {"config": config, "name": tokens.name, "classes": tokens.classes,
            "texts": (len(tokens.train), len(tokens.held_out)),
            "best_constant": tokens.best_constant, "bag_of_words": tokens.bag_of_words, **found}


def work(api, tokens, config, compressions, timeline, thresholds, tune=None, calls=6,
         compress=None):  # fmt: skip
    """On one rank, with the module called `api`: all that the project does."""
    hvd = importlib.import_module(api)
    hvd.init()
    found = {"rank": hvd.rank(), "ranks": hvd.size(), "nodes": hvd.cross_size(), "runs": {},
             "tuned": []}  # fmt: skip
    for compression in compressions:
        mine = dataclasses.replace(config, compression=compression)
        _, found["runs"][compression] = bert.fine_tune(hvd, tokens, mine, timeline,
                                                             compress=compress)
        timeline = None

    def try_one(threshold):
        hvd.shutdown()
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(threshold)  # read by init(), by both of them
        hvd.init()
        found["tuned"].append(tuning.try_threshold(hvd, tokens, config, threshold))
        return found["tuned"][-1]

    for threshold in thresholds:
        try_one(threshold)
    if tune:
        found["chosen"] = tuning.tune_together(hvd, tune, try_one, *tuning.RANGE, calls)
    hvd.shutdown()
    used = {"compress_fp16": "fp16" in compressions and compress, "tune_fusion": tune}
    found["authors"] = authors({name: function for name, function in used.items() if function})
    return found


def report(found):
    """What `run` found, as text; or what to install."""
    if found is None:
        return bert.NO_TRANSFORMERS
    first = next(iter(found["runs"].values()))
    lines = [
        f"texts     {found['name']}: {found['texts'][0]:,} to train on, {found['texts'][1]:,} held "
        f"out, {len(found['classes'])} classes",
        f"model     {'weights' if found['config'].weights else 'BERT from scratch'}, "
        f"{sum(first['sizes']) // 4:,} parameters in {len(first['sizes'])} tensors, "
        f"{found['config'].steps} steps of {found['config'].batch} texts",
        f"ranks     {found['ranks']}, on {found['nodes']} node{'s' * (found['nodes'] > 1)}",
        *filter(None, [found["authors"]]),
        f"\n{'':32}{'held-out accuracy':>18}{'sent/rank/step':>16}{'loss':>8}{'ms/step':>9}",
    ]
    for name, value in accuracies(found).items():
        seen = found["runs"].get(name.removeprefix("BERT, compression "))
        lines.append(f"{name:32}{value:18.1%}" + (
            f"{tuning.megabytes(seen['sent_bytes']):>16}{seen['losses'][-1]:8.3f}"
            f"{seen['ms_per_step']:9.1f}" if seen else ""))  # fmt: skip
    if "chosen" in found:
        lines.append(f"A fusion threshold of {found['chosen']:,} bytes is chosen.")
    if max(seen["accuracy"] for seen in found["runs"].values()) < found["bag_of_words"]:
        lines.append("The bag of words wins: here words alone say much, and few steps teach a "
                     "BERT little about their order.")
    return "\n".join(lines)


def accuracies(found):
    """{name: accuracy on the held-out texts}, from no learning at all to BERT."""
    runs = {f"BERT, compression {name}": seen["accuracy"] for name, seen in found["runs"].items()}
    return {"always the commonest class": found["best_constant"],
            "bag of words (naive Bayes)": found["bag_of_words"], **runs}


def run_real(config, data=None, timeline=None, compressions=("none", "fp16"), thresholds=()):
    """On one rank of horovodrun: the same work with horovod.torch; None on all but rank 0."""
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # else start_timeline() is refused
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))  # as launch and torchrun do
    tokens = bert.read_tokens(config, data)
    found = work(REAL, tokens, config, compressions, timeline, thresholds)
    return summary(tokens, config, found) if found["rank"] == 0 else None
