"""Wrong answers to broadcast_parameters."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.data_parallel import broadcast_parameters

CALL = "dist.broadcast(tensor.detach(), group=group, group_src=src)"

WRONG = [
    mutant(broadcast_parameters, ", *model.buffers()", "", says=r"model.buffers\(\) lists them"),
    mutant(broadcast_parameters, "*model.buffers()", "*filter(torch.is_floating_point, "
           "model.buffers())", says="Whole numbers travel like the others"),
    mutant(broadcast_parameters, "*model.parameters()",
           "*[p for p in model.parameters() if p.requires_grad]",
           says="Frozen parameters differ between ranks too"),
    mutant(broadcast_parameters, "*model.parameters()",
           "*dict(model.named_parameters(remove_duplicate=False)).values()",
           says="The tied weight travels twice"),
    mutant(broadcast_parameters, "group_src=src", "group_src=0", says="Here src is 3"),
    mutant(broadcast_parameters, "group=group, group_src=src", "src",
           says="Pass `group` on to every collective"),
    mutant(broadcast_parameters, ", *model.buffers()", "", CALL,
           "dist.all_reduce(tensor.detach().div_(dist.get_world_size(group)), group=group)",
           says="is the mean over ranks"),
    mutant(broadcast_parameters, CALL,
           "dist.all_reduce(tensor.detach().mul_(dist.get_rank(group) == src), group=group)",
           says="One broadcast of each, whole, is all that is needed"),
    mutant(broadcast_parameters, "tensor.detach()", "tensor.detach().clone()",
           says="Nothing has changed on this rank"),
    mutant(broadcast_parameters, "tensor.detach()", "tensor.detach().contiguous()",
           says="This one is channels-last"),
    mutant(broadcast_parameters, CALL, "number = tensor.detach().float()\n"
           "        dist.broadcast(number, group=group, group_src=src)\n"
           "        tensor.detach().copy_(number)", says="Each travels in its own type"),
    mutant(broadcast_parameters, "tensor.detach()", "tensor",
           says="Autograd must not see the message"),
    mutant(broadcast_parameters, "tensor.detach()", "tensor.requires_grad_(False)",
           says="requires_grad of a parameter has changed"),
    mutant(broadcast_parameters, CALL, f"work = {CALL[:-1]}, async_op=True)\n    work.wait()",
           says=r"nobody has waited for \d+ of its \d+ broadcasts.* not only for the last"),
]


def broadcast_parameters__new_objects(model, src=0, group=None):
    """An optimizer that exists already holds the old objects"""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            copied = p.detach().clone()
            dist.broadcast(copied, group=group, group_src=src)
            setattr(module, name, torch.nn.Parameter(copied))
    for b in model.buffers():
        dist.broadcast(b, group=group, group_src=src)
