import torch
from mutants import mutant

from ranklab.ddp import top_k_compress as answer

FLAT = "wanted = (gradient + error).flatten()"
CHOSEN = "wanted.abs().topk(min(k, wanted.numel())).indices"
KEPT = "wanted.view(gradient.shape)"
WRONG = [
    mutant(answer, ".abs()", "", says="Largest in size"),
    mutant(answer, "wanted.abs().topk", "gradient.flatten().abs().topk",
           says="Add the error first"),
    mutant(answer, "values = wanted[indices]", "values = wanted.abs()[indices]",
           says="what is sent is without its sign"),
    mutant(answer, "values = wanted[indices]", "values = gradient.flatten()[indices]",
           says="what is sent is that of the gradient alone"),
    mutant(answer, "    wanted[indices] = 0\n", "", says="What is sent must not be kept"),
    mutant(answer, KEPT, "torch.zeros_like(error)", says="what is not sent must be kept",
           torch=torch),
    mutant(answer, KEPT, f"{KEPT} - error", says="The old error is lost"),
    mutant(answer, "(gradient + error)", "gradient.add_(error)",
           says="`gradient` itself is changed"),
    mutant(answer, "min(k, wanted.numel())", "k", says="never more than there are"),
    mutant(answer, KEPT, "wanted", says="The error has the gradient's shape"),
    mutant(answer, "(gradient + error).flatten()", "(gradient + error).view(-1)",
           says=r"copies where \.view can't"),
    mutant(answer, "(gradient + error).flatten()", "(gradient + error).float().flatten()",
           says="bits are lost"),
    mutant(answer, CHOSEN, "(wanted.abs() >= wanted.abs().sort().values[-min(k, wanted.numel())])"
           ".nonzero().flatten()", says="also where entries are 0, or equally large"),
    mutant(answer, FLAT, "wanted = gradient + error", CHOSEN, "wanted.abs().topk(k).indices",
           "wanted[indices]\n", "wanted.gather(-1, indices)\n", "    wanted[indices] = 0\n", "",
           KEPT, "wanted.scatter(-1, indices, 0)", says="flattened tensor"),
]
