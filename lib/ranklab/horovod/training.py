"""HorovodParallel: Horovod, ours or the real one, behind the training loop's interface (trainer/).
"""

from ranklab.trainer.parallel import Parallel


class HorovodParallel(Parallel):
    """Train with the whole model on each rank, and equally many rows on all ranks in each step.

    A batch must be one piece: Horovod averages after one backward.

    hvd          ranklab.horovod or horovod.torch, after init()
    compression  of gradients on the wire: hvd.Compression.none, or an object with its two functions
    """

    def __init__(self, hvd, compression):
        self.hvd, self.compression = hvd, compression
        self.rank, self.ranks = hvd.rank(), hvd.size()
        self.gradient_scale = self.ranks

    def apply(self, model):
        self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model

    def make_optimizer(self, new_optimizer, groups):
        named = [pair for group in groups for pair in group["params"]]
        optimizer = new_optimizer([{**group, "params": [p for _, p in group["params"]]}
                                   for group in groups])
        self.hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self.optimizer = self.hvd.DistributedOptimizer(optimizer, named_parameters=named,
                                                       compression=self.compression)
        return self.optimizer

    def token_count(self, targets):
        return super().token_count(targets) * self.ranks

    def forward_backward(self, *batch):
        share = super().forward_backward(*batch)  # as gradients are ready, their averages begin
        self.optimizer.synchronize()  # waits for those that are not done: now they can be clipped
        return share

    def total(self, value):
        return self.hvd.allreduce(value, op=self.hvd.Sum)

    def gather(self, values):
        return self.hvd.allgather(values[None])
