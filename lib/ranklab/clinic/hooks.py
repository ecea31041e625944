"""Observe a rank: hooks and wrappers that hand what happens to its Observer.

    RANKLAB_DIAGNOSE=FOLDER torchrun ... -m ranklab.clinic.hooks [-m] PROGRAM ARGUMENTS

runs a program that knows nothing of it. Ranks that `launch` starts inside observation() are
observed, too. Nothing is sent between ranks.
"""

import contextlib
import functools
import importlib
import os
import runpy
import socket
import sys
import weakref
from pathlib import Path
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _disable_current_modes

from ranklab.clinic import wrappers
from ranklab.clinic.digests import bits_of_rows, digest_of, has_numbers, plain
from ranklab.clinic.observer import Observer, place
from ranklab.clinic.trace import Step
from ranklab.clinic.wrappers import around

DETAILS = 50  # steps: after these, every 50th has digests of all parameters


@contextlib.contextmanager
def observation(folder):
    """Observe the ranks that are launched inside the block, also by a program that it starts.

    folder  for what they write: RANKLAB_DIAGNOSE tells them
    """
    with mock.patch.dict(os.environ, RANKLAB_DIAGNOSE=str(Path(folder).absolute()),
                         RANKLAB_RANK_HOOK=f"{observe_rank.__module__}:{observe_rank.__name__}"):
        yield


def observe_rank(fn):
    """Observe this rank, whose group is up; return a function that calls `fn` and notes its end."""
    observer = begin()

    def call(*args):
        with ending(observer):
            return fn(*args)

    return call


@contextlib.contextmanager
def ending(observer):
    """Write how the block ended."""
    try:
        yield
    except BaseException as error:
        is_good = isinstance(error, SystemExit) and not error.code
        observer.lines.write("fate", "returned" if is_good else f"raised {error!r}"[:300])
        raise
    observer.lines.write("fate", "returned")


def begin():
    """Return a new Observer of this rank, whose group is up."""
    rank = dist.get_rank()
    folder = Path(os.environ["RANKLAB_DIAGNOSE"], os.environ.get("MASTER_PORT", "0"))
    while (folder / f"rank{rank}.0.jsonl").exists():  # of an earlier launch
        folder = folder.with_name(folder.name + "+")
    observer = Observer(folder, rank)
    observer.lines.write("process", socket.gethostname(), os.getpid(),
                         psutil.Process().create_time())
    for patch in (_optimizers, _modules, _backward, wrappers.collectives, wrappers.files,
                  wrappers.samplers):
        patch(observer)
    return observer


# --- the optimizer --------------------------------------------------------------------------------

def _optimizers(observer):
    def remember(_, optimizer, *__):
        if all(reference() is not optimizer for reference in observer.optimizers):
            observer.optimizers.append(weakref.ref(optimizer))

    around(torch.optim.Optimizer, "add_param_group", after=remember)
    optimizers.register_optimizer_step_pre_hook(lambda *about: _before_step(observer, about[0]))
    optimizers.register_optimizer_step_post_hook(lambda *about: _after_step(observer, about[0]))


def _before_step(observer, optimizer):
    with _disable_current_modes(), torch.no_grad():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        whole = observer.steps < DETAILS or observer.steps % DETAILS == 0
        model = observer.model and observer.model()
        optimized = {id(p) for p in observer.parameters()}
        names = {id(p): name for name, p in model.named_parameters()} if model else {}
        outside = [p for p in (model.parameters() if model else ())
                   if p.grad is not None and id(p) not in optimized]
        factors = [observer.scattered.get(place(p.grad)) for p in params if p.grad is not None]
        observer.step = dict(
            number=observer.steps, optimizer=observer.number_of(optimizer),
            calls=observer.numbers.get(observer.everyone, -1) + 1,
            backwards=observer.backwards, flops=observer.flops,
            rate=max(float(group["lr"]) for group in optimizer.param_groups),
            names=[names.get(id(p), "") for p in params],
            weights=[digest_of(p) for p in params] if whole else [],
            local=[observer.local.get(id(p)) for p in params] if whole else [],
            final=[p.grad if p.grad is None else digest_of(p.grad)
                   for p in params] if whole else [],
            factors=factors, losses=observer.losses, values=observer.values, rows=observer.rows,
            largest=observer.largest, masks=observer.masks, sums=observer.sums,
            pending=[line for _, line, reduces in observer.pending if reduces],
            outside=len(outside),
            embeddings=[i for i, p in enumerate(params) if plain(p).data_ptr() in observer.embed],
            clip=observer.clip)


def _after_step(observer, optimizer):
    with _disable_current_modes(), torch.no_grad():
        params = [plain(p) for group in optimizer.param_groups for p in group["params"]]
        norms = torch._foreach_norm([p for p in params if has_numbers(p)], dtype=torch.float64)
        finite = not norms or bool(torch.stack([*norms]).isfinite().all())
        observer.lines.write("step", *Step(**observer.step, finite=finite,
                                           memory=observer.bytes_alive()))
    observer.steps += 1
    observer.pending.clear()
    observer.begin_step()


# --- the model and backward -----------------------------------------------------------------------

def _modules(observer):
    depth, waits = [0], [False]  # for a batch: a model that takes keywords hands it on

    def before(module, args):
        depth[0] += 1
        if depth[0] == 1 and not observer.in_backward:
            waits[0] = torch.is_grad_enabled()
            wrappers.begin_passes(observer, waits[0] and module.training)
        if waits[0] and not observer.in_backward:
            with _disable_current_modes(), torch.no_grad():
                waits[0] = not _enters(observer, args)
                if depth[0] == 1:
                    _sums(observer, module)

    def after(module, args, output):
        depth[0] -= 1

    torch.nn.modules.module.register_module_forward_pre_hook(before)
    torch.nn.modules.module.register_module_forward_hook(after, always_call=True)


def _enters(observer, args):
    """A batch enters the model, if one of these is one. Returns whether that is so."""
    batch = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()), None)
    if batch is not None:
        observer.rows.append(bits_of_rows(batch))
        if batch.is_floating_point() and batch.numel():
            observer.largest = max(observer.largest, plain(batch).abs().max().item())
    return batch is not None


def _sums(observer, model):
    if not observer.sums and observer.optimizers:
        observer.model = weakref.ref(model)
        observer.sums = [sum(digest_of(p).sum for p in params if p.requires_grad)
                         for params in (model.parameters(), observer.parameters())]


def _backward(observer):
    real = torch.autograd._engine_run_backward

    @functools.wraps(real)
    def run(*args, **options):
        outer, observer.in_backward = observer.in_backward, True
        try:
            return real(*args, **options)
        finally:
            observer.in_backward = outer
            if not outer:
                _after_backward(observer)

    torch.autograd._engine_run_backward = run


def _after_backward(observer):
    observer.backwards += 1
    observer.places = None
    if observer.steps < DETAILS or observer.steps % DETAILS == 0:
        with _disable_current_modes(), torch.no_grad():
            observer.local = {id(p): digest_of(p.grad) for p in observer.parameters()
                              if p.grad is not None}


def main():
    """Run the program of the command line; observe it from the moment its group is up."""
    stack = contextlib.ExitStack()
    for owner in (dist, dist.distributed_c10d, dist.device_mesh):  # a mesh may start it, too
        around(owner, "init_process_group",
               after=lambda *_: stack.enter_context(ending(begin())))
    sys.argv[:] = sys.argv[1:]
    with stack:
        if sys.argv[0] == "-m":
            sys.argv[:] = sys.argv[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":  # the module that the ranks' lines are known to come from
    importlib.import_module("ranklab.clinic.hooks").main()
