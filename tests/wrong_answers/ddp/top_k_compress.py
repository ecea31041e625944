import torch
from mutants import mutant

from ranklab.ddp import top_k_compress as answer

FLAT = "target = (gradient + error).flatten()"
CHOSEN = "target.abs().topk(min(k, target.numel())).indices"
KEPT = "target.view(gradient.shape)"
WRONG = [
    mutant(answer, ".abs()", "", says="Largest in size"),
    mutant(answer, "target.abs().topk", "gradient.flatten().abs().topk",
           says="Add the error first"),
    mutant(answer, "values = target[indices]", "values = target.abs()[indices]",
           says="what is sent is without its sign"),
    mutant(answer, "values = target[indices]", "values = gradient.flatten()[indices]",
           says="what is sent is that of the gradient alone"),
    mutant(answer, "    target[indices] = 0\n", "", says="What is sent must not be kept"),
    mutant(answer, KEPT, "torch.zeros_like(error)", says="what is not sent must be kept",
           torch=torch),
    mutant(answer, KEPT, f"{KEPT} - error", says="The old error is lost"),
    mutant(answer, "(gradient + error)", "gradient.add_(error)",
           says="`gradient` itself is changed"),
    mutant(answer, "min(k, target.numel())", "k", says="never more than there are"),
    mutant(answer, KEPT, "target", says="The error has the gradient's shape"),
    mutant(answer, "(gradient + error).flatten()", "(gradient + error).view(-1)",
           says=r"copies where \.view can't"),
    mutant(answer, "(gradient + error).flatten()", "(gradient + error).float().flatten()",
           says="bits are lost"),
    mutant(answer, CHOSEN, "(target.abs() >= target.abs().sort().values[-min(k, target.numel())])"
           ".nonzero().flatten()", says="also where entries are 0, or equally large"),
    mutant(answer, FLAT, "target = gradient + error", CHOSEN, "target.abs().topk(k).indices",
           "target[indices]\n", "target.gather(-1, indices)\n", "    target[indices] = 0\n", "",
           KEPT, "target.scatter(-1, indices, 0)", says="flattened tensor"),
]
