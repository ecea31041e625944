"""The check of replicas_agree: a replica that has drifted away is found out, on every rank."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.beside import expect, on_groups
from ranklab.checks.data_parallel.sent import Sent
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


FAILURES = {"TypeError: Got unsupported ScalarType BFloat16": "numpy knows no bfloat16, and the "
            "frozen layer is in it: look at the bytes, by .view(torch.uint8)."}
# what is done to one rank's model: (the change, a hint where it is not seen)
CHANGES = {
    "no change": (lambda model: None, "Only a buffer differs here, and that is allowed: hash "
                  "model.parameters() only. And the second number comes back as the largest of "
                  "-number: the smallest hash is minus that."),
    "one weight is larger by 1": (
        lambda model: model.a.weight.data[3, 3].add_(1), "Look at all parameters. And all are "
        "equal when the largest hash is the smallest: MAX of [number, -number] brings both."),
    "one bit of the last trained layer is flipped": (
        lambda model: model.b.weight.data.view(torch.int32)[3, 4].bitwise_xor_(1), "Hash the "
        "bytes, of all parameters: a sum in floating point rounds it away."),
    "one frozen weight is larger by 1": (
        lambda model: model.frozen.bias.data[0].add_(1), "Frozen parameters are weights too."),
    "one weight grew by 0.25, another shrank by 0.25": (
        _add_and_subtract, "A sum does not see it. Hash the bytes."),
    "two weights have changed places": (
        _swap_numbers, "A sum, a norm or a maximum can't see it: your number must depend on which "
                       "weight is where."),
    "two layers have changed places": (
        _swap_layers, "One hash over all parameters in their order, not a sum of their hashes."),
    "the last bit of a float64 is flipped": (
        lambda model: model.precise.bias.data.view(torch.int64)[0].bitwise_xor_(1), "Hash the "
        "bytes as they are: in float32 a float64 loses half of its bits."),
}


def _trial(replicas_agree, ranks):
    for number, (name, (change, hint)) in enumerate(CHANGES.items()):
        model = Weights().to(device())
        if ranks.index == number % ranks.size:  # another rank each time
            change(model)
        model.statistics += dist.get_rank()  # buffers may differ
        before = [p.detach().nan_to_num() for p in model.parameters()]
        with Traffic() as traffic, Sent() as sent:
            value = replicas_agree(model, **ranks.keywords)
        answers = [value] * ranks.size
        dist.all_gather_object(answers, value, group=ranks.group)
        is_same = all(torch.equal(p.nan_to_num(), b) for p, b in zip(model.parameters(), before))
        yield partial(_look, f"{ranks}; on one rank: {name}", answers,
                      name == "no change" or ranks.size == 1, hint, traffic, sent.tensors, is_same)


def _look(where, answers, right, hint, traffic, tensors, is_same):
    sent, calls = sum(op.payload_bytes for op in traffic.ops), dict(traffic.calls)
    dtype, count = (tensors[0].dtype, tensors[0].numel()) if tensors else (torch.int64, 2)
    for is_so, what, hint in (
        (all(isinstance(value, bool) for value in answers), f"it returns {answers[0]!r}", "Return "
         "True or False, on every rank: bool(...) or .item() makes one of a tensor."),
        (not any(tensor.isnan().any() for tensor in tensors), "it sends NaN", "One of the weights "
         "is NaN, and NaN is not equal to itself: compare bytes, not numbers."),
        (len({*answers}) == 1, f"the answers are {answers}", "Every rank must come to the same "
         "answer, or one stops and the others wait for it: compare the largest hash with the "
         "smallest, and both come by all-reduce."),
        (answers[0] == right, f"it says {answers[0]}", hint),
        (sent <= 256, f"{sent:,} bytes go into collectives; 16 are enough", "Let each rank make a "
         "short hash of its own weights, and send that."),
        (calls == {"all_reduce": 1}, f"{calls} are called; one all-reduce is enough", "The largest "
         "and the smallest can travel together: MAX of [number, -number]."),
        ((dtype, count) == (torch.int64, 2), f"{count} numbers travel, in {dtype}", "float32 keeps "
         "24 of the 56 bits, float64 53: torch.tensor([number, -number], device=device), of two "
         "ints, is an int64 and keeps all."),
        (is_same, "the weights have changed", "Only read them."),
    ):
        expect(is_so, f"{where}: {what}", hint)


def check_replicas_agree(replicas_agree):
    on_groups(_trial, replicas_agree, failures=FAILURES)
    yield "True where all ranks hold the same bits (NaN too), on 1, 2, 3, 4 ranks"
    yield ("False, on every rank, for one bit, one frozen weight, two weights or layers that "
           "changed places")
    yield "one all-reduce of two int64 travels, not the weights; the model is unchanged"
    yield "a group answers for itself"
