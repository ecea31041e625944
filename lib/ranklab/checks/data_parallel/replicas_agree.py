"""The check of replicas_agree: a replica that has drifted is detected on every rank."""

import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.data_parallel.sent import OUTSIDE, Sent
from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.checks.trial import gathered
from ranklab.data_parallel import replicas_agree
from ranklab.engine import device


class Weights(nn.Module):
    """Two equal layers, a float64 and a frozen one; one number is NaN, the same on all ranks."""

    def __init__(self, width=40):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.precise = nn.Linear(4, 4).double()
        self.frozen = nn.Linear(width, width).bfloat16().requires_grad_(False)  # numpy has none
        self.register_buffer("statistics", torch.zeros(width))
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):  # equal bits on every kind of CPU
                p.copy_(torch.arange(p.numel()).remainder(89 + number).view(p.shape) / 64)
            self.b.bias[0] = float("nan")
            self.a.weight[:2] = 0.0


def _swap_numbers(model):
    w = model.a.weight.data
    w[3, 0], w[5, 7] = w[5, 7].item(), w[3, 0].item()


def _swap_layers(model):
    model.a, model.b = model.b, model.a


def _add_and_subtract(model):
    model.a.weight.data[0, 0] += 0.25
    model.a.weight.data[1, 1] -= 0.25


CHANGES = {  # what is done to one rank's model
    "no weight differs": lambda model: None,
    "one weight is larger by 1": lambda model: model.a.weight.data[3, 3].add_(1),
    "one bit of the last trained layer is flipped":
    lambda model: model.b.weight.data.view(torch.int32)[3, 4].bitwise_xor_(1),
    "one frozen weight is larger by 1": lambda model: model.frozen.bias.data[0].add_(1),
    "one weight grew by 0.25, another shrank by 0.25": _add_and_subtract,
    "two weights have changed places": _swap_numbers,
    "two layers have changed places": _swap_layers,
    "the last bit of a float64 is flipped":
    lambda model: model.precise.bias.data.view(torch.int64)[0].bitwise_xor_(1),
}


class Case(NamedTuple):
    change: str

    def __str__(self):
        return f"on one rank {self.change}" if "differs" not in self.change else self.change


CASES = tuple(map(Case, CHANGES))
TYPE, NANS, DTYPE = ("the type of the answer", "NaN in what it sends",
                     "the type of the numbers that it sends")
ASKS = "whether it asks the other ranks"
SENT, CALLS, OTHERS, NUMBERS = ("bytes in collectives", "collectives", "what it calls besides "
                                "all_reduce", "the number of numbers that it sends")


def _see(fn, case, ranks):
    model, number = Weights().to(device()), CASES.index(case)
    if ranks.index == number % ranks.size:  # another rank each time
        CHANGES[case.change](model)
    model.statistics += dist.get_rank()  # buffers may differ
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Sent() as sent:
        answer = fn(model, **ranks.keywords)
    ops, calls = sent.traffic.ops, sent.traffic.calls
    tensor = sent.tensors[0] if sent.tensors else torch.zeros(2, dtype=torch.int64)
    changed = [name for name, p in model.named_parameters()
               if not torch.equal(p.nan_to_num(), before[name].nan_to_num())]
    yield {TYPE: Must(type(answer).__name__, "bool"),
           NANS: AtMost(sum(int(each.isnan().sum()) for each in sent.tensors), 0),
           DTYPE: Must(str(tensor.dtype), "torch.int64"),
           ASKS: Must(bool(ops) or ranks.size == 1, True),
           "the answer": bool(answer),
           SENT: AtMost(sum(op.payload_bytes for op in ops), 256, "puts {:,.0f} bytes into "
                        "collectives; 16 are enough"),
           CALLS: AtMost(len(ops), 1), OTHERS: Must(sorted({*calls} - {"all_reduce"}), []),
           NUMBERS: Must(tensor.numel(), 2),
           "the weights that have changed": Must(changed, []),
           } | {OUTSIDE: sent.ended(ranks)[OUTSIDE]}


def by_gathering(model, group=None):
    own = [p.detach().contiguous().view(-1).view(torch.uint8).cpu() for p in model.parameters()]
    return all(torch.equal(*pair) for peer in gathered(own, group)
               for pair in zip(own, peer, strict=True))


def gathers_the_model(model, group=None):
    own = torch.cat([p.detach().view(-1).view(torch.uint8) for p in model.parameters()])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return all(torch.equal(each, every[0]) for each in every)


