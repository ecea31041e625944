"""Wrong answers to shard_sampler."""

from mutants import mutant

from ranklab.data_parallel import shard_sampler

WRONG = [
    mutant(shard_sampler, "(seed + epoch)", "(seed)", says="epoch 1 gives rank 0 the same samples"),
    mutant(shard_sampler, "(seed + epoch)", "(seed + epoch + rank)",
           says="All ranks must shuffle alike"),
    mutant(shard_sampler, "while len(order)", "if len(order)", says="more than once if n"),
    mutant(shard_sampler, "n // ranks if drop_last else ", "",
           says="With drop_last each rank gets n // ranks"),
    mutant(shard_sampler, "order[rank : share * ranks : ranks]",
           "order[rank * share : (rank + 1) * share]", says="Take every ranks-th index"),
    mutant(shard_sampler, "torch.Generator().manual_seed", "torch.manual_seed",
           says=r"make a torch.Generator\(\) of your own"),
    mutant(shard_sampler, "return order[", "return torch.tensor(order)[",
           says=r"Return a list of ints"),
    mutant(shard_sampler, "torch.randperm(", "list(torch.randperm(", ").tolist()", "))",
           says=r"list\(tensor\) cuts a tensor into tensors"),
    mutant(shard_sampler, "not 0 <= rank < ranks", "False", says="n=10, rank=4, ranks=4 gives"),
]


def shard_sampler__not_shuffled(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """the samples are not shuffled"""
    each = n // ranks if drop_last else -(-n // ranks)
    return (list(range(n)) * ranks)[rank : each * ranks : ranks]
