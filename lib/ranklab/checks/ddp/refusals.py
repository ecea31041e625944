"""What DDP and Python say of a hook that is not one, in plain words."""

import inspect
import re

import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import on_ranks

BACK = ("Does the result get back? DDP takes what the future holds: in .then(...) copy it into "
        "bucket.buffer(), and return that buffer.")
LIST = "A finished future's value() is a list of one tensor: take value()[0]; return the buffer."
FUNCTION = ("Give .then(...) a function, and not what it returns: it is called when the sum is "
            "there.")
OF_DDP = (  # what DDP or Python says, as a regex of all of it, and what it means here
    (".*must return a torch.futures.Future.*", "DDP wants a future, and gets something else",
     "dist.all_reduce(..., async_op=True).get_future() is one, and so is what its .then(...) "
     "returns. DDP goes on with backward meanwhile."),
    (".*expected the hook result is a PyObject.*",
     "the future that DDP gets holds the all-reduce's list, not the bucket", BACK),
    (r"\w+: Expected a proper Tensor but got None.*",
     "what runs in .then(...) returns None", BACK),
    (".*TypeError: .*must be Tensor, not list.*",
     "in .then(...) a list is taken for a tensor", LIST),
    (r"\w+: Unable to cast \[tensor\(.*", "what runs in .then(...) returns a list", LIST),
    ("AttributeError: 'NoneType' object has no attribute 'get_future'",
     "dist.all_reduce returns None here",
     "With async_op=True it returns at once, with a Work, whose get_future() is asked."),
    (r"RuntimeError: .*completed\(\) INTERNAL ASSERT.*",
     "value() is asked of a future that is not done", FUNCTION),
    (r"TypeError: then\(\): incompatible function arguments.*",
     ".then(...) gets no function", FUNCTION),
    ("AttributeError: 'NoneType' object has no attribute 'size'",
     "the group is None here, which has no size()",
     "register_comm_hook(None, hook) means all ranks: dist.get_world_size(group) takes None."),
)


def check_signature(fn):
    """Returns where DDP takes it as a hook."""
    names = inspect.signature(fn).parameters
    if "bucket" not in names or names["bucket"].annotation not in (dist.GradBucket,
                                                                   inspect.Parameter.empty):
        raise Mistake(f"DDP refuses it: its parameters are {', '.join(map(str, names.values()))}",
                      "The second one must be called bucket, and annotated dist.GradBucket.")


def run_in_ddp(trial, *args, ranks):
    """on_ranks; what DDP says of a hook is put in plain words."""
    try:
        return on_ranks(trial, *args, ranks=ranks)
    except Mistake as mistake:  # DDP's own messages are of C++
        for pattern, what, hint in OF_DDP:
            if re.fullmatch(pattern, mistake.cause, re.S):
                raise Mistake(what, hint) from None
        raise
