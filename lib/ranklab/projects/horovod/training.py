"""A BERT is fine-tuned with Horovod's API, ours or the real one, on all ranks; and the report."""

import dataclasses
import importlib
import os
from importlib.util import find_spec

import torch

from ranklab.engine import is_main_process, launch
from ranklab.horovod.compression import compress_fp16
from ranklab.projects.authors import authors
from ranklab.projects.command import ranks_to_come
from ranklab.projects.horovod import bert, tuning
from ranklab.projects.horovod.config import COMPRESSIONS, Config
from ranklab.projects.horovod.timeline import read_timeline
from ranklab.projects.horovod.timeline import table as timeline_table

OURS, REAL = "ranklab.horovod", "horovod.torch"
NO_HOROVOD = ("the real Horovod is not here: `make horovod` builds it in some minutes; without "
              "--real this runs on ranklab.horovod")


def run(config=Config(), ranks=None, nodes=1, data=None, timeline=None, compressions=COMPRESSIONS,
        thresholds=(), tune=None, calls=6, compress=compress_fp16, api=OURS):
    """The model is trained once for each compression; returns what rank 0 has found, or None where
    transformers is not installed.

    timeline    the file for the timeline of the first of these trainings
    thresholds  of the fusion buffer, in bytes: some steps with each of them
    tune        tune_fusion, or a learner's own: it chooses a threshold, by `calls` measurements
    compress    for the compression fp16: a learner's own will do
    api         REAL on one rank of horovodrun: the same work; None on all but rank 0
    """
    if not bert.is_here():
        return None
    config.check(1 if api == REAL else ranks_to_come(ranks))  # refuses now, not on the ranks
    tokens = bert.read_tokens(config, data)
    config.check(1, len(tokens.train))
    what = tokens, config, compressions, timeline, thresholds, tune, calls
    if api == REAL:
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # else start_timeline() is refused
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))  # as launch does
        found = work(REAL, *what)
    else:
        found = launch(work, OURS, *what, compress, ranks=ranks, nodes=nodes, preload=bert.PRELOAD,
                       timeout=24 * 3600 if config.weights else 300)[0]
    known = {"config": config, "name": tokens.name, "classes": tokens.classes,
             "texts": (len(tokens.train), len(tokens.held_out)),
             "best_constant": tokens.best_constant, "bag_of_words": tokens.bag_of_words}
    return None if found["rank"] else known | found


def work(api, tokens, config, compressions, timeline, thresholds, tune, calls, compress=None):
    """On one rank, with the module called `api`: all that the project does."""
    hvd = importlib.import_module(api)
    hvd.init()
    found = {"rank": hvd.rank(), "ranks": hvd.size(), "nodes": hvd.cross_size(), "runs": {},
             "tuned": []}
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
        found["chosen"] = tuning.tune_together(hvd, tune, try_one, calls)
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
            f"{seen['ms_per_step']:9.1f}" if seen else ""))
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


def everything(options, config):
    """The command's training, tuning and timeline, as text; "" on all but rank 0."""
    if not bert.is_here():
        return bert.NO_TRANSFORMERS
    if options.real and not find_spec("horovod"):
        return NO_HOROVOD
    found = run(config, options.ranks, options.nodes, options.data, options.trace,
                options.compressions, tuning.THRESHOLDS if options.tune else (),
                api=REAL if options.real else OURS)
    if found is None or not is_main_process():
        return ""
    texts = [report(found)]
    if options.tune:
        texts.append(tuning.table(found["tuned"]))
    if options.trace:
        texts.append(timeline_table(read_timeline(options.trace)))
    return "\n\n".join(texts)
