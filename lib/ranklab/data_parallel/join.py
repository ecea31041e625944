"""Ranks with fewer batches than others: they keep taking part in collectives, with zeros."""

import torch
import torch.distributed as dist

from ranklab.data_parallel.replicas import broadcast_parameters


def join_uneven(batches, model):
    """Yield this rank's batches; then shadow the other ranks' steps until no rank has a batch.

        for x, y in join_uneven(batches, model):
            ...one forward and one backward of `model`, and the optimizer's step...

    A rank with no batch left adds zeros to the mean, which is still over all ranks. Before each
    step 8 bytes tell all ranks whether any rank has a batch. At the end every rank has the weights
    of a rank that took all the steps. Optimizer state is not sent: a rank that stopped early keeps
    its old momentum. torch's Join on DDP does the same.
    Cost: one all-reduce of 8 bytes a step; at the end one broadcast of the model.
    Raises: ValueError for no_sync inside the loop; on every rank for a SyncBatchNorm in the model.
    Lab: 03
    """
    batches, rank, last = iter(batches), dist.get_rank(model.group), 0
    device = next(model.parameters()).device
    try:
        model.joining = True
        while True:
            batch = next(batches, None)
            going_on = torch.tensor(-1 if batch is None else rank, device=device)
            dist.all_reduce(going_on, dist.ReduceOp.MAX, group=model.group)
            if going_on < 0:
                break
            model.buffers_from = last = going_on.item()
            if batch is None:
                model.shadow()
            else:
                yield batch
        broadcast_parameters(model.module, last, model.group)
    finally:  # also when the loop was left early
        model.joining, model.buffers_from = False, 0
