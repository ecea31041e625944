"""The tensor that pretends to be on a GPU, and the rules that it obeys: for rehearse.py."""

import functools
import types
import typing

import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils import _pytree as pytree

from ranklab.engine.gpu_kernels import KERNELS, NAME, ON_CPU, GpuGenerator, key

COPIES = ("aten::copy_", "aten::to", "aten::_to_copy", "aten::_foreach_copy_", "aten::set_",
          "aten::_copy_from", "aten::_has_compatible_shallow_copy_type")
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
           "aten::_unsafe_index", "aten::_unsafe_index_put")  # a CPU index may choose on the GPU
PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype))  # most non-tensor arguments
NO_SCALAR = ("aten::cat", "aten::stack", "aten::mm", "aten::bmm", "aten::addmm")
PACK = "aten::_pack_padded_sequence"  # its second argument and its second result are on the CPU
DATA = torch.Tensor.data
CPU = torch.device("cpu")
OURS = ("raw", "_is_param")  # what this file and nn.Parameter keep on a tensor


class GpuTensor(torch.Tensor):
    """The CPU tensor `raw` in a wrapper that reports the GPU as its device and obeys its rules."""

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
        for kind in types:
            if kind is not cls:
                return NotImplemented  # a DTensor or other wrapper, which splits the op first
        return run(func, args, kwargs)

    def __repr__(self, **options):
        return f"{repr(self.raw)[:-1]}, device='{self.at}')"

    def __format__(self, spec):
        return format(self.raw, spec) if self.dim() == 0 else repr(self)

    def numpy(self, *, force=False):
        if force:
            return self.raw.detach().numpy()
        raise TypeError(f"can't convert {self.at} device type tensor to numpy. Use Tensor.cpu() "
                        "to copy the tensor to host memory first.")

    def as_subclass(self, kind):
        if not issubclass(kind, UninitializedTensorMixin):
            raise limit(f"a {kind.__name__} on the GPU", "torch wraps one tensor once")
        return _made_on_gpu(kind())

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

    def __reduce_ex__(self, protocol):
        """Save as a GPU tensor is saved: its storage names the device."""
        if isinstance(self, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, {})
        mark(self.raw)
        rebuild, arguments, *state = self.raw.__reduce_ex__(protocol)
        return rebuild, (*arguments[:4], self.requires_grad, *arguments[5:]), *state


def mark(raw):
    """Mark the storage of `raw` as the GPU's, for code below the wrapper, such as torch.save."""
    raw.untyped_storage().on_gpu = str(GpuTensor.at)


def is_marked(tensor):
    return hasattr(tensor.untyped_storage(), "on_gpu")


# torch's own refuses a tensor with a weakref: that could mean the object or its content. Here it
# means the object, which stays, as on a GPU.
swap_tensors = types.FunctionType(
    torch.utils.swap_tensors.__code__,
    vars(torch.utils) | {"weakref": types.SimpleNamespace(getweakrefs=lambda tensor: [])})


def set_data(tensor, new):
    """Set tensor.data = new, even between the CPU and the GPU.

    Torch can't do the latter, because a wrapper has a different class. So the two swap contents,
    and `tensor` keeps its hooks and attributes. Unlike on a GPU, its gradient moves along.
    """
    if {tensor.device.type, new.device.type} != {"cpu", NAME}:
        DATA.__set__(tensor, new)
        if type(new) is GpuTensor:
            tensor.raw = new.raw
        return
    if isinstance(tensor, UninitializedTensorMixin):
        if not new.numel():
            _made_on_gpu(tensor)
            return
        tensor.__class__, tensor.cls_to_become = tensor.cls_to_become, type(new)
    other = new.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        other = torch.nn.Parameter(other, tensor.requires_grad)
    if tensor.is_leaf and tensor.grad is not None:
        other.grad = tensor.grad.to(new.device)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks) is not None:
            setattr(other, hooks, getattr(tensor, hooks))
    attributes = {name: value for name, value in vars(tensor).items() if name not in OURS}
    swap_tensors(tensor, other)
    vars(tensor).update(attributes | vars(tensor))


def _made_on_gpu(lazy):
    """Let a lazy module's parameter be made on the GPU later; return it."""
    lazy.materialize = functools.partial(type(lazy).materialize, lazy, device=GpuTensor.at)
    return lazy


# --- what an op may do ----------------------------------------------------------------------------

class Op(typing.NamedTuple):
    name: str
    space: str
    kernel: typing.Callable  # what runs on the CPU tensors
    draws: bool


@functools.cache  # torch splits the name at every access
def _about(func):
    name, overload = func._schema.name, func._schema.overload_name
    space = "to.other" if (name, overload) == ("aten::to", "other") else func.namespace
    return Op(name, space, func if overload else KERNELS.get(name, func),
              torch.Tag.nondeterministic_seeded in func.tags)


