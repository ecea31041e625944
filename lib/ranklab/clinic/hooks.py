"""Observe a rank: hooks and wrappers that report events to its Observer.

    RANKLAB_DIAGNOSE=FOLDER torchrun ... -m ranklab.clinic.hooks [-m] PROGRAM ARGUMENTS

runs a program that needs no changes. Ranks that `launch` starts inside observation() are also
observed. Nothing is sent between ranks.
"""

import atexit
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
from ranklab.clinic.observer import Observer, address_of, line_of_program, place, quiet
from ranklab.clinic.trace import Step
from ranklab.clinic.wrappers import around

OBSERVERS = []  # this process's one, from the moment that its group is up until it ends
DETAILS = 50  # steps: after these, only every 50th has digests of all parameters


@contextlib.contextmanager
def observation(folder):
    """Observe the ranks that are launched inside the block, also those launched by a subprocess.

    folder: where they write; RANKLAB_DIAGNOSE passes it on
    """
    startup = str(Path(__file__).with_name("startup"))  # for the ranks of other launchers
    path = os.pathsep.join(filter(None, [startup, os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, RANKLAB_DIAGNOSE=str(Path(folder).absolute()), PYTHONPATH=path,
                         RANKLAB_RANK_HOOK=f"{observe_rank.__module__}:{observe_rank.__name__}"):
        yield


def observe_rank(fn):
    """Observe this rank, whose group is up; return a function that calls `fn` and records its end.
    """
    begin()
    OBSERVERS[0].lines.write("launched")

    def call(*args):
        with ending():
            return fn(*args)

    return call


def begin_by_itself():
    """Observe this rank, whose group is up, until Python ends."""
    if not OBSERVERS:
        atexit.register(note_end)
        hook = sys.excepthook
        sys.excepthook = lambda kind, error, lines: [note_end(error), hook(kind, error, lines)]
    begin()


@contextlib.contextmanager
def ending():
    """Record how the block ended."""
    try:
        yield
    except BaseException as error:
        note_end(error)
        raise
    note_end()


def note_end(error=None):
    """Record how this rank ended, if it is observed and its end is not recorded yet."""
    if isinstance(error, SystemExit) and error.code and error.__context__:
        error = error.__context__  # the rank's own error, hidden by multiprocessing's spawn
    is_good = error is None or isinstance(error, SystemExit) and not error.code
    while OBSERVERS:
        OBSERVERS.pop().lines.write("fate", "returned" if is_good else f"raised {error!r}"[:300])


def begin():
    """Observe this rank, whose group is up; if it is observed already, go on with its new group."""
    if OBSERVERS:
        OBSERVERS[0].everyone = dist.group.WORLD.group_name
        return
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
    OBSERVERS.append(observer)


# --- the optimizer --------------------------------------------------------------------------------

def _optimizers(observer):
    def remember(_, optimizer, *__):
        if all(reference() is not optimizer for reference in observer.optimizers):
            observer.optimizers.append(weakref.ref(optimizer))
        for p in optimizer.param_groups[-1]["params"]:
            if p.requires_grad and p.is_leaf:
                p.register_hook(functools.partial(_gradient, observer, id(p)))

    def restored(_, optimizer, *__):
        observer.lines.write("restore", observer.steps)

    around(torch.optim.Optimizer, "add_param_group", after=remember)
    around(torch.optim.Optimizer, "load_state_dict", after=restored)
    optimizers.register_optimizer_step_pre_hook(functools.partial(_begin_step, observer))
    optimizers.register_optimizer_step_post_hook(lambda *args: _after_step(observer, args[0]))


def _begin_step(observer, optimizer, args, options):
    """Record the gradients that the optimizer will use: now, or after its closure computes them."""
    closure = args[1] if len(args) > 1 else options.get("closure")
    if closure is None:
        _before_step(observer, optimizer)
        return None

    def observed():
        value = closure()
        _before_step(observer, optimizer)
        return value

    return (args[0], observed, *args[2:]), {name: value for name, value in options.items()
                                            if name != "closure"}


@quiet
def _before_step(observer, optimizer):
    with _disable_current_modes(), torch.no_grad():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        whole = _has_details(observer)
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
            local=[[dots.get(id(p)) for p in params]
                   for dots in observer.local[:-1]] if whole else [],
            reached=[len(dots) for dots in observer.local[:-1]],
            final=[p.grad if p.grad is None else digest_of(p.grad)
                   for p in params] if whole else [],
            factors=factors, losses=observer.losses, values=observer.values, rows=observer.rows,
            largest=observer.largest, masks=observer.masks, sums=observer.sums,
            pending=[line for _, line, reduces in observer.pending if reduces],
            outside=len(outside),
            embeddings=[i for i, p in enumerate(params) if address_of(p) in observer.embed],
            norms=observer.norms, twins=observer.twins, clip=observer.clip,
            unscale=observer.unscale, begins=observer.begins, anew=not optimizer.state)


def _has_details(observer):
    return observer.steps < DETAILS or observer.steps % DETAILS == 0


@quiet
def _gradient(observer, key, gradient):
    """Record a parameter's gradient on this rank, before a wrapper reduces it."""
    if observer.accumulates and _has_details(observer):
        with _disable_current_modes(), torch.no_grad():
            observer.local[-1][key] = digest_of(gradient).dot


@quiet
def _write_step(observer, optimizer):
    with _disable_current_modes(), torch.no_grad():
        params = [plain(p) for group in optimizer.param_groups for p in group["params"]]
        norms = torch._foreach_norm([p for p in params if has_numbers(p)], dtype=torch.float64)
        finite = not norms or bool(torch.stack([*norms]).isfinite().all())
        begun = wrappers.state_of(optimizer.param_groups, optimizer.state) if (
            observer.step.pop("anew")) else []
        observer.lines.write("step", *Step(**observer.step, finite=finite, begun=begun,
                                           memory=observer.bytes_alive()))


def _after_step(observer, optimizer):
    if observer.step:  # else an optimizer inside this one has recorded it, or it was not seen
        _write_step(observer, optimizer)
        observer.steps += 1
        observer.step = None
    observer.pending.clear()
    observer.in_flight.clear()
    observer.begin_step()


# --- the model and backward -----------------------------------------------------------------------

def _modules(observer):
    depth, waits = [0], [False]  # waits for a batch: a model with keyword arguments passes it on

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


@quiet
def _enters(observer, args):
    """Record a batch that enters the model, if one of `args` is a batch; return whether one is."""
    batch = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()), None)
    if batch is not None:
        observer.rows.append(bits_of_rows(batch))
        if batch.is_floating_point() and batch.numel():
            observer.largest = max(observer.largest, plain(batch).abs().max().item())
    return batch is not None


