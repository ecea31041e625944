"""The check of replicas_agree: a replica that has drifted away is found out, on every rank."""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.data_parallel.events import Sent
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import group_of_mine, on_ranks, rank_name
from ranklab.engine import device
from ranklab.meter import Traffic


class Weights(nn.Module):
    """Two equal layers, a precise and a frozen one; one number is NaN, on all ranks alike."""

    def __init__(self, width=40):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.precise = nn.Linear(4, 4).double()
        self.frozen = nn.Linear(width, width).bfloat16().requires_grad_(False)  # numpy has none
        self.register_buffer("statistics", torch.zeros(width))
        with torch.no_grad():
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


# what is done to one rank's model -> a hint for whoever does not see it
CHANGES = {
    "nothing": (lambda model: None, ""),
    "one weight is larger by 1": (
        lambda model: model.a.weight.data[3, 3].add_(1), "Look at all parameters. And all are "
        "equal when the largest hash is the smallest: MAX of [mine, -mine] brings both."),
    "one bit of the last trained layer": (
        lambda model: model.b.weight.data.view(torch.int32)[3, 4].bitwise_xor_(1), "Hash the "
        "bytes, of all parameters: a sum in floating point rounds it away."),
    "one frozen weight": (
        lambda model: model.frozen.bias.data[0].add_(1), "Frozen parameters are weights too."),
    "one weight plus 0.25, another minus 0.25": (
        _add_and_subtract, "A sum does not see it. Hash the bytes."),
    "two weights have changed places": (
        _swap_numbers, "A sum, a norm, a maximum do not see it: what you hash must know places."),
    "two layers have changed places": (
        _swap_layers, "One hash over all parameters in their order, not a sum of their hashes."),
    "the last bit of a float64": (
        lambda model: model.precise.bias.data.view(torch.int64)[0].bitwise_xor_(1), "Hash the "
        "bytes as they are: in float32 a float64 loses half of its bits."),
}


def _agree_trial(replicas_agree, in_groups=False):
    """(name of the change, the answer, what was sent, whether the weights are as before), ..."""
    rank, R, seen = dist.get_rank(), dist.get_world_size(), []
    group = {"group": group_of_mine()} if in_groups else {}
    for number, (name, (change, _)) in enumerate(CHANGES.items()):
        model = Weights().to(device())
        if rank == (3 if in_groups else (number - 1) % R):  # another rank each time
            change(model)
        model.statistics += rank  # buffers may differ
        before = [p.detach().nan_to_num() for p in model.parameters()]
        with Traffic() as traffic, Sent() as sent:
            value = replicas_agree(model, **group)
        same = all(torch.equal(p.nan_to_num(), b) for p, b in zip(model.parameters(), before))
        seen.append((name, value, (sum(op.payload_bytes for op in traffic.ops),
                                   dict(traffic.calls),
                                   [(x.dtype, x.numel()) for x in sent.tensors]), same))
    return seen


def check_replicas_agree(replicas_agree):
    for ranks in (1, 3, 4):
        with hinted({"TypeError: Got unsupported ScalarType BFloat16":
                     "numpy knows no bfloat16, and the frozen layer is in it: look at the bytes, "
                     "by .view(torch.uint8)."}):
            seen = on_ranks(_agree_trial, replicas_agree, ranks=ranks)
        for case in zip(*seen):
            _compare_verdicts(case, ranks)
    yield "True where all ranks hold the same bits (NaN too), on 1, 3, 4 ranks"
    yield ("False, on every rank, for one bit, one frozen weight, two weights or layers that "
           "changed places")
    for rank, of_rank in enumerate(seen):
        for _, _, sent, same in of_rank:
            _compare_sent(rank_name(rank, 4), *sent)
            if not same:
                raise Mistake("the weights have changed", "Look, and do not touch.")
    yield "one all-reduce of two int64 travels, not the weights; the model is unchanged"
    for case in zip(*on_ranks(_agree_trial, replicas_agree, True, ranks=4)):
        values, alike = [bool(value) for _, value, *_ in case], case[0][0] == "nothing"
        if values != [True, alike, alike, alike]:
            raise Mistake("in two groups, rank 0 alone and ranks 1, 2, 3, where one bit or more of "
                          f"rank 3 may differ, the answers are {values}",
                          "Each group answers for itself: hand `group` on.")
    yield "a group answers for itself"


def _compare_sent(where, sent, calls, all_reduced):
    if sent > 256:
        nbytes = sum(p.nbytes for p in Weights().parameters())
        raise Mistake(f"{where} puts {sent:,} bytes into collectives, for a model of {nbytes:,} "
                      "bytes; 16 are enough",
                      "Let each rank make a short hash of its own weights, and send that.")
    if calls != {"all_reduce": 1}:
        raise Mistake(f"{where} calls {calls}; one all-reduce is enough", "The largest and the "
                      "smallest can travel together: MAX of [mine, -mine].")
    (dtype, count), = all_reduced or [(None, 2)]
    if dtype not in (torch.int64, None):
        raise Mistake(f"{where} sends its hash in {dtype}", "float32 keeps 24 of the 56 bits, "
                      "float64 53: torch.tensor([mine, -mine], device=device), of two ints, is an "
                      "int64 and keeps all.")
    if count > 2:
        raise Mistake(f"{where} sends {count} numbers; two are enough", "[mine, -mine]")


def _compare_verdicts(case, ranks):
    name, values = case[0][0], [value for _, value, _, _ in case]
    for value in values:
        if not isinstance(value, bool):
            raise Mistake(f"it returned {value!r}", "Return True or False, on every rank: "
                          "bool(...) or .item() makes one of a tensor.")
    right = name == "nothing" or ranks == 1
    if values == [right] * ranks:
        return
    if len(set(values)) > 1:
        raise Mistake(f"on {ranks} ranks, {name}: the answers are {values}",
                      "Every rank must come to the same answer, or one stops and the others wait "
                      "for it: compare the largest hash with the smallest, and both come by "
                      "all-reduce.")
    noted = case[0][2][2]
    if right and noted[:1] == [(torch.int64, 2)]:
        raise Mistake("it says False where the weights are the same", "The second number "
                      "comes back as the largest of -mine; the smallest hash is minus that. And "
                      "buffers may differ, and do here: hash model.parameters() only.")
    if ranks == 1:
        raise Mistake("one rank alone: it says False", "One of the weights is NaN, and NaN is not "
                      "equal to itself: compare bytes, not numbers.")
    if right:
        raise Mistake(f"on {ranks} ranks with the same weights it says False",
                      "Only a buffer differs here, and may: batch norm's statistics do, between "
                      "two forwards. Look at model.parameters().")
    raise Mistake(f"on {ranks} ranks it says True, though on one of them there is a difference: "
                  f"{name}", CHANGES[name][1])
