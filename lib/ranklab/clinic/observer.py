"""Observer: record a rank's ops from one optimizer step to the next. hooks.py attaches it."""

import ast
import functools
import itertools
import linecache
import math
import sys
import weakref

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from ranklab.clinic.digests import digest_of, has_numbers, plain
from ranklab.clinic.trace import Call, Lines, Loss
from ranklab.meter.ops import NAMESPACES, read_ops
from ranklab.meter.storage import tensors_in
from ranklab.meter.watcher import Watcher

INPUTS = "input_tensor", "inputs", "input", "input_tensors"  # torch's names for a rank's input
MESSAGES = ("send", "recv")
FLAT = "_allgather_base_", "all_gather_into_tensor", "allgather_into_tensor_coalesced_"
MASKS = 16  # of a step
WORD = 40  # characters of a string that may name what is reduced
ATTENTION = "_scaled_dot_product_flash_attention"  # torch counts its FLOPs only on GPUs
FLOPS = flop_registry | {
    getattr(torch.ops.aten, f"{ATTENTION}_for_cpu{way}"):
        flop_registry[getattr(torch.ops.aten, ATTENTION + way)] for way in ("", "_backward")}
SMALLEST = 16  # numbers of a mask: two of that size are not equal by chance; and of a gradient
NOT_THE_PROGRAM = ("torch.", "contextlib", "threading", "ranklab.clinic.observer",
                   "ranklab.clinic.hooks", "ranklab.clinic.wrappers", "ranklab.engine",
                   "ranklab.meter")


def quiet(method):
    """Wrap a method of an observer so that its errors never stop the program.

    The errors are recorded, for the report.
    """
    @functools.wraps(method)
    def call(observer, *args):
        try:
            return method(observer, *args)
        except Exception as error:  # any error here is ours
            observer.fail(error)

    return call


