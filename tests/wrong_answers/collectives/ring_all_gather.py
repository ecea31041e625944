"""Lab 02, ring_all_gather: mistakes that a good student would really make."""

from mutants import mutant

from ranklab.collectives import ring_all_gather

EXCHANGE = "sendrecv(chunks[have], (rank + 1) % R, chunks[want], (rank - 1) % R, group)"
OWN, MADE = "chunks[rank].copy_(shard.flatten())", "shard.new_empty(R * shard.numel())"

WRONG = [
    mutant(ring_all_gather, "chunks[rank].copy_", "chunks[0].copy_",
           "(rank - step + 1) % R, (rank - step) % R", "step - 1, step",
           says="from the rank that made the shard"),
    mutant(ring_all_gather, "sendrecv(chunks[have]", "sendrecv(chunks[rank]",
           says="Pass on what arrived last"),
    mutant(ring_all_gather, OWN, "pass", says="Is your own shard copied in|Nothing was written"),
    mutant(ring_all_gather, EXCHANGE,
           "sendrecv(chunks[rank], (rank + step) % R, chunks[want], (rank - step) % R, group)",
           says="neighbours only"),
    mutant(ring_all_gather, EXCHANGE,
           "sendrecv(chunks[have], (rank - 1) % R, chunks[want], (rank + 1) % R, group)",
           says="The ring is swapped"),
    mutant(ring_all_gather, "range(1, R)", "range(1, R + (R > 1))", says="One step too many"),
    mutant(ring_all_gather, "if out is None", "if True", says="When `out` is given|differ|length"),
    mutant(ring_all_gather, "chunks = out", "out = torch.empty_like(out)\n    chunks = out",
           says="new tensor elsewhere"),
    mutant(ring_all_gather, "chunks = out", "chunks = out.zero_()",
           says="shard lies in `out` already"),
    mutant(ring_all_gather, "if out is None", "if out is None or R == 1",
           says="rank 0 of 1.*`out` is as it was"),
    mutant(ring_all_gather, "    rank, R =", "    group = group if out is None else None\n"
           "    rank, R =", says="with `out` as well"),
    mutant(ring_all_gather, "out=None):", "out=None, kept={}):", MADE,
           f"kept.setdefault((R, shard.shape, shard.dtype), {MADE})", says="new in each call"),
    mutant(ring_all_gather, "shard.new_empty(", "torch.empty(", says="same type"),
]
