"""Wrong answers to average_gradients."""

from mutants import mutant

from ranklab.data_parallel import average_gradients

CALL = "dist.all_reduce(parameter.grad, group=group)"

WRONG = [
    mutant(average_gradients, "parameter.grad /= R", "pass", says="is 4 times what is right"),
    mutant(average_gradients, "parameter.grad /= R", "parameter.data /= R",
           "all_reduce(parameter.grad", "all_reduce(parameter.data",
           says="Average parameter.grad, not the parameter"),
    mutant(average_gradients, "if not parameter.requires_grad", "if parameter.grad is None",
           says="All ranks must call the same all-reduces"),
    mutant(average_gradients, "if not parameter.requires_grad", "if False",
           says="Skip parameters that need no gradient"),
    mutant(average_gradients, "parameter.grad /= R", "mean = parameter.grad / R",
           "all_reduce(parameter.grad", "all_reduce(mean", says="is still this rank's own"),
    mutant(average_gradients, "all_reduce(parameter.grad", "all_reduce(parameter.grad.contiguous()",
           says="is channels-last"),
    mutant(average_gradients, "torch.zeros_like(parameter)", "torch.zeros(parameter.shape)",
           says=r"torch.zeros_like\(parameter\) has type, shape and device"),
    mutant(average_gradients, "group=None", "group=None, kept={}",
           "parameter in model.parameters()", "i, parameter in enumerate(model.parameters())",
           CALL, "buffer = kept.setdefault((i, parameter.shape), torch.zeros_like(parameter))\n"
           "        dist.all_reduce(buffer.copy_(parameter.grad), group=group)\n"
           "        parameter.grad = buffer", says="that of the second call"),
    mutant(average_gradients, CALL, f"for row in parameter.grad:\n            "
           "dist.all_reduce(row, group=group)", says="One all_reduce of each, whole"),
    mutant(average_gradients, "parameter.grad /= R", "mean = parameter.grad.float() / R", CALL,
           "dist.all_reduce(mean, group=group)\n        parameter.grad.copy_(mean)",
           says="Each travels in its own type"),
    mutant(average_gradients, "model.parameters()",
           "dict(model.named_parameters(remove_duplicate=False)).values()",
           says="The tied weight travels twice"),
    mutant(average_gradients, CALL, f"work = {CALL[:-1]}, async_op=True)\n    work.wait()",
           says=r"nobody has waited for \d+ of its \d+ all_reduces"),
    mutant(average_gradients, "R = dist.get_world_size(group)",
           "R, works = dist.get_world_size(group), []", "parameter.grad /= R",
           f"works.append({CALL[:-1]}, async_op=True))", CALL,
           "parameter.grad /= R\n    for work in works:\n        work.wait()",
           says="divided while they travelled"),
    mutant(average_gradients, "get_world_size(group)", "get_world_size()",
           says="divided by the number of all ranks"),
]
