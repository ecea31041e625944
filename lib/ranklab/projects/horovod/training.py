"""Fine-tune a BERT with Horovod's API on all ranks; and report."""

from dataclasses import dataclass, replace

import ranklab.horovod as hvd
from ranklab.basics.options import comma_list, existing_file, existing_folder, new_file, option
from ranklab.engine import is_main_process, launch
from ranklab.horovod.compression import Compressor
from ranklab.horovod.trace import read_timeline
from ranklab.meter.text import lined_up
from ranklab.projects.authors import authors
from ranklab.projects.command import ranks_to_come, time_limit
from ranklab.projects.horovod.bert import BertTrainer, read_tokens
from ranklab.projects.horovod.timeline import table
from ranklab.projects.hugging_face import INSTALL, is_here
from ranklab.projects.runner import OnNodes
from ranklab.projects.training import must_divide
from ranklab.trainer import LoopConfig

PRELOAD = ("transformers.trainer", "transformers.models.bert.modeling_bert")  # for launch
COMPRESSIONS = ("none", "fp16")


@dataclass(frozen=True)
class Config(LoopConfig):
    """The model and training settings, validated when created. The defaults suit two CPU cores."""

    weights: str | None = None
    n_ctx: int = option(32, "tokens of a text", least=1)
    vocab_size: int = option(4000, least=1)  # this and the next three: of the BERT from scratch
    width: int = option(64, least=1)
    n_layer: int = option(2, least=1)
    n_head: int = option(2, least=1)
    steps: int = option(60, "of the optimizer", least=1)
    batch: int = option(96, "texts in a step, over all ranks", least=1)
    micro_batch: int = 2**20  # a step is one piece: Horovod averages after one backward
    lr: float = option(8e-3, "the highest learning rate", least=0)
    warmup: int = option(6, "steps to the highest learning rate", least=0)
    final_lr: float = 0.0
    weight_decay: float = 0.01
    clip: float = 0.0
    log_every: int = 10
    seed: int = option(0, "of weights and order", least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.width % self.n_head:
            raise ValueError(f"n_head={self.n_head} must divide width={self.width}")

    def check(self, ranks, texts):
        """Raise ValueError if the ranks' shares are unequal: a mean of means would be wrong."""
        must_divide(ranks, batch=self.batch)
        if texts < self.batch:
            raise ValueError(f"batch={self.batch} is more than the {texts} texts to train on")


# What suits weights that have learned a language already.
WITH_WEIGHTS = Config(n_ctx=128, lr=5e-5, batch=32, steps=500, warmup=50)


@dataclass(frozen=True)
class Options(OnNodes):
    """The command's options besides Config's."""

    without = ("weights", "vocab_size", "width", "n_layer", "n_head", "micro_batch", "checkpoint",
               "checkpoint_every")

    weights: str | None = option(None, "a folder with a BERT's weights and tokenizer",
                                 kind=existing_folder)
    data: str | None = option(None, "a .csv or .jsonl file with label and text", kind=existing_file)
    compressions: tuple = option(COMPRESSIONS, "of gradients on the wire: which, with commas",
                                 kind=comma_list(choices=COMPRESSIONS), flag="compression")
    trace: str | None = option(None, "write Horovod's timeline to this file", kind=new_file)
    read: str | None = option(None, "read a timeline, and nothing else", kind=existing_file)

    def settings(self):
        return replace(WITH_WEIGHTS, weights=self.weights) if self.weights else Config()


def run(config=Config(), ranks=None, nodes=1, data=None, trace=None, compressions=COMPRESSIONS,
        compress=hvd.compress_fp16, timeout=300):
    """Train the model once for each compression; return a dict, or None without transformers.

    trace     the file for the timeline of the first training run
    compress  the function for the compression fp16: the library's, or a learner's
    """
    if not is_here():
        return None
    tokens = read_tokens(config, data)
    config.check(ranks_to_come(ranks), len(tokens.train))  # refuses now, not on the ranks
    results = launch(work, tokens, config, compressions, trace, compress, ranks=ranks, nodes=nodes,
                     preload=PRELOAD, timeout=timeout)[0]
    used = {"compress_fp16": compress} if "fp16" in compressions else {}
    return {"config": config, "tokens": tokens, "authors": authors(used), **results}


def work(tokens, config, compressions, trace, compress):
    """Train on one rank; return {"runs": {compression: its results}, "ranks", "nodes"}."""
    hvd.init()
    compressors = {"none": hvd.Compression.none, "fp16": Compressor(compress)}
    runs = {}
    for name in compressions:
        trainer = BertTrainer(hvd, tokens, config, compressors[name])
        runs[name] = fine_tune(trainer, trace if name == compressions[0] else None)
    results = {"ranks": hvd.size(), "nodes": hvd.cross_size(), "runs": runs}
    hvd.shutdown()
    return results


def fine_tune(trainer, trace=None):
    """Train the model; return its losses, accuracy and bytes. Rank 0 writes the timeline."""
    if trace:
        hvd.start_timeline(trace)
    with hvd.counted() as counts:  # one step: all are equal, and counting takes time
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


def report(results):
    """Format the results of `run` as text; or say what to install."""
    if results is None:
        return INSTALL.format("horovod")
    tokens, config, runs = results["tokens"], results["config"], results["runs"]
    sizes, nodes = next(iter(runs.values()))["sizes"], results["nodes"]
    rows = [("always the commonest class", f"{tokens.best_constant:.1%}", "", "", ""),
            ("bag of words (naive Bayes)", f"{tokens.bag_of_words:.1%}", "", "", "")]
    rows += [(f"BERT, compression {name}", f"{run['accuracy']:.1%}",
              *(f"{run[kind] / 1e6:.2f}" for kind in ("predicted_bytes", "sent_bytes")),
              f"{run['losses'][-1]:.3f}") for name, run in runs.items()]
    return "\n".join(filter(None, [
        f"texts     {tokens.name}: {len(tokens.train):,} to train on, {len(tokens.held_out):,} "
        f"held out, {len(tokens.classes)} classes",
        f"model     {'weights' if config.weights else 'BERT from scratch'}, {sum(sizes) // 4:,} "
        f"parameters in {len(sizes)} tensors, {config.steps} steps of {config.batch} texts",
        f"ranks     {results['ranks']}, on {nodes} node{'s' * (nodes > 1)}",
        results["authors"],
        "\n" + lined_up(("", "held-out accuracy", "predicted", "counted", "loss"), rows)]))


def command(options, config):
    """Return the text that the command line asks for; "" on all ranks but rank 0."""
    if options.read:
        return table(read_timeline(options.read))
    results = run(config, options.ranks, options.nodes, options.data, options.trace,
                  options.compressions, timeout=time_limit())
    text = report(results)
    if results and options.trace and is_main_process():  # rank 0 alone has the file
        text += f"\n\n{table(read_timeline(options.trace))}"
    return text
