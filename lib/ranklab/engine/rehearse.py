"""A rehearsal for GPUs: ranks run on the CPU with gloo, but under the rules of a GPU.

    launch(fn, ranks=4, rehearse="gpu")      or, for whole notebooks and modules, without an edit:
    ranklab rehearse NOTEBOOK | MODULE       which sets RANKLAB_REHEARSE=gpu

In such a rank `ranklab.device()` is a device of its own type, "gpu". A tensor made there is an
ordinary CPU tensor (`raw`) inside a wrapper that says "gpu", so every value is right; and what a GPU
would refuse raises, on the learner's line, with the sentence that a GPU would have given:

    an op on tensors of two devices (a CPU tensor without dimensions may mix, as on a GPU)
    a collective on a CPU tensor: the group has a backend for the GPU alone, as NCCL's has
    .numpy() without .cpu(); a CPU generator for numbers on the GPU; .pin_memory() on the GPU
    a GPU that is not there (each rank sees one, gpu:0); a file of GPU tensors that is loaded where no GPU is

Code for `device.type == "cuda"` does not run here: ask for `!= "cpu"` where it can. `torch.gpu`
stands in for what DDP, FSDP2, autocast and checkpoints ask of `torch.cuda`.

What can't be rehearsed: streams and events (all work is done when a call returns, so a missing
synchronize is not seen), non_blocking copies, NCCL's own rules (its types, its hangs), kernels that
only GPUs have, their memory, their speed, the random numbers that they draw; a GPU's generator that
draws for the CPU.
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

NAME = "gpu"
FUNCTIONAL = ("_c10d_functional", "_dtensor")
COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::set_")
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
           "aten::_unsafe_index", "aten::_unsafe_index_put")  # a CPU index may choose on the GPU
# Under autocast, by the beginning of their names; the others of torch's list are done in float32.
LOWER = ("_convolution", "conv", "cudnn_conv", "linear", "matmul", "mm", "mv", "addmm", "addmv", "addr",
         "addbmm", "baddbmm", "bmm", "chain_matmul", "einsum", "linalg_multi_dot", "linalg_vecdot",
         "prelu", "scaled_dot", "_scaled_dot", "_thnn_fused", "gru_cell", "lstm_cell", "rnn_")
WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
          "index_put", "tensordot", "scatter_add")
NO_SCALAR = ("aten::cat", "aten::stack", "aten::mm", "aten::bmm", "aten::addmm")


class GpuTensor(torch.Tensor):
    """The CPU tensor `raw`, which says that it is on the GPU, and obeys a GPU's rules."""

    at = None  # the device
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        self = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=cls.at)
        self.raw = raw
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if any(kind is not cls for kind in types):
            return NotImplemented  # a DTensor, or another wrapper: it takes the op apart first
        return _run(func, args, kwargs or {})

    def __repr__(self, **options):
        return f"{repr(self.raw)[:-1]}, device='{self.at}')"

    def __format__(self, spec):
        return format(self.raw, spec) if self.dim() == 0 else repr(self)

    def numpy(self, *, force=False):
        if force:
            return self.raw.detach().numpy()
        raise TypeError(f"can't convert {self.at} device type tensor to numpy. Use Tensor.cpu() "
                        "to copy the tensor to host memory first.")

    def tolist(self):
        return self.raw.tolist()

    def data_ptr(self):
        return self.raw.data_ptr()

    def untyped_storage(self):  # FSDP2 resizes it, meters measure it
        return self.raw.untyped_storage()

    def record_stream(self, stream):
        pass

    def pin_memory(self, device=None):
        raise RuntimeError(f"cannot pin a tensor on {self.at}: only dense CPU tensors can be "
                           "pinned")

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new):
        torch.Tensor.data.__set__(self, new)
        self.raw = new.raw

    def __reduce_ex__(self, protocol):
        """As a tensor of a GPU is saved: its storage says on which device it was."""
        if isinstance(self, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, {})
        self.raw.untyped_storage().on_gpu = str(self.at)
        rebuild, arguments, *state = self.raw.__reduce_ex__(protocol)
        return rebuild, (*arguments[:4], self.requires_grad, *arguments[5:]), *state


# --- what an op may do ----------------------------------------------------------------------------

