"""What ops do differently on a GPU than on the CPU: for rehearse.py.

Kernels that only GPUs have, and arguments that stay on the CPU; dtypes under autocast; random
numbers; errors in backward.
"""

import ctypes
import weakref
from itertools import repeat

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyDeviceGuard

NAME = "gpu"

# --- kernels that the CPU does not have: run on the CPU tensors inside ----------------------------

def _lstm_cell(from_input, from_hidden, c, bias=None, bias_hidden=None):
    gates = _sum(from_input, from_hidden, bias, bias_hidden).chunk(4, 1)
    i, f, o = (gates[n].sigmoid() for n in (0, 1, 3))
    g = gates[2].tanh()
    new_c = f * c + i * g
    return o * new_c.tanh(), new_c, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(grad_h, grad_c, c, new_c, saved, has_bias):
    i, f, g, o = saved.chunk(4, 1)
    tanh = new_c.tanh()
    into_c = 0 if grad_c is None else grad_c
    gate = torch.zeros_like(o)
    if grad_h is not None:
        into_c = into_c + grad_h * o * (1 - tanh**2)
        gate = grad_h * tanh * o * (1 - o)
    gates = torch.cat((into_c * g * i * (1 - i), into_c * c * f * (1 - f),
                       into_c * i * (1 - g**2), gate), 1)
    return gates, into_c * f, gates.sum(0) if has_bias else None


def _gru_cell(from_input, from_hidden, h, bias=None, bias_hidden=None):
    r, z, n = _sum(from_input, bias).chunk(3, 1)
    hr, hz, hn = _sum(from_hidden, bias_hidden).chunk(3, 1)
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return n + z * (h - n), torch.cat((r, z, n, h, hn), 1)


def _gru_cell_backward(grad, saved, has_bias):
    r, z, n, h, hn = saved.chunk(5, 1)
    into_n = grad * (1 - z) * (1 - n**2)
    into_r, into_z = into_n * hn * r * (1 - r), grad * (h - n) * z * (1 - z)
    inputs = torch.cat((into_r, into_z, into_n), 1)
    hidden = torch.cat((into_r, into_z, into_n * r), 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, grad * z, *biases


def _sum(*parts):
    return sum(part for part in parts if part is not None)


def _histc(x, *options):
    return torch.histc(x.double(), *options).to(x.dtype)  # a GPU counts integers as well


def can_become(tensor, new):
    """Return whether `tensor.data = new` is possible.

    Torch can't swap the contents of a tensor that a profiler has seen.
    """
    kinds = {tensor.device.type, new.device.type}
    return len(kinds) == 1 or kinds == {"cpu", NAME} and not torch.autograd._profiler_enabled()


def ctc_loss(logits, targets, input_lengths, target_lengths, *options):
    """Compute torch's ctc_loss with lengths on any device; torch reads them on the CPU."""
    return torch.ops.aten.ctc_loss.IntList(logits, targets, input_lengths.tolist(),
                                           target_lengths.tolist(), *options)


KERNELS = {
    "aten::_copy_from": lambda source, to, non_blocking=False: to.copy_(source),  # by torch.tensor
    "aten::_efficientzerotensor": torch.zeros,
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "aten::histc": _histc,
    "aten::_has_compatible_shallow_copy_type": can_become,
    # A nested tensor can't be wrapped; this makes nn.TransformerEncoder avoid nested tensors.
    "aten::_nested_tensor_from_mask_left_aligned": lambda *ignored: False,
}
# Arguments that may be on the CPU when the others are on the GPU.
ON_CPU = {
    "aten::_pack_padded_sequence": ("lengths",),
    "aten::_pack_padded_sequence_backward": ("batch_sizes",),
    "aten::ctc_loss": ("input_lengths", "target_lengths"),
}


# --- autocast -------------------------------------------------------------------------------------

# In 16 bits under autocast, by the start of their names; the rest of torch's list is in float32.
LOWER = ("_convolution", "conv", "cudnn_conv", "linear", "matmul", "mm", "mv", "addmm", "addmv",
         "addr", "addbmm", "baddbmm", "bmm", "chain_matmul", "einsum", "linalg_multi_dot",
         "linalg_vecdot", "prelu", "scaled_dot", "_scaled_dot", "_thnn_fused", "gru_cell",
         "lstm_cell", "rnn_")
WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
          "index_put", "tensordot", "scatter_add")


def key(name):
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))


