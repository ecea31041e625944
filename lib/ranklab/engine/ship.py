"""Send functions, arguments and values between processes.

cloudpickle ships functions and classes of `__main__` (a notebook cell, a script) by value. Tensors
travel as their own bytes: a view does not bring its whole storage, and a tensor on a GPU arrives on
the CPU, so the kernel never opens CUDA.
"""

import contextlib
import importlib
import io
import mmap
import os
import pickle
import sys
import tempfile
import threading
import types

import cloudpickle

OPEN_LIMIT = 60.0  # seconds to unpickle all values of a launch

class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj):
        import torch  # here, so that `import ranklab` stays light

        if isinstance(obj, torch.Tensor) and hasattr(obj, "raw"):  # of a rehearsal: on the CPU here
            raw, is_parameter = obj.raw, isinstance(obj, torch.nn.Parameter)
            if is_parameter:
                return torch.nn.Parameter, (raw, obj.requires_grad)
            return _require_grad, (raw, obj.requires_grad and obj.is_leaf)
        if type(obj) is torch.Tensor and obj.device.type in ("cpu", "cuda") and _is_dense(obj):
            data = obj.detach().resolve_conj().resolve_neg().cpu().contiguous()
            from ranklab.basics.flat import as_bytes

            raw = as_bytes(data).numpy() if data.numel() else b""
            keeps_grad = obj.requires_grad and obj.is_leaf  # an inner node's graph stays behind
            return _tensor, (pickle.PickleBuffer(raw), obj.dtype, tuple(obj.shape), keeps_grad)
        if isinstance(obj, types.ModuleType) and sys.modules.get(obj.__name__) is obj:
            # By name, even odd ones like torch.ops: cloudpickle also takes submodules whose names
            # occur in a function, and would try to pickle their content.
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _require_grad(tensor, needed):
    return tensor.requires_grad_(needed)


def _is_dense(tensor):
    import torch

    return tensor.layout == torch.strided and not tensor.is_quantized


def _tensor(raw, dtype, shape, requires_grad):
    import torch

    if len(raw) == 0:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    # Without a writable buffer torch would warn that the tensor must not be changed.
    flat = torch.frombuffer(raw if isinstance(raw, bytearray) else bytearray(raw), dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)


def dumps(obj) -> bytes:
    """Pickle `obj`: functions and classes of `__main__` by value, tensors on the CPU."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(obj)
    return buffer.getvalue()


def dumps_call(fn, args) -> bytes:
    """Pickle the call.

    Raises: TypeError that names the part that can't be sent.
    """
    try:
        return dumps((fn, args))
    except Exception as error:
        parts = {"the function": fn} | {f"argument {i}": a for i, a in enumerate(args, start=1)}
        raise what_stays(parts) or TypeError(
            f"launch: the call can't be sent to the ranks: {error}") from None


def what_stays(parts):
    """Return a TypeError that names the first of {name: value} that can't be sent, or None."""
    for name, part in parts.items():
        try:
            dumps(part)
        except Exception as cause:
            return TypeError(f"launch: {name} can't be sent to the ranks: {cause}")
    return None


loads = pickle.loads


def values(pickled):
    """Unpickle what the ranks returned, within OPEN_LIMIT.

    Raises: TypeError that names the rank; TimeoutError.
    """
    results, errors = [], []

    def open_all():
        try:
            for value in pickled:
                results.append(loads(value))
        except BaseException as error:
            errors.append(error)

    # In a thread, which can be abandoned: unpickling a value may run any code of its class.
    thread = threading.Thread(target=open_all, daemon=True)
    thread.start()
    thread.join(OPEN_LIMIT)
    if thread.is_alive():
        raise TimeoutError(f"launch: the value of rank {len(results)} could not be opened within "
                           f"{OPEN_LIMIT:g} s")
    if errors:
        raise TypeError(
            f"launch: the value of rank {len(results)} can't be opened outside of its rank: "
            f"{errors[0]}; return what it holds, say a state_dict() or numbers") from None
    return results


def scratch_file():
    """Make an unnamed file to pass large things through, by its descriptor; in memory on Linux."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("ranklab"), "w+b")
    return tempfile.TemporaryFile()


@contextlib.contextmanager
def shared_file():
    """Yield an empty file, in memory on Linux.

    Its descriptor is enough to open it again (path_of).
    """
    if hasattr(os, "memfd_create"):
        with scratch_file() as file:
            yield file
    else:
        with tempfile.TemporaryDirectory(prefix="ranklab-") as folder:
            with open(f"{folder}/shared", "w+b") as file:
                yield file


def path_of(fd):
    """Return a path by which this process opens a descriptor's file again, with its own locks."""
    if sys.platform == "linux":
        return f"/proc/self/fd/{fd}"
    import fcntl  # missing on Windows, where launch itself reports that

    return fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()  # macOS


def opened(fd):
    """Map the descriptor's file into memory, to be read from its start.

    The descriptor's offset, which ranks share, does not move.
    """
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