def _run(func, args, kwargs):
    """The op has run on the CPU tensors inside; its results are on the GPU unless it asks else."""
    if func.namespace in FUNCTIONAL:
        return _run_functional(func, args, kwargs)
    wrappers, others = {}, []

    def unwrap(value):
        if isinstance(value, GpuTensor):
            wrappers[id(value.raw)] = value
            return value.raw
        if isinstance(value, (list, tuple)):
            return [unwrap(one) for one in value]
        if isinstance(value, torch.Tensor):
            others.append(value)
        elif isinstance(value, torch._C.Generator) and value._cdata not in GpuGenerator.made:
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
        return value

    raw = [unwrap(value) for value in args]
    options = {name: unwrap(value) for name, value in kwargs.items()}
    if others:
        _refuse_a_mix(func, args, wrappers, others)
    if func.namespace == "c10d":
        for tensor in wrappers:
            wrappers[tensor].raw.is_on_gpu = True  # read by _future
        return _wrapped(func.redispatch(_key("PrivateUse1"), *raw, **options), wrappers)
    asked = options.get("device")
    if asked is None:
        return _wrapped(func(*raw, **options), wrappers)
    if asked.type != NAME:
        return func(*raw, **options)
    _refuse_another_gpu(asked)
    return _wrapped(func(*raw, **options | {"device": "cpu"}), wrappers)


def _key(name):
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))


def _run_functional(func, args, kwargs):
    """A functional collective is made of c10d's; its wait is done at once."""
    found = func.redispatch(_key("PrivateUse1"), *args, **kwargs)
    if func._schema.name != "_c10d_functional::wait_tensor":
        pytree.tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, found)
    return found


def _wrapped(found, wrappers):
    if isinstance(found, torch.Tensor):
        wrapper = wrappers.get(id(found))
        if wrapper is None:
            return GpuTensor(found)
        if wrapper.shape != found.shape or wrapper.stride() != found.stride():
            torch.Tensor.data.__set__(wrapper, GpuTensor(found))  # it was resized in place
        return wrapper
    if isinstance(found, (list, tuple)):
        return type(found)(_wrapped(one, wrappers) for one in found)
    return found


def _refuse_a_mix(func, args, wrappers, others):
    name = func._schema.name
    if name in COPIES or not wrappers:
        return
    if name in INDEXED:
        if not isinstance(args[0], GpuTensor):
            raise RuntimeError("indices should be either on cpu or on the same device as the "
                               "indexed tensor (cpu)")
        others = [one for one in args[2:3] if isinstance(one, torch.Tensor)
                  and not isinstance(one, GpuTensor)]
    written = [one for one, argument in zip(args, func._schema.arguments)
               if argument.alias_info is not None and argument.alias_info.is_write]
    for one in others:
        if one.dim() or name in NO_SCALAR or any(one is each for each in written):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{GpuTensor.at} and {one.device}! ({name.removeprefix('aten::')} with a tensor of "
                f"shape {tuple(one.shape)} on {one.device})")


def _refuse_another_gpu(asked):
    if asked.index:
        raise RuntimeError(f"invalid device ordinal: there is no {asked}, as each rank sees one GPU "
                           f"here, {NAME}:0. Take the device from ranklab.device()")


# --- what is asked of torch.cuda, and by whom else ------------------------------------------------

class GpuGenerator(torch._C.Generator):
    """Numbers for the GPU; here they come from a CPU's generator."""

    made = set()  # by address: on its way to an op it loses its type

    def __init__(self, device):
        self.made.add(self._cdata)

    def __del__(self):
        self.made.discard(self._cdata)

    @property
    def device(self):
        return GpuTensor.at


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
        _refuse_another_gpu(torch.device(NAME, getattr(device, "index", device)))

    def synchronize(self, device=None):
        pass

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def get_device_capability(self, device=None):
        return 9, 0


def _autocast(op, name):
    """The op under autocast, with the type that torch's list for CUDA gives it."""
    def cast(*args, **options):
        with torch._C._ExcludeDispatchKeyGuard(_key("AutocastPrivateUse1")):
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
        _refuse_another_gpu(device)
        return GpuTensor(make(*args, device="cpu", **options))

    return empty


def _copy_from(source, to, non_blocking=False):
    """What C++ calls below the wrappers, as torch.tensor(..., device=) does."""
    to.raw.copy_(getattr(source, "raw", source))
    return to


def _pin(tensor, device=None):
    """Pinned memory can't be had without a GPU; this only says that it is."""
    pinned = tensor.clone()
    pinned.pinned = True
    return pinned


def _is_pinned(tensor, device=None):
    return getattr(tensor, "pinned", False)


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
    """DDP asks for pinned memory where parameters may be unused: torch has none without a GPU."""
    def wrapped(self, *args, find_unused_parameters=False, **options):
        if find_unused_parameters:
            with warnings.catch_warnings(action="ignore"):  # that it takes the place of torch's own
                torch.gpu.library.impl("empty_strided", _empty_strided, "CPU", allow_override=True)
        init(self, *args, find_unused_parameters=find_unused_parameters, **options)

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
        _refuse_another_gpu(torch.device(location))
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
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(op, _autocast(op, packet), "AutocastPrivateUse1")
    rest = torch.gpu.rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
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