def teach_autocast(library, rest):
    """Make torch.autocast give an op on the GPU the dtype in torch's list for CUDA."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(op, _autocast(op, packet), "AutocastPrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _autocast(op, name):
    def cast(*args, **options):
        with torch._C._ExcludeDispatchKeyGuard(key("AutocastPrivateUse1")):
            floats = [leaf for leaf in pytree.tree_leaves((args, options)) if _is_float(leaf)]
            if name.startswith(LOWER):
                dtype = torch.get_autocast_dtype(NAME)
            elif name in WIDEST and all(x.dtype != torch.float32 for x in floats):
                dtype = torch.get_autocast_dtype(NAME)
            else:
                dtype = torch.float32
            args, options = pytree.tree_map_only(_is_float, lambda x: x.to(dtype), (args, options))
            return op(*args, **options)

    return cast


def _is_float(x):
    return (isinstance(x, torch.Tensor) and x.is_floating_point() and x.device.type == NAME
            and x.dtype != torch.float64)


# --- random numbers -------------------------------------------------------------------------------

class GpuGenerator(torch._C.Generator):
    """The GPU's random numbers: a seed and an offset, as Philox has; a CPU generator draws them."""

    by_address = weakref.WeakValueDictionary()  # on its way to an op a generator loses its type
    seed_and_offset = 67280421310721, 0  # torch's default seed

    def __init__(self, device="cpu"):
        self.by_address[self._cdata] = self

    @property
    def device(self):
        return torch.device(NAME, 0)

    def manual_seed(self, seed):
        self.seed_and_offset = seed % 2**64, 0
        return self

    def initial_seed(self):
        return self.seed_and_offset[0]

    def seed(self):
        return self.manual_seed(super().seed()).initial_seed()

    def get_state(self):
        return torch.tensor(list(b"".join(n.to_bytes(8, "little") for n in self.seed_and_offset)),
                            dtype=torch.uint8, device="cpu")

    def set_state(self, state):
        state = bytes(state.cpu().tolist())
        self.seed_and_offset = tuple(int.from_bytes(part, "little")
                                     for part in (state[:8], state[8:]))

    def next(self):
        """Return the seed of the next op's numbers, and advance the offset."""
        seed, offset = self.seed_and_offset
        self.seed_and_offset = seed, offset + 4
        return hash((seed, offset)) % 2**63


# --- backward -------------------------------------------------------------------------------------

class Guard(_DummyDeviceGuard):
    """Set a hook's error aside while backward's C++ asks for the device's type.

    Torch asks for it even while the error propagates through the C++ of backward. Python can't
    answer while an error is set, and the process would abort. So the error is set aside, and
    checked_backward raises it later.
    """

    caught, running = [], []

    def type_(self):
        for _ in FETCH:  # not a call: it could not return while an error is set, and after it
            break        # another thread may run and fetch its own error
        pending = KIND.value, ERROR.value, TRACEBACK.value
        if pending[0]:
            slots = [*map(ctypes.c_void_p, pending)]
            ctypes.pythonapi.PyErr_NormalizeException(*map(ctypes.byref, slots))
            _, error, traceback = (ctypes.cast(slot, ctypes.py_object).value if slot.value else None
                                   for slot in slots)
            self.caught.append(error.with_traceback(traceback))
        return torch._C._autograd.DeviceType.PrivateUse1


KIND, ERROR, TRACEBACK = FETCHED = [ctypes.c_void_p() for _ in range(3)]
FETCH = map(ctypes.pythonapi.PyErr_Fetch, *(repeat(ctypes.byref(slot)) for slot in FETCHED))


def checked_backward(run):
    """Wrap backward: check the device of gradients from outside; raise the error of a hook."""
    def run_backward(outputs, gradients, *args, **options):
        expected = [_device_of(output) for output in outputs]
        gradients = _checked(gradients, expected, "invalid gradient")
        if not Guard.running:  # the error of another thread may still be pending
            Guard.caught.clear()
        Guard.running.append(run)
        try:
            return run(outputs, gradients, *args, **options)
        except SystemError:
            if not Guard.caught:
                raise
            raise Guard.caught.pop() from None
        finally:
            Guard.running.pop()

    return run_backward


def _device_of(output):
    if isinstance(output, torch.Tensor):
        return output.device
    return output.node._input_metadata[output.output_nr].device  # a GradientEdge


def checked_function(apply):
    """Wrap `apply`: check the device of a torch.autograd.Function's gradients."""
    def checked(self, *args):
        result = apply(self, *args)
        gradients = result if isinstance(result, tuple) else (result,)
        if not any(type(gradient) is torch.Tensor for gradient in gradients):
            return result
        expected = {node._input_metadata[n].device for node, n in self.next_functions if node}
        if len(expected) != 1:
            return result
        return _checked(gradients, [*expected] * len(gradients),
                        f"Function {type(self).__name__} returned an invalid gradient")

    return checked


def _checked(gradients, expected, complaint):
    """Do torch's check for a wrapper: move a CPU number to the GPU, refuse a CPU tensor."""
    def move(n, gradient, device):
        if (type(gradient) is not torch.Tensor or device.type != NAME
                or gradient.device == device):
            return gradient
        if gradient.dim():
            raise RuntimeError(f"{complaint} at index {n} - expected device {device} but got "
                               f"{gradient.device}")
        return gradient.to(device)

    return tuple(move(n, *pair) for n, pair in enumerate(zip(gradients, expected)))