def run(func, args, kwargs):
    """Run the op on the CPU tensors inside; results are on the GPU unless the op names a device."""
    op = _about(func)
    if op.space in OTHERWISE:
        return OTHERWISE[op.space](func, args, kwargs or {})
    wrappers, others, target, draws = {}, [], None, op.draws
    raw = [_unwrap(value, wrappers, others) for value in args]
    options = ({name: _unwrap(value, wrappers, others) for name, value in kwargs.items()}
               if kwargs else {})
    if others:
        target, draws = _look_at(others, func, args, wrappers, draws)
    elif op.name == PACK:
        raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor, but got one on "
                           f"{GpuTensor.at}")
    if op.space == "c10d":
        for tensor in wrappers.values():
            mark(tensor.raw)
        return _wrapped(func.redispatch(key("PrivateUse1"), *raw, **options), wrappers)
    if target is not None and target.type == NAME and options.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    try:
        result = _drawn(op.kernel, raw, options) if draws else op.kernel(*raw, **options)
    except NotImplementedError as error:
        raise limit(op.name.removeprefix("aten::"), error) from None
    if target is not None and target.type != NAME:
        return result.clone() if id(result) in wrappers else result
    if op.name == PACK:
        return _wrapped(result[0], wrappers), result[1]
    return _wrapped(result, wrappers)


def _unwrap(value, wrappers, others):
    kind = type(value)
    if kind is GpuTensor:
        wrappers[id(value.raw)] = value
        return value.raw
    if kind in PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return [_unwrap(item, wrappers, others) for item in value]
    if isinstance(value, (torch.Tensor, torch.device, torch._C.Generator)):
        others.append(value)
        return CPU if kind is torch.device and value.type == NAME else value
    return value


def _look_at(others, func, args, wrappers, draws):
    """Refuse tensors that are not on the GPU. Returns the requested device, and whether the op
    draws from a generator that it does not name.
    """
    target, tensors = None, []
    for value in others:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, torch.device):
            target = value
            if target.type == NAME:
                refuse_another_gpu(target)
        else:
            draws = False
            _seed(value)
    if tensors:
        _refuse_a_mix(func, args, wrappers, tensors)
    return target, draws


def _seed(generator):
    """Seed a GPU's generator for its next numbers; refuse any other generator."""
    gpu = GpuGenerator.by_address.get(generator._cdata)
    if gpu is None:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    torch._C.Generator.manual_seed(generator, gpu.next())


def _drawn(kernel, raw, options):
    """Run the op with the GPU's random numbers; the CPU's later numbers stay the same."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(torch.gpu.generator.next())
    try:
        return kernel(*raw, **options)
    finally:
        torch.default_generator.set_state(before)


def limit(subject, error):
    """Return an error with one sentence on what can't be rehearsed; torch's own has 20 lines."""
    reason = str(error).partition("\n")[0].partition(". ")[0]
    origin = ("perhaps a limit of the rehearsal alone: the CPU's kernels are not a GPU's"
              if "not implemented for" in reason else "a limit of the rehearsal, not of a GPU")
    return NotImplementedError(f"{subject} can't be rehearsed ({reason}): this is {origin}")


def _run_functional(func, args, kwargs):
    """Run a functional collective with c10d's ops, and wait for it at once."""
    result = func.redispatch(key("PrivateUse1"), *args, **kwargs)
    if func._schema.name != "_c10d_functional::wait_tensor":
        pytree.tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, result)
    return result


def _to_other(func, args, kwargs):
    other = args[1]
    return run(torch.ops.aten.to.device, (args[0], other.device, other.dtype, *args[2:]), kwargs)


OTHERWISE = {"_c10d_functional": _run_functional, "_dtensor": _run_functional,
             "to.other": _to_other}


def _wrapped(result, wrappers):
    if isinstance(result, torch.Tensor):
        wrapper = wrappers.get(id(result))
        if wrapper is None:
            return GpuTensor(result)
        if wrapper.shape != result.shape or wrapper.stride() != result.stride():
            DATA.__set__(wrapper, GpuTensor(result))  # it was resized in place
        return wrapper
    if isinstance(result, (list, tuple)):
        return type(result)(_wrapped(item, wrappers) for item in result)
    return result


def _refuse_a_mix(func, args, wrappers, cpu_tensors):
    name = func._schema.name
    if name in COPIES or not wrappers:
        return
    if name in INDEXED:
        if not isinstance(args[0], GpuTensor):
            raise RuntimeError("indices should be either on cpu or on the same device as the "
                               "indexed tensor (cpu)")
        cpu_tensors = [arg for arg in args[2:3] if isinstance(arg, torch.Tensor)
                       and not isinstance(arg, GpuTensor)]
    arguments = list(zip(args, func._schema.arguments))
    exempt = {id(arg) for arg, argument in arguments if argument.name in ON_CPU.get(name, ())}
    outputs = {id(arg) for arg, argument in arguments
               if argument.alias_info is not None and argument.alias_info.is_write}
    for tensor in cpu_tensors:
        if id(tensor) not in exempt and (
                tensor.dim() or name in NO_SCALAR or id(tensor) in outputs):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{GpuTensor.at} and {tensor.device}! ({name.removeprefix('aten::')} with a tensor "
                f"of shape {tuple(tensor.shape)} on {tensor.device})")


def refuse_another_gpu(device):
    if device.index:
        raise RuntimeError(f"invalid device ordinal: there is no {device}, as each rank sees one "
                           f"GPU here, {NAME}:0. Take the device from ranklab.device()")
