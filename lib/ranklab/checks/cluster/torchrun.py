"""What the checks of jobs share: two jobs, and what torchrun and its ranks would be told."""

import contextlib
import io
import re
import shlex

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
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
    """Return {name: text} of what the job's ranks must find; None where it is not set."""
    return {name: environment.get(name) for name in (*dict(job.environment), *NAMES)}


def torchrun_options(words, names):
    """Return {what is looked at: value} of torchrun's own reading of `words`, and the endpoint."""
    from torch.distributed.run import get_args_parser

    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            options = vars(get_args_parser().parse_args(words))
    except SystemExit:
        return {"what torchrun says": told.getvalue().strip().rpartition("error: ")[2]}, ""
    options["nnodes"] = re.sub(r"^(\d+):\1$", r"\1", options["nnodes"])
    return {"what torchrun says": "", **{
        f"torchrun {name}": str(options[name.strip("-").replace("-", "_")]) for name in names},
        "what ranks run": ["-m"] * options["module"] + [
            options["training_script"], *options["training_script_args"]]}, options["rdzv_endpoint"]


def compare(where, got, right):
    """Each value of right, {name: (value, hint)}, is that in `got`; 8 and "8" are the same."""
    for name, (value, hint) in right.items():
        found = got.get(name)
        expect(str(found) == str(value), f"{where}: {name} is {found!r}, not {value!r}", hint)


def variables(job):
    """{name: (text, hint)} of each rank; None is for one that is not set."""
    given = "Export it as it is in job: a value may hold blanks, quotes, $ and new lines."
    names = "Set both if the job has an interface, else none: empty is not the same as not set."
    right = {name: (text, given) for name, text in job.environment}
    right |= {f"{library}_SOCKET_IFNAME": (job.interface or None, names)
              for library in ("NCCL", "GLOO")}
    right["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = job.save_seconds, (
        "torchrun kills its ranks 30 s after a SIGTERM, unless this gives them longer.")
    return right


def check_torchrun(where, words, job, right):
    """torchrun's own parser finds the job's command in `words`, and right, {option: value}."""
    from torch.distributed.run import get_args_parser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = vars(get_args_parser().parse_args(words))
    except SystemExit:
        raise Mistake(f"{where}: torchrun does not take {shlex.join(words)}",
                      said.getvalue().strip().rpartition("error: ")[2]) from None
    found["nnodes"] = re.sub(r"^(\d+):\1$", r"\1", found["nnodes"])
    right = right | {"--max-restarts": (job.restarts, "job.restarts are torchrun's, of the ranks; "
                                        "job.requeues are the scheduler's, of the whole job.")}
    compare(where, {f"--{name.replace('_', '-')}": text for name, text in found.items()}, right)
    got = ["-m"] * found["module"] + [found["training_script"], *found["training_script_args"]]
    expect(got == list(job.command), f"{where}: ranks run {got}, not {list(job.command)}", "Each "
           "word of job.command must arrive as it is. A shell splits and expands unquoted text.")
    return found
