"""A rehearsal for GPUs: ranks run on the CPU with gloo, but under the rules of a GPU.

    launch(fn, ranks=4, rehearse="gpu")      or, for whole notebooks and modules, without an edit:
    ranklab rehearse NOTEBOOK | MODULE       which sets RANKLAB_REHEARSE=gpu

In such a rank `ranklab.device()` is a device of its own type, "gpu". A tensor made there is an
ordinary CPU tensor inside a wrapper that says "gpu" (gpu_tensor.py), so every value is right. What
a GPU would refuse raises, on the learner's line, with the sentence that a GPU would have given:

    an op on tensors of two devices (a CPU tensor without dimensions may mix, as on a GPU)
    a collective on a CPU tensor: the group has a backend for the GPU alone, as NCCL's has
    .numpy() without .cpu(); a CPU generator for numbers on the GPU; .pin_memory() on the GPU
    a GPU that is not there (each rank sees one, gpu:0)
    a file of GPU tensors that is loaded where no GPU is, without map_location

Code for `device.type == "cuda"` does not run here: ask for `!= "cpu"` where it can. `torch.gpu`
stands in for what DDP, FSDP2, autocast and checkpoints ask of `torch.cuda`.

What can't be rehearsed: streams and events (all work is done when a call returns, so a missing
synchronize is not seen), non_blocking copies, NCCL's own rules (its types, its hangs), kernels that
only GPUs have, their memory, their speed, the random numbers that they draw; a GPU's generator that
draws for the CPU; hooks of a parameter that module.to(device()) moves after they were registered;
an error that a tensor's hook raises: torch ends the rank by SIGABRT.
"""

import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import (_DummyBackendModule,
                                              _setup_privateuseone_for_python_backend)

from ranklab.engine.gpu_tensor import NAME, GpuGenerator, GpuTensor, key, refuse_another_gpu

# Under autocast, by the beginning of their names; the others of torch's list are done in float32.
LOWER = ("_convolution", "conv", "cudnn_conv", "linear", "matmul", "mm", "mv", "addmm", "addmv",
         "addr", "addbmm", "baddbmm", "bmm", "chain_matmul", "einsum", "linalg_multi_dot",
         "linalg_vecdot", "prelu", "scaled_dot", "_scaled_dot", "_thnn_fused", "gru_cell",
         "lstm_cell", "rnn_")
WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
          "index_put", "tensordot", "scatter_add")


class _Generators(type):
    def __instancecheck__(cls, one):
        return isinstance(one, torch._C.Generator)

    def __call__(cls, device="cpu"):
        on_gpu = torch.device(device).type == NAME
        return GpuGenerator("cpu") if on_gpu else torch._C.Generator(device)


class Stream:
    """A stream or an event: all its work is done already."""

    def __init__(self, *args, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def query(self):
        return True

    def _nothing(self, *args):
        return self

    record = wait = synchronize = wait_stream = wait_event = record_event = _nothing


class Module(_DummyBackendModule):
    """torch.gpu"""

    Stream = Event = stream = device = Stream

    def current_stream(self, device=None):
        return Stream()

    def set_device(self, device):
        refuse_another_gpu(torch.device(NAME, getattr(device, "index", device)))

    def synchronize(self, device=None):
        pass

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self):  # the first thing that torch.autocast asks
        if not hasattr(self, "rest"):
            self.rest = torch.library.Library("_", "IMPL")
            _teach_autocast(self.library, self.rest)
        return [torch.bfloat16, torch.float16]

    def get_device_capability(self, device=None):
        return 9, 0


