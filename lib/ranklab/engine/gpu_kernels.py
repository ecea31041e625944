"""What single ops do otherwise on a GPU than on the CPU: for rehearse.py.

Their types under autocast; kernels that only GPUs have; arguments that stay on the CPU.
"""

import torch
from torch.utils import _pytree as pytree

NAME = "gpu"

# Under autocast, by the beginning of their names; the others of torch's list are done in float32.
LOWER = ("_convolution", "conv", "cudnn_conv", "linear", "matmul", "mm", "mv", "addmm", "addmv",
         "addr", "addbmm", "baddbmm", "bmm", "chain_matmul", "einsum", "linalg_multi_dot",
         "linalg_vecdot", "prelu", "scaled_dot", "_scaled_dot", "_thnn_fused", "gru_cell",
         "lstm_cell", "rnn_")
WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
          "index_put", "tensordot", "scatter_add")


def key(name):
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))


def teach_autocast(library, rest):
    """torch.autocast gives an op on the GPU the type that torch's list for CUDA says."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(op, _autocast(op, packet), "AutocastPrivateUse1")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _autocast(op, name):
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


# --- kernels that the CPU has not: on the CPU tensors inside --------------------------------------

def _lstm_cell(from_input, from_hidden, c, bias=None, bias_hidden=None):
    gates = _sum(from_input, from_hidden, bias, bias_hidden).chunk(4, 1)
    i, f, o = (gates[n].sigmoid() for n in (0, 1, 3))
    g = gates[2].tanh()
    new_c = f * c + i * g
    return o * new_c.tanh(), new_c, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(grad_h, grad_c, c, new_c, kept, has_bias):
    i, f, g, o = kept.chunk(4, 1)
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


def _gru_cell_backward(grad, kept, has_bias):
    r, z, n, h, hn = kept.chunk(5, 1)
    into_n = grad * (1 - z) * (1 - n**2)
    into_r, into_z = into_n * hn * r * (1 - r), grad * (h - n) * z * (1 - z)
    inputs = torch.cat((into_r, into_z, into_n), 1)
    hidden = torch.cat((into_r, into_z, into_n * r), 1)
    biases = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, grad * z, *biases


def _sum(*parts):
    return sum(part for part in parts if part is not None)


def _histc(x, *how):
    return torch.histc(x.double(), *how).to(x.dtype)  # a GPU counts integers, too


def can_become(one, other):
    """`one.data = other` is possible; of what a profiler has seen, torch can't swap the content."""
    on = {one.device.type, other.device.type}
    return len(on) == 1 or on == {"cpu", NAME} and not torch.autograd._profiler_enabled()


def ctc_loss(logits, targets, input_lengths, target_lengths, *how):
    """Lengths may be anywhere: torch reads them on the CPU."""
    return torch.ops.aten.ctc_loss.IntList(logits, targets, input_lengths.tolist(),
                                           target_lengths.tolist(), *how)


KERNELS = {
    "aten::_copy_from": lambda source, to, non_blocking=False: to.copy_(source),  # by torch.tensor
    "aten::_efficientzerotensor": torch.zeros,
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "aten::histc": _histc,
    "aten::_has_compatible_shallow_copy_type": can_become,
    # A tensor of rows of unequal lengths can't be wrapped; this keeps nn.TransformerEncoder off it.
    "aten::_nested_tensor_from_mask_left_aligned": lambda *ignored: False,
}
# Arguments that may be on the CPU beside tensors of the GPU.
ON_CPU = {
    "aten::_pack_padded_sequence": ("lengths",),
    "aten::_pack_padded_sequence_backward": ("batch_sizes",),
    "aten::ctc_loss": ("input_lengths", "target_lengths"),
}
