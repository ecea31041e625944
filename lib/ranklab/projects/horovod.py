"""BERT classifies texts, fine-tuned with Horovod's API on ranks laid out as four nodes.

    python -m ranklab.projects.horovod --ranks 4 --nodes 4
    torchrun --nproc-per-node 8 -m ranklab.projects.horovod --weights DIR --data reviews.csv
    horovodrun -np 4 python -m ranklab.projects.horovod --real    # horovod.torch, not ours
    python -m ranklab.projects.horovod --tune                     # fusion thresholds
    python -m ranklab.projects.horovod --trap                     # gradients that grow with ranks
    python -m ranklab.projects.horovod --read trace.json          # of any Horovod job

The texts are functions of Python's own library, the classes parts of its manual; a BERT so small
begins from scratch. `--weights` is a folder with a BERT's weights and tokenizer, `--data` a .csv or
.jsonl file with a label and a text in each row. Nothing is downloaded.
"""

import argparse
import dataclasses
import importlib
import os
import sys
from importlib.util import find_spec

import torch

from ranklab.engine import is_main_process, launch
from ranklab.projects import horovod_bert as bert
from ranklab.projects import horovod_timeline, horovod_trap
from ranklab.projects import horovod_tuning as tuning
from ranklab.projects.horovod_bert import FineTuning
from ranklab.trainer import PRECISIONS

OURS, REAL = "ranklab.horovod", "horovod.torch"
NO_HOROVOD = ("the real Horovod is not here: `make horovod` builds it in some minutes; without "
              "--real this runs on ranklab.horovod")
# What suits weights that have learnt a language already.
WITH_WEIGHTS = {"n_ctx": 128, "lr": 5e-5, "batch": 32, "steps": 500}


def run(config=FineTuning(), ranks=None, nodes=1, data=None, timeline=None,
        compressions=("none", "fp16"), thresholds=()):  # fmt: skip
    """The model is trained once for each compression; returns what was found, or None where
    transformers is not installed.

    timeline    the file for the timeline of the first of these trainings
    thresholds  of the fusion buffer, in bytes: some steps with each of them
    """
    if not bert.is_here():
        return None
    tokens = bert.read_tokens(config, data)
    seen = launch(work, OURS, tokens, config, compressions, timeline, thresholds, ranks=ranks,
                  nodes=nodes, timeout=24 * 3600 if config.weights else 300)
    return summary(tokens, config, seen[0])


def summary(tokens, config, found):
    """What rank 0 found, and what was known before."""
    return {"config": config, "name": tokens.name, "classes": tokens.classes,
            "texts": (len(tokens.train), len(tokens.held_out)),
            "best_constant": tokens.best_constant, "bag_of_words": tokens.bag_of_words, **found}


def work(api, tokens, config, compressions, timeline, thresholds):
    """On one rank, with the module called `api`: all that the project does."""
    hvd = importlib.import_module(api)
    hvd.init()
    found = {"rank": hvd.rank(), "ranks": hvd.size(), "nodes": hvd.cross_size(), "runs": {},
             "tuned": []}  # fmt: skip
    for compression in compressions:
        mine = dataclasses.replace(config, compression=compression)
        _, found["runs"][compression] = bert.fine_tune(hvd, tokens, mine, timeline)
        timeline = None
    for threshold in thresholds:
        hvd.shutdown()
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(threshold)  # read by init(), by both of them
        hvd.init()
        found["tuned"].append(tuning.try_threshold(hvd, tokens, config, threshold))
    hvd.shutdown()
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
        "guard     the same texts give a gradient of {:.4f} on one rank, {:.4f} on all".format(
            *first["norms"]),
        f"\n{'':32}{'held-out accuracy':>18}{'sent/rank/step':>16}{'loss':>8}{'ms/step':>9}",
    ]
    for name, value in accuracies(found).items():
        seen = found["runs"].get(name.removeprefix("BERT, compression "))
        lines.append(f"{name:32}{value:18.1%}" + (
            f"{tuning.megabytes(seen['sent_bytes']):>16}{seen['losses'][-1]:8.3f}"
            f"{seen['ms_per_step']:9.1f}" if seen else ""))  # fmt: skip
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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="without torchrun or srun: how many")
    parser.add_argument("--nodes", type=int, default=1, help="lay the ranks out as nodes")
    parser.add_argument("--weights", help="a folder with a BERT's weights and tokenizer")
    parser.add_argument("--data", help="a .csv or .jsonl file with label and text")
    parser.add_argument("--compression", default="none,fp16", help="which of them, with commas")
    # Not "--timeline": horovodrun looks at all of the line, and has two that begin so.
    parser.add_argument("--trace", help="write Horovod's timeline to this file")
    parser.add_argument("--read", metavar="FILE", help="read a timeline, and nothing else")
    parser.add_argument("--tune", action="store_true", help="some steps at each fusion threshold")
    parser.add_argument("--trap", action="store_true", help="transformers' Trainer, and its trap")
    parser.add_argument("--real", action="store_true", help="under horovodrun: horovod.torch")
    for name, kind in (("steps", int), ("batch", int), ("lr", float), ("n-ctx", int),
                       ("seed", int)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--precision", choices=PRECISIONS)
    options = parser.parse_args(argv)
    if options.read:
        print(horovod_timeline.table(horovod_timeline.read_timeline(options.read)))
        return 0
    missing = what_is_missing(options.real, options.trap)
    if missing:
        if is_main_process():
            print(missing)
        return 0
    if options.trap:
        rows = horovod_trap.run(options.ranks, options.nodes)
        if is_main_process():
            print(horovod_trap.table(rows))
        return 0
    return train(options)


def what_is_missing(real, trap):
    """The sentence that says what to install, or None."""
    if not bert.is_here():
        return bert.NO_TRANSFORMERS
    if trap and not horovod_trap.is_here():
        return horovod_trap.NO_TRAINER
    return NO_HOROVOD if real and not find_spec("horovod") else None


def train(options):
    """The command's training and tuning; prints what was found."""
    chosen = WITH_WEIGHTS if options.weights else {}
    given = {name: getattr(options, name)
             for name in ("weights", "steps", "batch", "lr", "n_ctx", "seed", "precision")}
    config = FineTuning(**{**chosen, **{k: v for k, v in given.items() if v is not None}})
    how = {"compressions": options.compression.split(","), "timeline": options.trace,
           "thresholds": tuning.THRESHOLDS if options.tune else (), "data": options.data}
    if options.real:
        found = run_real(config, **how)
    else:
        found = run(config, options.ranks, options.nodes, **how)
    if found and is_main_process():
        print(report(found))
        if options.tune:
            print(f"\n{tuning.table(found['tuned'])}")
        if options.trace:
            phases = horovod_timeline.read_timeline(options.trace)
            print(f"\n{horovod_timeline.table(phases)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
