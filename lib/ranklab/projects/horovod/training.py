"""A BERT is fine-tuned with Horovod's API on all ranks; and the report."""

import ranklab.horovod as hvd
from ranklab.engine import is_main_process, launch
from ranklab.horovod.compression import Compressor
from ranklab.horovod.trace import read_timeline
from ranklab.projects.authors import authors
from ranklab.projects.command import ranks_to_come, time_limit
from ranklab.projects.horovod.bert import BertTrainer, read_tokens
from ranklab.projects.horovod.config import COMPRESSIONS, Config
from ranklab.projects.horovod.timeline import table
from ranklab.projects.hugging_face import is_here

NO_TRANSFORMERS = ("transformers is not here. After pip install -c constraints.txt -e '.[hf]' this "
                   "runs: python -m ranklab.projects.horovod")
PRELOAD = ("transformers.trainer", "transformers.models.bert.modeling_bert")  # for launch


def run(config=Config(), ranks=None, nodes=1, data=None, trace=None, compressions=COMPRESSIONS,
        compress=hvd.compress_fp16, timeout=300):
    """The model is trained once for each compression; None where transformers is not installed.

    trace     the file for the timeline of the first of these trainings
    compress  for the compression fp16: a learner's own will do
    """
    if not is_here():
        return None
    tokens = read_tokens(config, data)
    config.check(ranks_to_come(ranks), len(tokens.train))  # refuses now, not on the ranks
    found = launch(work, tokens, config, compressions, trace, compress, ranks=ranks, nodes=nodes,
                   preload=PRELOAD, timeout=timeout)[0]
    used = {"compress_fp16": compress} if "fp16" in compressions else {}
    return {"config": config, "tokens": tokens, "authors": authors(used), **found}


def work(tokens, config, compressions, trace, compress):
    """On one rank: {"runs": {compression: what was seen}, "ranks", "nodes"}"""
    hvd.init()
    compressors = {"none": hvd.Compression.none, "fp16": Compressor(compress)}
    found = {"ranks": hvd.size(), "nodes": hvd.cross_size(), "runs": {}}
    for name in compressions:
        trainer = BertTrainer(hvd, tokens, config, compressors[name])
        found["runs"][name] = fine_tune(trainer, trace if name == compressions[0] else None)
    hvd.shutdown()
    return found


def fine_tune(trainer, trace=None):
    """The model is trained; returns what was seen. Rank 0 writes the timeline to `trace`."""
    if trace:
        hvd.start_timeline(trace)
    with hvd.counted() as counts:  # one step: all are alike, and counting takes time
        trainer.fit(until=1)
    history = trainer.fit()
    if trace:
        hvd.stop_timeline()
    gradients = list(reversed(list(trainer.model.parameters())))  # as backward goes
    on_wire = [trainer.parallel.compression.compress(p.detach())[0].nbytes for p in gradients]
    return {"losses": history.loss, "sizes": [p.nbytes for p in gradients],
            "accuracy": history.held_out.get(trainer.config.steps) or trainer.evaluate(),
            "predicted_bytes": 2 * (hvd.size() - 1) / hvd.size() * sum(on_wire),
            "sent_bytes": sum(op.sent_bytes for op in counts.data.ops if op.name == "all_reduce")}


def report(found):
    """What `run` found, as text; or what to install."""
    if found is None:
        return NO_TRANSFORMERS
    tokens, config, runs = found["tokens"], found["config"], found["runs"]
    sizes = next(iter(runs.values()))["sizes"]
    lines = [
        f"texts     {tokens.name}: {len(tokens.train):,} to train on, {len(tokens.held_out):,} "
        f"held out, {len(tokens.classes)} classes",
        f"model     {'weights' if config.weights else 'BERT from scratch'}, {sum(sizes) // 4:,} "
        f"parameters in {len(sizes)} tensors, {config.steps} steps of {config.batch} texts",
        f"ranks     {found['ranks']}, on {found['nodes']} node{'s' * (found['nodes'] > 1)}",
        *filter(None, [found["authors"]]),
        f"\n{'':28}{'held-out accuracy':>18}{'predicted':>11}{'counted':>9}{'loss':>8}",
        f"{'always the commonest class':28}{tokens.best_constant:18.1%}",
        f"{'bag of words (naive Bayes)':28}{tokens.bag_of_words:18.1%}",
    ]
    lines += [f"{f'BERT, compression {name}':28}{seen['accuracy']:18.1%}"
              f"{seen['predicted_bytes'] / 1e6:11.2f}{seen['sent_bytes'] / 1e6:9.2f}"
              f"{seen['losses'][-1]:8.3f}" for name, seen in runs.items()]
    return "\n".join(lines)


def command(options, config):
    """What the command line asks for, as text; "" on all but rank 0."""
    if options.read:
        return table(read_timeline(options.read))
    found = run(config, options.ranks, options.nodes, options.data, options.trace,
                options.compressions, timeout=time_limit())
    shown = found and options.trace and is_main_process()  # rank 0 alone has the file
    return report(found) + (f"\n\n{table(read_timeline(options.trace))}" if shown else "")