@quiet
def _sums(observer, model):
    if not observer.sums and observer.optimizers:
        observer.model = weakref.ref(model)
        used, held = ([p for p in params if p.requires_grad]
                      for params in (model.parameters(), observer.parameters()))
        digests = [digest_of(*used), digest_of(*held)]
        observer.norms = [digest.norm for digest in digests]
        dtypes = {p.dtype for p in used}
        if len(dtypes) == 1 and dtypes < {torch.float16, torch.bfloat16}:  # of float32 masters
            digests[1] = digest_of(*(plain(p).to(*dtypes) for p in held))
        observer.sums = [digest.sum for digest in digests]
        optimized = {id(p) for p in observer.parameters()}
        observer.twins = [(name, p.numel(), digest_of(p).norm)
                          for name, p in model.named_parameters()
                          if p.requires_grad and id(p) not in optimized]


@quiet
def _value(observer, tensors):
    first = tensors[0] if isinstance(tensors, (tuple, list)) else tensors
    if first.numel() == 1 and has_numbers(first):
        observer.values.append(abs(first.item()))


def _backward(observer):
    real = torch.autograd._engine_run_backward

    @functools.wraps(real)
    def run(tensors, *args, **options):
        outer, observer.in_backward = observer.in_backward, True
        if not outer:
            observer.accumulates = options.get("accumulate_grad", True)  # torch.autograd.grad: not
            if observer.accumulates:
                observer.begins.append(line_of_program())
                _value(observer, tensors)
        try:
            return real(tensors, *args, **options)
        finally:
            observer.in_backward = outer
            if not outer:
                observer.backwards += 1
                observer.places = None
                if observer.accumulates:
                    observer.local.append({})

    torch.autograd._engine_run_backward = run


def main():
    """Run the program on the command line; observe it from the moment that its group is up."""
    for owner in (dist, dist.distributed_c10d, dist.device_mesh):  # a mesh may also start it
        around(owner, "init_process_group",
               after=lambda *_: begin())
    sys.argv[:] = sys.argv[1:]
    with ending():
        if sys.argv[0] == "-m":
            sys.argv[:] = sys.argv[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":  # the module that the ranks' lines are known to come from
    importlib.import_module("ranklab.clinic.hooks").main()