def _teach_autocast(library, rest):
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(op, _autocast(op, packet), "AutocastPrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _autocast(op, name):
    """The op under autocast, with the type that torch's list for CUDA gives it."""
    def cast(*args, **options):
        with torch._C._ExcludeDispatchKeyGuard(key("AutocastPrivateUse1")):
            floats = [one for one in pytree.tree_leaves((args, options)) if _is_float(one)]
            if name.startswith(LOWER):
                dtype = torch.get_autocast_dtype(NAME)
            elif name in WIDEST and all(one.dtype != torch.float32 for one in floats):
                dtype = torch.get_autocast_dtype(NAME)
            else:
                dtype = torch.float32
            args, options = pytree.tree_map_only(_is_float, lambda x: x.to(dtype), (args, options))
            return op(*args, **options)

    return cast


def _is_float(one):
    return (isinstance(one, torch.Tensor) and one.is_floating_point() and one.device.type == NAME
            and one.dtype != torch.float64)


def _empty(make):
    def empty(*args, pin_memory=None, device=None, **options):
        refuse_another_gpu(device)
        return GpuTensor(make(*args, device="cpu", **options))

    return empty


def _copy_from(source, to, non_blocking=False):
    """What C++ calls below the wrappers, as torch.tensor(..., device=) does."""
    to.raw.copy_(getattr(source, "raw", source))
    return to


def _pin(tensor, device=None):
    """Pinned memory can't be had without a GPU; this only says that it is."""
    pinned = tensor.clone()
    pinned.untyped_storage().pinned = True
    return pinned


def _is_pinned(tensor, device=None):
    return getattr(tensor.untyped_storage(), "pinned", False)  # a view is pinned, too


def _future(get_future):
    """get_future of a Work whose future holds tensors of the GPU, where those were sent."""
    def on_gpu(value):
        return GpuTensor(value) if getattr(value, "is_on_gpu", False) else value

    return lambda work: get_future(work).then(lambda f: pytree.tree_map(on_gpu, f.value()))


def _new_group(make):
    """Of a group with a backend for the GPU torch does not know which of its backends is first."""
    def new_group(*args, **options):
        group, store = make(*args, **options)
        if isinstance(group, dist.ProcessGroup):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        return group, store

    return new_group


def _ddp(init):
    """DDP may ask for pinned memory, in C++: torch has none without a GPU."""
    def wrapped(self, *args, **options):
        if not hasattr(torch.gpu, "pinned"):
            torch.gpu.pinned = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings(action="ignore"):  # that it takes the place of torch's own
                torch.gpu.pinned.impl("empty_strided", _empty_strided, "CPU", allow_override=True)
        init(self, *args, **options)

    return wrapped


def _empty_strided(size, stride, *, pin_memory=None, **options):
    last = sum((n - 1) * step for n, step in zip(size, stride))
    tensor = torch.empty(last + 1 if all(size) else 0, **options).as_strided(size, stride)
    return _pin(tensor) if pin_memory else tensor


def _moved(apply):
    """module.to() keeps its parameters, which an optimizer may hold; torch would make new ones."""
    def moved(self, *args, **options):
        before = torch.__future__.get_swap_module_params_on_conversion()
        is_on_cpu = any(type(p) is torch.nn.Parameter for p in self.parameters(recurse=False))
        torch.__future__.set_swap_module_params_on_conversion(is_on_cpu)
        try:
            return apply(self, *args, **options)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return moved


def _mark(storage, location):
    """torch.load puts this storage on the GPU."""
    if location.startswith(NAME):
        refuse_another_gpu(torch.device(location))
        storage.on_gpu = location
        return storage
    return None


def _rebuilt(rebuild):
    def rebuild_tensor(storage, *args):
        tensor = rebuild(storage, *args)
        is_on_gpu = getattr(storage._untyped_storage, "on_gpu", None)
        return GpuTensor(tensor) if is_on_gpu else tensor

    return rebuild_tensor


def install():
    """From now on this process has one GPU; returns the options for its process group."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    GpuTensor.at = torch.device(NAME, 0)  # no device type of its own before the line above
    library = torch.gpu.library = torch.library.Library("aten", "IMPL")  # lives as long as this
    for op in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
        library.impl(op, _empty(op), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_pin_memory", _pin, "CPU")
    library.impl("is_pinned", _is_pinned, "CPU")
    torch.serialization.register_package(
        5, lambda storage: getattr(storage, "on_gpu", None), _mark)
    torch._utils._rebuild_tensor = _rebuilt(torch._utils._rebuild_tensor)
    torch.Generator = _Generators("Generator", (), {})
    dist.Work.get_future = _future(dist.Work.get_future)
    dist.distributed_c10d._new_process_group_helper = _new_group(
        dist.distributed_c10d._new_process_group_helper)
    DistributedDataParallel.__init__ = _ddp(DistributedDataParallel.__init__)
    for foreach in (_foreach_utils._foreach_supported_types, _foreach_supported_types):
        foreach.append(GpuTensor)
    torch.nn.Module._apply = _moved(torch.nn.Module._apply)
    warnings.filterwarnings("ignore", "barrier\\(\\): using the device")  # which is the only one
    return {"backend": f"{NAME}:gloo"}
