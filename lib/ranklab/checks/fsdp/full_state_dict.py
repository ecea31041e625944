"""full_state_dict: compared with rows that are pickled and concatenated."""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.fsdp.shard_parameter import chunk_of
from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage, Told
from ranklab.checks.trial import gathered
from ranklab.checks.zero.toys import Toy, is_there, seeded
from ranklab.engine import device
from ranklab.fsdp import FullyShardedBlock, Precision, full_state_dict
from ranklab.fsdp.shards import sharded_modules, sharded_parameters
from ranklab.fsdp.state import gather_rows
from ranklab.meter import Traffic


class Case(NamedTuple):
    """root: whether the model is the last block; otherwise some parameters are in no block."""

    dtype: str
    root: bool

    def __str__(self):
        where = "all parameters in blocks" if self.root else "some parameters in no block"
        return f"a model in {self.dtype}, computing in bfloat16, {where}"

    def model(self):
        """Return a model that is tied, frozen and uneven, with buffers: one not in its state."""
        model = seeded(Toy, 0)
        model.counted = nn.BatchNorm1d(3)
        model.register_buffer("left_out", torch.ones(2), persistent=False)
        return model.to(device(), getattr(torch, self.dtype))


CASES = Case("float32", True), Case("float64", False)
KIND, MISSING, OTHERS = "what is returned", "names that are missing", ("names that should not be "
                                                                       "there")
WHOLE, PLACES = ("parameters that are whole afterwards",
                 "tensors that are not on the CPU, or have a graph")
MESSAGES, BYTES = "messages", "bytes that this rank sends"


def _see(fn, case, ranks):
    """Look at two calls. Between them the model changes, and the first state must not change."""
    model = case.model()
    before = {name: x.cpu().clone() for name, x in model.state_dict().items()}
    for module in (*model.blocks, *[model] * case.root):
        FullyShardedBlock(module, ranks.group, precision=Precision(torch.bfloat16))
    parameters = sharded_parameters(model).values()
    names = before if ranks.index == 0 else {}
    for turn in (0, 1):
        with Traffic() as traffic:
            state = fn(model)
        costs = {WHOLE: AtMost(sum(is_there(p.whole) for p in parameters), 0)}
        for tensor in (*(p.data for p in model.parameters()), *model.buffers()):
            tensor += 1
        kind, state = type(state).__name__, state if isinstance(state, dict) else {}
        tensors = [x for x in state.values() if isinstance(x, torch.Tensor)]
        yield costs | {
            KIND: kind, MISSING: Must(sorted(names.keys() - state.keys()), []),
            OTHERS: Must(sorted(state.keys() - names.keys()), []),
            **{f"`{name}`": Told(state.get(name), partial(_as_rounded, x + turn, ranks.size,
                                                          ranks.index))
               for name, x in before.items()},
            PLACES: AtMost(sum(x.requires_grad or not x.is_cpu for x in tensors), 0),
            MESSAGES: Must(len(traffic.ops), len(parameters)),
            BYTES: AtMost(traffic.sent_bytes, sum(p.numbers * p.shard.itemsize
                                                  for p in parameters))}


def _as_rounded(x, R, index, got, due):
    if not isinstance(got, torch.Tensor) or got.shape == x.shape and torch.equal(got, x):
        return ""
    if x.dim() and got.shape == chunk_of(x, R, index).shape != x.shape:
        return "this rank's rows alone"
    if got.shape == x.shape and torch.equal(got, x + 1):
        return "changed when the model changes afterwards"
    is_rounded = got.shape == x.shape and torch.equal(got.to(x), x.bfloat16().to(x))
    return "rounded to 16 bits" * is_rounded


def by_objects(model):
    state, group = {}, sharded_modules(model)[0].group
    own = model.state_dict(keep_vars=True)
    of_ranks = gathered({name: tensor.detach() for name, tensor in own.items()}, group)
    for name, tensor in own.items():
        rows = [of_rank[name] for of_rank in of_ranks]
        state[name] = torch.cat(rows) if tensor in sharded_parameters(model) else rows[0]
    return state if dist.get_rank(group) == 0 else {}


# --- mistakes -------------------------------------------------------------------------------------

def gather_everywhere(parameter, group):
    """Give every rank all rows, and the zeros at the end."""
    rows = parameter.padded_shard(parameter.shard.dtype)
    parts = [torch.empty_like(rows) for _ in range(parameter.ranks)]
    dist.all_gather(parts, rows, group=group)
    return torch.cat(parts).view(-1, *parameter.shape[1:]).cpu()


def gather_rounded(parameter, group):
    whole = parameter.shard
    parameter.shard = whole.detach().to(parameter.whole.dtype).to(whole)
    state = gather_rows(parameter, group)
    parameter.shard = whole
    return state


def what_computes(model):
    for block in sharded_modules(model):
        block.unshard()
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    for block in sharded_modules(model):
        block.reshard()
    return state if sharded_modules(model)[0].rank == 0 else {}


def what_computes_in_its_type(model):
    shards = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    return {name: tensor.to(shards[name]) for name, tensor in what_computes(model).items()}


def tied_twice(model):
    blocks = {p.shard: (p, block.group) for block in sharded_modules(model)
              for p in block.parameters}
    state = {name: gather_rows(*blocks[tensor]) if tensor in blocks
             else tensor.detach().cpu().clone()
             for name, tensor in model.state_dict(keep_vars=True).items()}
    return state if sharded_modules(model)[0].rank == 0 else {}


def own_rows(model):
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    return state if sharded_modules(model)[0].rank == 0 else {}


