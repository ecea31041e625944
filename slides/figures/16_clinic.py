"""The figures of the deck 16_clinic.md. All runs are those of the lab's programs, as found."""
import contextlib
import json
import tempfile
from pathlib import Path

import torch.distributed as dist

from ranklab import launch
from ranklab.clinic import hangs
from ranklab.engine import HangError
from ranklab.plots import clinic as plots

CASES = {case.disease: case for case in hangs.CASES}


def symptoms():
    return plots.symptoms(title=""), 8.6, 3.9


def waits():
    calls = [[(group, "all_reduce of\n" + ("gradients" if kind == "columns" else kind))
              for group, kind in mine] for mine in _grid_calls()]
    return plots.waits(calls, title=""), 7.4, 3


def orders():
    calls = [[f"{kind}\n{'x'.join(map(str, shape))}\n{'to' if kind == 'reduce' else 'from'} {root}"
              for kind, _, shape, root in mine] for mine in _calls("collective_order")]
    return plots.orders(calls, title=""), 7.6, 2.8


def _grid_calls():
    """The outputs have 16 x 10 numbers, and a norm is one."""
    names = {0: "a norm", 2: "outputs"}
    return [[(tuple(group), "columns" if group[1] - group[0] > 1 else names[len(shape)])
             for _, group, shape, _ in mine] for mine in _calls("communicator_order")]


def _calls(disease):
    """Of each rank, until all stand still: [kind, ranks of the group, shape, root]."""
    program = CASES[disease].broken()
    with tempfile.TemporaryDirectory() as folder:
        def noted():
            file = Path(folder, str(dist.get_rank())).open("a", buffering=1)
            for kind in ("all_reduce", "broadcast", "reduce"):
                setattr(dist, kind, _noting(kind, getattr(dist, kind), file))
            program()

        with contextlib.suppress(HangError):
            launch(noted, ranks=4, stall=1, preload=["sklearn.datasets"])
        return [[json.loads(text) for text in Path(folder, str(rank)).read_text().splitlines()]
                for rank in range(4)]


def _noting(kind, usual, file):
    def call(tensor, group=None, **given):
        root = given.get("group_src", given.get("group_dst"))
        members = dist.get_process_group_ranks(group)
        print(json.dumps([kind, members, [*tensor.shape], root]), file=file)
        return usual(tensor, group=group, **given)
    return call
