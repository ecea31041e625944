"""BERT classifies texts, fine-tuned with Horovod's API on ranks laid out as four nodes.

    python -m ranklab.projects.horovod --ranks 4 --nodes 4
    torchrun --nproc-per-node 8 -m ranklab.projects.horovod --weights DIR --data reviews.csv
    python -m ranklab.projects.horovod --read trace.json    # of any Horovod job

The texts are functions of Python's own library, the classes parts of its manual; so small a BERT
is trained from scratch. `--weights` is a folder with a BERT's weights and tokenizer, `--data` a
.csv or .jsonl file with a label and a text in each row. Nothing is downloaded.
"""

import sys

from ranklab.projects.horovod.training import Options, command
from ranklab.projects.runner import Project

project = Project(__package__, __doc__, Options, command)

if __name__ == "__main__":
    sys.exit(project.main())
