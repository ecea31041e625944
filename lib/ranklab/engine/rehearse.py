"""A rehearsal for GPUs: ranks run on the CPU with gloo, but under the rules of a GPU.

    launch(fn, ranks=4, rehearse="gpu")      or, for whole notebooks and modules, without an edit:
    ranklab rehearse NOTEBOOK | FILE.py | MODULE    which sets RANKLAB_REHEARSE=gpu

In such a rank `ranklab.device()` has its own device type, "gpu". A tensor made there is an ordinary
CPU tensor inside a wrapper that reports "gpu" (gpu_tensor.py), so every value is right. An error is
raised where a GPU would raise one, at the learner's line, with the message of a GPU, for:

    an op on tensors of two devices (a CPU tensor without dimensions may mix, as on a GPU)
    a collective on a CPU tensor: like NCCL's, the group has a backend only for the GPU
    .numpy() without .cpu(); a CPU generator for numbers on the GPU; .pin_memory() on the GPU
    a GPU that does not exist (each rank sees one, gpu:0)
    loading a file of GPU tensors on a machine without a GPU, without map_location

Code for `device.type == "cuda"` does not run here: test for `!= "cpu"` where possible. `torch.gpu`
stands in for the parts of `torch.cuda` that DDP, FSDP2, autocast and checkpoints use.

The following can't be rehearsed. If the rehearsal notices, its error ends with "this is a limit of
the rehearsal, not of a GPU".

    streams and events (all work is done when a call returns: a missing synchronize is not seen),
        non_blocking copies
    NCCL's own rules: its types, its hangs
    kernels that only GPUs have (SyncBatchNorm's, fused attention's backends, context_parallel) and
        their speed; code compiled for a GPU (flex_attention runs in its plain form)
    sparse gradients; tensor classes other than Parameter on the GPU
    a GPU's memory: memory_allocated() adds up the live tensors, and a peak is the largest value
        that was asked for
    the numbers that a GPU draws: here they come from the GPU's own seed and offset as well, but
        are different numbers; a GPU's generator that draws for the CPU is not refused
    a CPU gradient of a parameter that .data or .to() moves: here it moves along
    a parameter that moves while a profiler is on: a new one replaces it in the module
"""

import gc
import os
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.attention import flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import (_DummyBackendModule,
                                              _setup_privateuseone_for_python_backend)

from ranklab.engine.gpu_kernels import (NAME, GpuGenerator, Guard, can_become, checked_backward,
                                        checked_function, ctc_loss, teach_autocast)
from ranklab.engine.gpu_tensor import GpuTensor, is_marked, refuse_another_gpu, run, set_data


class _Generators(type):
    def __instancecheck__(cls, one):
        return isinstance(one, torch._C.Generator)

    def __call__(cls, device="cpu"):
        on_gpu = torch.device(device).type == NAME
        return GpuGenerator() if on_gpu else torch._C.Generator(device)


class Stream:
    """A stream or an event whose work is always done already."""

    stream_id, device_index, device_type = 0, 0, 20  # FSDP2's backward reads them since torch 2.15

    def __init__(self, *args, **options):
        self.at = time.perf_counter()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def query(self):
        return True

    def record(self, *args):
        self.at = time.perf_counter()
        return self

    def elapsed_time(self, end):  # in milliseconds
        return (end.at - self.at) * 1e3

    def _nothing(self, *args):
        return self

    wait = synchronize = wait_stream = wait_event = record_event = _nothing


class Module(_DummyBackendModule):
    """torch.gpu"""

    Stream = Event = stream = device = Stream

    def __init__(self):
        self.generator = GpuGenerator()
        self.peak = 0

    def current_stream(self, device=None):
        return Stream()

    default_stream = current_stream

    def set_device(self, device):
        refuse_another_gpu(torch.device(NAME, getattr(device, "index", device)))

    def synchronize(self, device=None):
        pass

    empty_cache = synchronize

    def manual_seed(self, seed):
        self.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self):
        return self.generator.initial_seed()

    def get_rng_state(self, device=None):
        return self.generator.get_state()

    def set_rng_state(self, state, device=None):
        self.generator.set_state(state)

    def memory_allocated(self, device=None):
        """Count the bytes of all live tensors on the GPU."""
        storages = {one.raw.untyped_storage() for one in gc.get_objects() if type(one) is GpuTensor}
        now = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        self.peak = max(self.peak, now)
        return now

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device=None):
        """Return the largest memory_allocated() so far, including now: at most the true peak."""
        self.memory_allocated()
        return self.peak

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device=None):
        self.peak = 0

    def get_amp_supported_dtype(self):  # the first thing that torch.autocast asks
        if not hasattr(self, "rest"):
            self.rest = torch.library.Library("_", "IMPL")
            teach_autocast(self.library, self.rest)
        return [torch.bfloat16, torch.float16]

    def get_device_capability(self, device=None):
        return 9, 0

    def __getattr__(self, name):
        raise AttributeError(f"torch.{NAME}.{name} can't be rehearsed: this is a limit of the "
                             "rehearsal, not of a GPU")