class Observer:
    """Watch the computation of this thread and of backward, and record what they send."""

    def __init__(self, folder, rank):
        self.lines = Lines(folder, rank)
        self.optimizers, self.steps, self.pending = [], 0, []
        self.in_flight = []  # (its Work, Span, name, line) of each tensor given to a collective
        self.order, self.next_number = weakref.WeakKeyDictionary(), itertools.count()
        self.everyone = dist.group.WORLD.group_name
        self.numbers, self.groups = {}, set()  # of calls in each group
        self.reduction = None  # of the torch.distributed function that is running
        self.numel, self.spans = 0, []  # count and memory of this rank's input to that function
        self.in_backward, self.accumulates, self.is_half = False, False, False
        self.alive, self.validated = {}, {}
        self.failures, self.step = set(), None
        self.passes = {}  # sampler -> (epoch, whether it shuffles), until a model has its examples
        self.model = None
        self.look_of = {}  # op -> the method that looks at it, or None
        self.begin_step()
        Watcher(self, self.after_op, self.before_op).__enter__()

    def begin_step(self):
        """Forget the previous step, and observe the next one."""
        self.backwards, self.flops, self.largest = 0, 0, 0.0
        self.losses, self.values, self.rows, self.masks, self.sums = [], [], [], [], []
        self.local, self.begins = [{}], []  # of each backward: {id of a parameter: dot}
        self.embed, self.scattered = set(), {}
        self.fresh = {}  # storage of a mask -> its place in masks
        self.places, self.clip, self.unscale = None, 1.0, 1.0
        self.norms, self.twins, self.nll_calls = [], [], 0  # losses before their log_softmax

    def fail(self, error):
        """Record an observer's error, once for each kind of error."""
        if (kind := f"{type(error).__name__}: {error}"[:200]) not in self.failures:
            self.failures.add(kind)
            self.lines.write("failure", kind)

    def number_of(self, optimizer):
        """Return the number of an optimizer, which stays the same."""
        if optimizer not in self.order:
            self.order[optimizer] = next(self.next_number)
        return self.order[optimizer]

    def parameters(self):
        """Return the parameters of all optimizers, each once."""
        self.optimizers = [reference for reference in self.optimizers if reference()]
        by_id = {id(p): p for reference in self.optimizers for group in reference().param_groups
                 for p in group["params"]}
        return list(by_id.values())

    # --- before an op -----------------------------------------------------------------------------

    @quiet
    def before_op(self, func, args, kwargs):
        if func.namespace in NAMESPACES:
            for op in read_ops(func, args, kwargs):
                self._write_call(op, func, args, kwargs)

    def _write_call(self, op, func, args, kwargs):
        arguments = dict(zip((one.name for one in func._schema.arguments), args)) | kwargs
        group = self._group(arguments, op)
        first = next((arguments[name] for name in INPUTS if name in arguments),
                     next(iter(arguments.values())))
        is_message = op.name in MESSAGES
        tensors = [] if is_message else tensors_in(first)
        self.numbers[group] = self.numbers.get(group, -1) + (not is_message)
        reduces = "reduce" in op.name
        is_one = sum(tensor.numel() for tensor in tensors) == 1
        is_flat = op.name == "all_gather" and func._schema.name.endswith(FLAT)
        call = Call(-1 if is_message else self.numbers[group], group,
                    "all_gather_into_tensor" if is_flat else op.name,
                    (self.reduction or "SUM") if reduces else "",
                    arguments.get("root_rank", op.peer), line_of_program(),
                    self.steps, self.backwards, self.in_backward,
                    self._parameter_name(tensors[0]) if tensors else "", digest_of(*tensors),
                    self._norm() if is_one and reduces else 0.0,
                    {} if self.in_backward else words_of_program())
        self.lines.write("call", *call)
        self.numel = call.digest.numel
        self.spans = [(Span(tensor), call.tensor or f"{op.name}'s tensor") for tensor in tensors
                      if has_numbers(tensor)]
        if op.name == "reduce_scatter" and not self.in_backward:
            out = next((arguments[name] for name in arguments if name.startswith("out")), ())
            self.scattered |= {place(tensor): [] for tensor in tensors_in(out)}

    def _group(self, arguments, op):
        handle = arguments.get("process_group", arguments.get("group_name"))
        if isinstance(handle, torch.ScriptObject):
            handle = dist.ProcessGroup.unbox(handle)
        name = getattr(handle, "group_name", handle)
        if name not in self.groups:
            self.groups.add(name)
            self.lines.write("group", name, op.group)
        return name

    def _parameter_name(self, tensor):
        if self.places is None:
            self.places = {address_of(x): (kind, number, p)
                           for number, p in enumerate(self.parameters())
                           for kind, x in (("weight", p), ("gradient", p.grad))}
        address = address_of(tensor)
        kind, number, p = self.places.get(address, ("", 0, None))
        current = p.grad if kind == "gradient" else p  # a freed tensor's memory may be reused
        return f"{kind} {number}" if address and address_of(current) == address else ""

    def _norm(self):
        return math.hypot(*(plain(p.grad).double().norm().item() for p in self.parameters()
                            if p.grad is not None))

    # --- after an op ------------------------------------------------------------------------------

    @quiet
    def after_op(self, func, args, kwargs, result):
        packet = getattr(func, "_overloadpacket", func)  # flex_attention has none
        if packet in FLOPS and (self.in_backward or torch.is_grad_enabled()):  # else: validation
            self.flops += FLOPS[packet](*args, **kwargs, out_val=result)
        if packet not in self.look_of:
            self.look_of[packet] = getattr(self, f"_look_{packet.__name__}", None)
        look = self.look_of[packet]
        if look and all(has_numbers(x) for x in args[:2] if isinstance(x, torch.Tensor)):
            look(args, result)
        if self.in_flight and func.namespace == "aten" and packet.__name__.endswith("_"):
            self._look_for_changes(tensors_in(args[0]))
        for tensor in (result,) if isinstance(result, torch.Tensor) else (
                result if isinstance(result, (tuple, list)) else ()):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                if tensor.dtype is torch.float16 and not self.is_half:
                    self.is_half = True
                    self.lines.write("half")
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def bytes_alive(self):
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self.alive.values())

    def _look_for_changes(self, tensors):
        """Record whether an in-place op on these tensors changes one that a collective still reads.
        """
        self.in_flight = [entry for entry in self.in_flight if entry[0]() and entry[1].is_there()]
        spans = [Span(tensor) for tensor in tensors if has_numbers(tensor)]
        for entry in [entry for entry in self.in_flight
                      if any(entry[1].overlaps(span) for span in spans)]:
            self.lines.write("change", *entry[2:], line_of_program())
            self.in_flight.remove(entry)

    # --- ops that are recorded, by their names in aten --------------------------------------------

    def _look_nll_loss_backward(self, args, result):
        gradient, _, targets, weight, reduction, ignored, *_ = args
        self.nll_calls += 1
        if weight is None:  # all classes have equal weight
            self._loss(gradient, targets, reduction, (targets != ignored).sum().item())

    def _look__log_softmax_backward_data(self, args, result):
        """Record a loss computed from log_softmax by the program; row sums are targets' weights."""
        if self.nll_calls:  # nll_loss_backward has been here
            self.nll_calls -= 1
        elif args[0].dim():
            gradient, dim = plain(args[0]), args[2]
            self._loss(-gradient.sum(dim), gradient.abs().argmax(dim), 0, 0)

    _look_nll_loss2d_backward = _look_nll_loss_backward

    def _look_mse_loss_backward(self, args, result):
        gradient, _, targets, reduction = args
        self._loss(gradient, targets, reduction, targets.numel())

    def _loss(self, gradient, targets, reduction, count):
        if reduction:  # a mean (1) or a sum (2)
            weight = gradient.item() / (max(count, 1) if reduction == 1 else 1)
        else:  # one number for each target, or for each that a mask keeps
            weights = plain(gradient)[plain(gradient) != 0].double()
            count, weight = weights.numel(), weights.mean().item() if weights.numel() else 0.0
            if weight <= 0 or (weights - weight).abs().max() > 1e-3 * weight:
                return  # the targets have different weights on purpose
        self.losses.append(Loss(count, weight, digest_of(targets).bits))

    def _look_embedding(self, args, result):
        self.embed.add(address_of(args[0]))

    def _look_bernoulli_(self, args, result):
        """Record a dropout mask, on a CPU; the next product shows the tensor it is applied to."""
        if torch.is_grad_enabled() and len(self.masks) < MASKS and result.numel() >= SMALLEST:
            self.fresh[place(result)] = len(self.masks)
            self.masks.append([digest_of(result != 0).bits, None])

    def _look_mul(self, args, result):
        for mask, factor in (args, args[::-1]) if self.fresh else ():
            if isinstance(mask, torch.Tensor) and isinstance(factor, torch.Tensor):
                number = self.fresh.pop(place(mask), None)
                if number is not None:
                    self.masks[number][1] = digest_of(factor).bits

    def _look_native_dropout(self, args, result):
        if len(self.masks) < MASKS and result[1].numel() >= SMALLEST:
            self.masks.append([digest_of(result[1]).bits, digest_of(args[0]).bits])

    def _look_native_batch_norm(self, args, result):
        """Record the statistics that it uses in eval(), at most a hundred times a step."""
        count = self.validated[self.steps] = self.validated.get(self.steps, 0) + (not args[5])
        if not args[5] and args[3] is not None and count <= 100:
            mean = digest_of(args[3])
            self.lines.write("norm", f"{self.steps}, {count}", mean.bits, mean.norm)

    _look_cudnn_batch_norm = _look__native_batch_norm_legit = _look_native_batch_norm

    def _look_div_(self, args, result):
        self._scaled(args, -1)

    def _look_mul_(self, args, result):
        self._scaled(args, 1)

    def _look__foreach_mul_(self, args, result):
        if isinstance(args[1], torch.Tensor) and (
                self._parameter_name(args[0][0]).startswith("gradient")):
            self.clip = args[1].item()  # as torch's clipping does
        self._scaled(args, 1)

    _look__foreach_div_ = _look_div_

    def _scaled(self, args, power):
        """Record the factor by which the result of a reduce_scatter is multiplied."""
        for tensor in tensors_in(args[0]) if self.scattered else ():
            if place(tensor) in self.scattered:
                factor = args[1] if len(args) > 1 else math.nan
                is_number = not isinstance(factor, (torch.Tensor, list)) or (
                    isinstance(factor, torch.Tensor) and factor.numel() == 1)
                self.scattered[place(tensor)].append(
                    float(factor)**power if is_number else math.nan)

    def _look__amp_foreach_non_finite_check_and_unscale_(self, args, result):
        self.unscale = args[2].item()

    def _look_copy_(self, args, result):
        if self.scattered and self.reduction is None:  # else it is gloo's own division
            self.scattered.pop(place(args[0]), None)


