from mutants import mutant

from ranklab.horovod import compress_fp16 as answer

NOT_WORTH_IT = "not dtype.is_floating_point or dtype.itemsize <= 2"
RESTORED, CAST = "reduced.to(dtype)", "tensor.to(torch.float16)"
WRONG = [
    mutant(answer, NOT_WORTH_IT, "False", says="can't hold whole numbers above 2048"),
    mutant(answer, RESTORED, "reduced.float()", says="must remember the type of .its. tensor"),
    mutant(answer, RESTORED, "tensor", says="restore gives .* is what was sent"),
    mutant(answer, RESTORED, "tensor.copy_(reduced)", says="Each result is a tensor of its own"),
    mutant(answer, "torch.float16", "torch.bfloat16",
           says="travels .* is torch.bfloat16, not torch.float16"),
    mutant(answer, " or dtype.itemsize <= 2", "", says="has 16 bits already"),
    mutant(answer, NOT_WORTH_IT, "dtype != torch.float32",
           says="for every floating point type"),
    mutant(answer, CAST, "tensor.clamp(-65504, 65504).to(torch.float16)",
           says="must be seen, not hidden"),
    mutant(answer, "lambda reduced: reduced\n", "lambda reduced: tensor\n",
           says="restore must convert its argument"),
    mutant(answer, "not dtype.is_floating_point", "dtype in (torch.int64, torch.int32)",
           says="loses its imaginary part"),
    mutant(answer, "itemsize <= 2", "itemsize == 2", says="float16 would be twice as much"),
    mutant(answer, "return tensor, ", "return tensor.flatten(), ",
           says="Return the tensor as it is"),
]