def _below(func):
    return lambda *args, **options: run(func, args, options)


def _pin(tensor, device=None):
    """Return a copy that only claims to be pinned: real pinned memory needs a GPU."""
    pinned = tensor.clone()
    pinned.untyped_storage().pinned = True
    return pinned


def _is_pinned(tensor, device=None):
    return getattr(tensor.untyped_storage(), "pinned", False)  # a view is pinned as well


def _future(get_future):
    """Wrap a Work's get_future, so that the future holds GPU tensors if GPU tensors were sent."""
    def on_gpu(value):
        return GpuTensor(value) if isinstance(value, torch.Tensor) and is_marked(value) else value

    return lambda work: get_future(work).then(lambda f: pytree.tree_map(on_gpu, f.value()))


def _new_group(make):
    """Set a new group's default backend, which torch does not know for a rehearsed GPU."""
    def new_group(*args, **options):
        group, store = make(*args, **options)
        if isinstance(group, dist.ProcessGroup):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return group, store

    return new_group


def _ddp(init):
    """Give DDP unpinned memory where its C++ asks for pinned memory, which needs a GPU."""
    def wrapped(self, *args, **options):
        if not hasattr(torch.gpu, "pinned"):
            torch.gpu.pinned = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings(action="ignore"):  # about replacing torch's own op
                torch.gpu.pinned.impl("empty_strided", _empty_strided, "CPU", allow_override=True)
        init(self, *args, **options)

    return wrapped


def _empty_strided(size, stride, *, pin_memory=None, **options):
    last = sum((n - 1) * step for n, step in zip(size, stride))
    tensor = torch.empty(last + 1 if all(size) else 0, **options).as_strided(size, stride)
    return _pin(tensor) if pin_memory else tensor


def _mark(storage, location):
    """Mark a storage that torch.load puts on the GPU."""
    if location.startswith(NAME):
        refuse_another_gpu(torch.device(location))
        storage.on_gpu = location
        return storage
    return None


def _rebuilt(rebuild):
    def rebuild_tensor(storage, *args):
        tensor = rebuild(storage, *args)
        return GpuTensor(tensor) if is_marked(tensor) else tensor

    return rebuild_tensor


# Ops that make a tensor on the GPU, or that C++ calls below the wrappers.
BELOW = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default,
         torch.ops.aten.tril_indices.default, torch.ops.aten.triu_indices.default,
         torch.ops.aten._efficientzerotensor.default, torch.ops.aten._copy_from.default,
         torch.ops.aten._local_scalar_dense.default)
FLEX = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
OF_ACCELERATOR = ("synchronize", "empty_cache", "memory_allocated", "max_memory_allocated",
                  "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats")
# Functions that torch implements only for its own devices, and that differ for this one.
PATCHES = (
    (torch.autograd, "_engine_run_backward", checked_backward),
    (torch.autograd.function.BackwardCFunction, "apply", checked_function),
    (torch._utils, "_rebuild_tensor", _rebuilt),
    (torch, "Generator", lambda generator: _Generators("Generator", (), {})),
    (torch.Tensor, "data", lambda data: property(data.__get__, set_data)),
    (dist.Work, "get_future", _future),
    (dist.distributed_c10d, "_new_process_group_helper", _new_group),
    (DistributedDataParallel, "__init__", _ddp),
)


def install():
    """Give this process one rehearsed GPU from now on; return the options for its process group."""
    if mark := os.environ.get("RANKLAB_REHEARSED"):  # a file that `ranklab rehearse` checks
        Path(mark).touch()
    _setup_privateuseone_for_python_backend(NAME, Module(), device_guard=Guard())
    GpuTensor.at = torch.device(NAME, 0)  # no device type of its own before the line above
    library = torch.gpu.library = torch.library.Library("aten", "IMPL")  # lives as long as this
    library.impl("_pin_memory", _pin, "CPU")
    library.impl("is_pinned", _is_pinned, "CPU")
    library.impl("_has_compatible_shallow_copy_type", can_become, "AutogradPrivateUse1")
    for hop in FLEX:  # in its form of plain ops; compiled, it could not handle the wrappers
        hop.py_impl(GpuTensor)(hop.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd])
    flex_attention._validate_device = lambda *ignored: None
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    library.impl("ctc_loss.Tensor", ctc_loss, "AutogradPrivateUse1")
    for func in BELOW:
        library.impl(func, _below(func), "PrivateUse1")
    torch.serialization.register_package(
        5, lambda storage: getattr(storage, "on_gpu", None), _mark)
    for owner, name, changed in PATCHES:
        setattr(owner, name, changed(getattr(owner, name)))
    for name in OF_ACCELERATOR:
        setattr(torch.accelerator, name, getattr(torch.gpu, name))
    for foreach in (_foreach_utils._foreach_supported_types, _foreach_supported_types):
        foreach.append(GpuTensor)
    warnings.filterwarnings("ignore", "barrier\\(\\): using the device")  # which is the only one
    return {"backend": f"{NAME}:gloo"}