HASH = 'int.from_bytes(digest.digest(), "big")'
EACH = "p.detach().view(-1).view(torch.uint8)"
NAMED = "model.named_parameters()"
CALL = "dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)"
DEVICE, PAIR = "device = parameter.device", "[number, -number]"
AGREE = Proof(
    replicas_agree,
    Stage({"True where all ranks hold the same bits (NaN too), on 1, 2, 3, 4 ranks": (),
           "False, on every rank, for one bit, one frozen weight, two weights or layers that "
           "changed places": (),
           "one all-reduce of two int64 travels, not the weights; the model is unchanged":
           (SENT, CALLS, OTHERS, NUMBERS, "the weights that have changed"),
           "a group answers for itself": (OUTSIDE,)},
          _see, CASES, (4,), (ALL, *GROUPS), oracle=by_gathering),
    mistakes=(
        Slip("One of the weights is NaN, and NaN is not equal to itself: compare bytes, not "
             "numbers.", (HASH, "sum(p.sum().item() for p in model.parameters())")),
        Slip("A sum of the bytes ignores which weight is where: hash the bytes in order.",
             (HASH, f"sum({EACH}.sum().item() for p in model.parameters())")),
        Slip("A sum of the weights misses changes that cancel out: hash the bytes.",
             (HASH, "round(2**40 * sum(p.double().nan_to_num().sum().item() "
              "for p in model.parameters()))")),
        Slip("Hash the bytes of all parameters: a floating-point sum rounds away a single bit.",
             (HASH, "round(2**20 * sum(p.double().nan_to_num().sum().item() "
              "for p in model.parameters()))")),
        Slip("Make one hash over all parameters in order, not a sum of their hashes.",
             (HASH, f"sum(zlib.crc32({EACH}.numpy()) for p in model.parameters())"), zlib=zlib),
        Slip("Frozen parameters are weights too.",
             (DEVICE, f"{DEVICE}\n        if not parameter.requires_grad:\n            continue")),
        Slip("Hash all parameters: this hash covers only the last one.",
             (NAMED, f"list({NAMED})[-1:]"), (DEVICE, f"{DEVICE}\n        "
                                              "digest = hashlib.blake2b(digest_size=7)")),
        Slip("Hash the bytes as they are: a float64 converted to float32 loses half of its bits.",
             ("parameter.detach()", "parameter.detach().float()")),
        Slip("numpy has no bfloat16, the dtype of the frozen layer: get the bytes with "
             ".view(torch.uint8).", (".view(torch.uint8)", "")),
        Slip("Only a buffer differs here, which is allowed: hash only model.parameters().",
             (NAMED, f"[*{NAMED}, *model.named_buffers()]"),
             (NAMED, "model.state_dict().items()")),
        Slip("float32 keeps 24 of the 56 bits, and float64 53. From two ints, "
             "torch.tensor([number, -number], device=device) is an int64 tensor and keeps them "
             "all.",
             (PAIR, "[float(number), -float(number)]")),
        Slip("Return True when all ranks agree: the largest hash == the smallest.",
             ("largest == smallest", "largest != smallest")),
        Slip("Of the two numbers that come back, one is a hash and the other is minus a hash: flip "
             "its sign before you compare.", ("-extremes[1]", "extremes[1]"),
             ("ReduceOp.MAX", "ReduceOp.MIN", "-extremes[1]", "extremes[1]")),
        Slip("Every rank must reach the same answer; otherwise one stops while the others wait for "
             "it. Compare the largest hash with the smallest, both from the all-reduce.",
             ("return largest == smallest", "return largest == number"),
             ("return largest == smallest", "return smallest == number")),
        Slip("Each rank must send its hash: all-reduce [number, -number] with MAX.",
             (f"    {CALL}\n", "")),
        Slip("Return True or False, not a tensor: use bool(...) or .item().",
             ("extremes[0].item(), -extremes[1].item()", "extremes[0], -extremes[1]")),
        Slip("The largest and the smallest can share one all-reduce: MAX of [number, -number].",
             (CALL, "for each in extremes.split(1):\n        "
              "dist.all_reduce(each, dist.ReduceOp.MAX, group=group)")),
        Slip("Pass `group` to the all-reduce.", ("MAX, group=group", "MAX")),
        Slip("Let each rank hash its own weights, and send the short hash, not the weights.",
             gathers_the_model),
        Slip("Only read the weights: in-place methods such as add_() write into them.",
             (DEVICE, f"{DEVICE}\n        parameter.detach().mul_(2)")),
    ), hints=(
        "Each rank turns all its weights into one short number. When are all the numbers equal?",
        "Use hashlib.blake2b(digest_size=7) over the bytes of every parameter: 56 bits, which fit "
        "into an int64. All are equal when the largest equals the smallest; the smallest is minus "
        "the largest of the negatives.",
        "extremes = torch.tensor([number, -number], device=device); dist.all_reduce(extremes, "
        "dist.ReduceOp.MAX, group=group); return extremes[0].item() == -extremes[1].item()",
    ))
