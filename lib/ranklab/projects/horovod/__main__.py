"""BERT classifies texts, fine-tuned with Horovod's API on ranks laid out as four nodes.

    python -m ranklab.projects.horovod --ranks 4 --nodes 4
    torchrun --nproc-per-node 8 -m ranklab.projects.horovod --weights DIR --data reviews.csv
    horovodrun -np 4 python -m ranklab.projects.horovod --real    # horovod.torch, not ours
    python -m ranklab.projects.horovod --tune                     # fusion thresholds
    python -m ranklab.projects.horovod --read trace.json          # of any Horovod job

The texts are functions of Python's own library, the classes parts of its manual; a BERT so small
begins from scratch. `--weights` is a folder with a BERT's weights and tokenizer, `--data` a .csv or
.jsonl file with a label and a text in each row. Nothing is downloaded.
"""

import sys
from importlib.util import find_spec

from ranklab.engine import is_main_process
from ranklab.options import comma_list, existing_file, new_file
from ranklab.projects.command import Command, refusals, say
from ranklab.projects.horovod import bert, report, run, timeline, tuning
from ranklab.projects.horovod.bert import COMPRESSIONS, FineTuning
from ranklab.projects.horovod.training import run_real

NO_HOROVOD = ("the real Horovod is not here: `make horovod` builds it in some minutes; without "
              "--real this runs on ranklab.horovod")
# What suits weights that have learnt a language already.
WITH_WEIGHTS = FineTuning(n_ctx=128, lr=5e-5, batch=32, steps=500)


def parse(argv=None):
    """(the options, the FineTuning)."""
    command = Command(__package__, __doc__)
    command.add_ranks(nodes=True)
    command.add_argument("--data", type=existing_file,
                         help="a .csv or .jsonl file with label and text")
    command.add_argument("--compression", dest="compressions", default="none,fp16",
                         type=comma_list(choices=COMPRESSIONS),
                         help="of gradients on the wire: which, with commas")
    # Not "--timeline": horovodrun looks at all of the line, and has two that begin so.
    command.add_argument("--trace", type=new_file, help="write Horovod's timeline to this file")
    command.add_argument("--read", metavar="FILE", type=existing_file,
                         help="read a timeline, and nothing else")
    command.add_argument("--tune", action="store_true", help="some steps at each fusion threshold")
    command.add_argument("--real", action="store_true", help="under horovodrun: horovod.torch")
    command.add_fields(FineTuning, "weights", "steps", "batch", "lr", "n_ctx", "seed", "precision")
    options = command.parse(argv)
    return options, command.config(WITH_WEIGHTS if options.weights else FineTuning(), options)


@refusals(__package__)
def main(argv=None):
    options, config = parse(argv)
    if options.read:
        print(timeline.table(timeline.read_timeline(options.read)))
    elif missing := what_is_missing(options):
        say(missing)
    else:
        train(options, config)
    return 0


def what_is_missing(options):
    """The sentence that says what to install, or None."""
    if not bert.is_here():
        return bert.NO_TRANSFORMERS
    return NO_HOROVOD if options.real and not find_spec("horovod") else None


def train(options, config):
    """The command's training and tuning; prints what was found."""
    how = {"compressions": options.compressions, "timeline": options.trace,
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
            phases = timeline.read_timeline(options.trace)
            print(f"\n{timeline.table(phases)}")


if __name__ == "__main__":
    sys.exit(main())