GATHER = "gather_rows(parameter, block.group)"
NAMES = "model.state_dict(keep_vars=True).items()"
PICK = "tensors[tensor] if tensor in tensors else "
REST = "tensor.detach().cpu().clone()"
FIRST = "state if sharded_modules(model)[0].rank == 0 else {}"
FREE = "for block in sharded_modules(model):\n        block.{}()\n    "
STATE = Proof(
    full_state_dict,
    Stage({"the whole state on the group's rank 0, {} on the others; on 4 ranks, and in groups of "
           "1 and 3": (),
           "a copy on the CPU; the model stays in shards": (WHOLE, PLACES),
           "each rank sends its rows once, in a message for each parameter": (MESSAGES, BYTES)},
          _see, CASES, (4,), (ALL, *GROUPS[:1]), oracle=by_objects),
    mistakes=(
        Slip("Only the group's rank 0 returns the state; all other ranks return {}.",
             (FIRST, "state")),
        Slip("The other ranks return {}, an empty dict.", (FIRST, FIRST.replace("{}", "None"))),
        Slip("Rank 0 means rank 0 of the group: use block.rank, or dist.get_rank(block.group).",
             (FIRST, "state if dist.get_rank() == 0 else {}")),
        Slip("Use gather_rows() or dist.gather(): an all-gather sends the rows to every rank, but "
             "only one needs them.",
             (GATHER, "gather_everywhere(parameter, block.group)[: len(parameter.whole)]"),
             gather_everywhere=gather_everywhere),
        Slip("The zeros at the end of the rows are padding, not part of the parameter.",
             (GATHER, "gather_everywhere(parameter, block.group)"),
             gather_everywhere=gather_everywhere),
        Slip("The whole tensor must have the parameter's shape: view(parameter.shape).",
             (GATHER, "tensors.get(0, gather_rows(parameter, block.group))\n"
              "            whole = tensors[parameter.shard]\n"
              "            tensors[parameter.shard] = None if whole is None else whole.flatten()")),
        Slip("Gather the shards in their own dtype, not in the compute dtype.",
             (GATHER, "gather_rounded(parameter, block.group)"), what_computes_in_its_type,
             gather_rounded=gather_rounded),
        Slip("The state must have the numbers and dtype of the shards: gather the shards, not the "
             "weights used for computing, and round nothing.", what_computes),
        Slip("A float64 tensor is returned as float32.",
             (FIRST, FIRST.replace("state if", "{name: x.float() if x.is_floating_point() else x "
                                               "for name, x in state.items()} if"))),
        Slip("A parameter in no block is already whole: copy it as it is.",
             (REST + "\n", f"None if tensor.requires_grad else {REST}\n"),
             ("        state[name] =", "        if tensor in tensors or not tensor.requires_grad:\n"
              "            state[name] =")),
        Slip("Pass block.group on to gather_rows().",
             (GATHER, GATHER.replace("block.group", "None"))),
        Slip("model.named_parameters() lists a tied parameter only once, and no buffers: take the "
             "names from model.state_dict(keep_vars=True).", (NAMES, "model.named_parameters()")),
        Slip("Buffers belong to the state: take the names from model.state_dict(keep_vars=True).",
             (NAMES, "model.named_parameters(remove_duplicate=False)")),
        Slip("A tied parameter has two names in model.state_dict(keep_vars=True), and must have "
             "both here.",
             (NAMES, "[*model.named_parameters(), *model.named_buffers()]"),
             (NAMES, f"{{tensor: (name, tensor) for name, tensor in {NAMES}}}.values()")),
        Slip("A non-persistent buffer does not belong in the state.",
             (NAMES, "[*model.named_parameters(remove_duplicate=False), *model.named_buffers()]")),
        Slip("These are only this rank's rows: gather the rows of every parameter. Take the names "
             "from model.state_dict(keep_vars=True): without keep_vars=True it returns detached "
             "tensors, which are not found among the shards.",
             (NAMES, "model.state_dict().items()"),
             own_rows),
        Slip("The parameters stay whole afterwards, and they do not all fit. Gather the rows of "
             "one at a time.", (f"return {FIRST}", f"{FREE.format('unshard')}return {FIRST}")),
        Slip("Copy buffers as well: tensor.detach().cpu().clone(). .cpu() alone may not make a "
             "copy.",
             (REST, "tensor"), (REST, "tensor.detach()"), (REST, "tensor.detach().cpu()")),
        Slip("Gather each parameter once, even if it has two names.", tied_twice),
        Slip("Gather the parameters of all blocks, including frozen ones.",
             ("block.parameters", "block.trained")),
        Slip("Gather the parameters of all blocks, including the root's.",
             ("for block in sharded_modules(model):", "for block in sharded_modules(model)[:-1]:")),
        Slip("All ranks must send their rows, even those that return {}.",
             ("    tensors, state", "    if sharded_modules(model)[0].rank:\n        return {}\n"
              "    tensors, state")),
    ), hints=(
        "Which names does the plain model have, and which tensor is behind each of them in the "
        "sharded one?",
        "model.state_dict(keep_vars=True) holds the shards themselves, so a dict from shard to "
        "whole tensor can look them up. All ranks gather each parameter; buffers are already "
        "whole.",
        "tensors = {parameter.shard: gather_rows(parameter, block.group) for block in "
        "sharded_modules(model) for parameter in block.parameters}; state[name] = tensors[tensor] "
        "if tensor in tensors else tensor.detach().cpu().clone(); {} unless the group's rank is 0",
    ))
