"""Shared by the checks of jobs: two jobs, and the settings of torchrun and its ranks."""

import contextlib
import io
import re

from ranklab.cluster.job import Job

# What a shell splits or expands shows in both. In LARGE it may also be no shell's syntax.
SMALL = Job("digits", 1, 2, ("train.py", "--note", "$5  each"), minutes=20, save_seconds=45,
            restarts=1, requeues=0, interface="ib0", image="x", environment=(("COST", "$5 each"),))
LARGE = Job("gpt-70b", 4, 8, ("-m", "train", "--note", "it's $5;  \"so\""), 7, minutes=1530,
            save_seconds=240, restarts=0, requeues=4, image="example.org/train:26.1",
            environment=(("DATA", "/data/my text"), ("NOTE", "it's $HOME, \"so\" `x`; \\ #1"),
                         ("LINES", "one\ntwo"), ("EMPTY", "")))
NAMES = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def rank_environment(job, environment):
    """Return {name: text} of the variables that the job's ranks must find; None: not set."""
    return {name: environment.get(name) for name in (*dict(job.environment), *NAMES)}


def torchrun_options(words, names):
    """Return {setting: value} as torchrun itself parses `words`, and the endpoint."""
    from torch.distributed.run import get_args_parser

    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            options = vars(get_args_parser().parse_args([*map(str, words)]))
    except SystemExit:
        return {"what torchrun says": output.getvalue().strip().rpartition("error: ")[2]}, ""
    options["nnodes"] = re.sub(r"^(\d+):\1$", r"\1", options["nnodes"])
    return {"what torchrun says": "", **{
        f"torchrun {name}": str(options[name.strip("-").replace("-", "_")]) for name in names},
        "what ranks run": ["-m"] * options["module"] + [
            options["training_script"], *options["training_script_args"]]}, options["rdzv_endpoint"]