def address_of(tensor):
    """Return the address of the tensor's first number; None if it has no numbers."""
    return plain(tensor).data_ptr() if tensor is not None and has_numbers(tensor) else None


def place(tensor):
    """Return the start of the tensor's storage, the same for its views; None if it has no numbers.
    """
    return plain(tensor).untyped_storage().data_ptr() if has_numbers(tensor) else None


class Span:
    """The memory of a tensor's numbers, as long as it exists."""

    def __init__(self, tensor):
        flat = plain(tensor)
        self.start = flat.data_ptr()
        self.end = self.start + flat.numel() * flat.element_size()
        self.storage = StorageWeakRef(flat.untyped_storage())

    def is_there(self):
        return not self.storage.expired()

    def overlaps(self, other):
        return self.start < other.end and other.start < self.end


def line_of_program():
    """Return the line of the program that led to this call: "train.py:31"."""
    frame = _frame_of_program()
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}" if frame else "?"


def words_of_program():
    """Return the string variables of the program's loops around the line of this call:
    {"name": "wiki"}. No other variable is read: it might be a password.
    """
    frame = _frame_of_program()
    names = [name for first, last, names in _loops_of(frame.f_code.co_filename)
             if first <= frame.f_lineno <= last for name in names] if frame else ()
    words = {name: frame.f_locals.get(name) for name in names}
    return {name: word[:WORD] for name, word in words.items() if type(word) is str}


@functools.lru_cache(None)
def _loops_of(filename):
    """List (first line, last line, names that it sets) for each loop or comprehension in the file.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # for example, a notebook's magic
        return []
    return [(node.lineno, node.end_lineno,
             [name.id for target in _targets(node) for name in ast.walk(target)
              if isinstance(name, ast.Name)])
            for node in ast.walk(tree) if _targets(node)]


def _targets(node):
    """List the targets of a for loop or of a comprehension, else []."""
    each = [node] if isinstance(node, (ast.For, ast.AsyncFor)) else getattr(node, "generators", [])
    return [loop.target for loop in each]


def _frame_of_program():
    frame = sys._getframe(2)
    while frame and (frame.f_globals.get("__name__") or "").startswith(NOT_THE_PROGRAM):
        frame = frame.f_back
    return frame
