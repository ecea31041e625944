"""A tensor that pretends to be on a GPU, and the rules that it obeys: for rehearse.py."""

import functools

import torch
from torch.utils import _pytree as pytree

NAME = "gpu"
FUNCTIONAL = ("_c10d_functional", "_dtensor")
COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::set_")
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
           "aten::_unsafe_index", "aten::_unsafe_index_put")  # a CPU index may choose on the GPU
PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype))  # most of what is no tensor
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
        for kind in types:
            if kind is not cls:
                return NotImplemented  # a DTensor, or another wrapper: it takes the op apart first
        return _run(func, args, kwargs)

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


# --- what an op may do ----------------------------------------------------------------------------

def _run(func, args, kwargs):
    """The op has run on the CPU tensors inside; its results are on the GPU unless it asks else."""
    space = _space(func)
    if space in FUNCTIONAL:
        return _run_functional(func, args, kwargs or {})
    wrappers, others = {}, []

    def unwrap(value):
        kind = type(value)
        if kind is GpuTensor:
            wrappers[id(value.raw)] = value
            return value.raw
        if kind in PLAIN:
            return value
        if isinstance(value, (list, tuple)):
            return [unwrap(one) for one in value]
        if isinstance(value, torch.Tensor):
            others.append(value)
        elif isinstance(value, torch._C.Generator) and value._cdata not in GpuGenerator.made:
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
        return value

    raw = [unwrap(value) for value in args]
    options = {name: unwrap(value) for name, value in kwargs.items()} if kwargs else {}
    if others:
        _refuse_a_mix(func, args, wrappers, others)
    if space == "c10d":
        for tensor in wrappers:
            wrappers[tensor].raw.is_on_gpu = True  # read by _future
        return _wrapped(func.redispatch(key("PrivateUse1"), *raw, **options), wrappers)
    asked = options.get("device")
    if asked is None:
        return _wrapped(func(*raw, **options), wrappers)
    if asked.type != NAME:
        return func(*raw, **options)
    refuse_another_gpu(asked)
    return _wrapped(func(*raw, **options | {"device": "cpu"}), wrappers)


@functools.cache  # torch splits the name at each look
def _space(func):
    return func.namespace


def key(name):
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))


def _run_functional(func, args, kwargs):
    """A functional collective is made of c10d's; its wait is done at once."""
    found = func.redispatch(key("PrivateUse1"), *args, **kwargs)
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


def refuse_another_gpu(asked):
    if asked.index:
        raise RuntimeError(f"invalid device ordinal: there is no {asked}, as each rank sees one "
                           f"GPU here, {NAME}:0. Take the device from ranklab.device()")
