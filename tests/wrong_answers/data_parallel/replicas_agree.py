"""Wrong answers to replicas_agree."""

import zlib

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.data_parallel import replicas_agree

HASH = 'int.from_bytes(digest.digest(), "big")'
EACH = "p.detach().view(-1).view(torch.uint8)"
NAMED = "model.named_parameters()"
CALL = "dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)"

WRONG = [
    mutant(replicas_agree, HASH, "sum(p.sum().item() for p in model.parameters())",
           says="NaN is not equal to itself"),
    mutant(replicas_agree, HASH, f"sum({EACH}.sum().item() for p in model.parameters())",
           says="A sum, a norm or a maximum can't see it"),
    mutant(replicas_agree, HASH, "round(2**40 * sum(p.double().nan_to_num().sum().item() "
           "for p in model.parameters()))", says="A sum does not see it"),
    mutant(replicas_agree, HASH, "round(2**20 * sum(p.double().nan_to_num().sum().item() "
           "for p in model.parameters()))", says="a sum in floating point rounds it away"),
    mutant(replicas_agree, HASH, f"sum(zlib.crc32({EACH}.numpy()) for p in model.parameters())",
           says="not a sum of their hashes", zlib=zlib),
    mutant(replicas_agree, "device = parameter.device", "device = parameter.device\n"
           "        if not parameter.requires_grad:\n            continue",
           says="Frozen parameters are weights too"),
    mutant(replicas_agree, NAMED, f"list({NAMED})[-1:]", says="Look at all parameters"),
    mutant(replicas_agree, "parameter.detach()", "parameter.detach().float()",
           says="a float64 loses half of its bits"),
    mutant(replicas_agree, ".view(torch.uint8)", "", says="numpy knows no bfloat16"),
    mutant(replicas_agree, NAMED, f"[*{NAMED}, *model.named_buffers()]",
           says=r"hash model.parameters\(\) only"),
    mutant(replicas_agree, NAMED, f"[*{NAMED}, *model.named_buffers()]", "[number, -number]",
           "[float(number), -float(number)]", says="Only a buffer differs here, and that"),
    mutant(replicas_agree, "[number, -number]", "[float(number), -float(number)]",
           says="float32 keeps 24 of the 56 bits"),
    mutant(replicas_agree, "-extremes[1]", "extremes[1]",
           says="comes back as the largest of -number"),
    mutant(replicas_agree, "return largest == smallest", "return largest == number",
           says="Every rank must come to the same answer"),
    mutant(replicas_agree, "extremes[0].item(), -extremes[1].item()", "extremes[0], -extremes[1]",
           says="Return True or False"),
    mutant(replicas_agree, CALL, "for each in extremes.split(1):\n        "
           "dist.all_reduce(each, dist.ReduceOp.MAX, group=group)", says="can travel together"),
    mutant(replicas_agree, "MAX, group=group", "MAX", says="Pass `group` on"),
]


def replicas_agree__gathers_the_model(model, group=None):
    """make a short hash of its own weights"""
    mine = torch.cat([p.detach().view(-1).view(torch.uint8) for p in model.parameters()])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return all(torch.equal(each, every[0]) for each in every)
