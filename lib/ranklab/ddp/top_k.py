"""Top-k: send only the largest entries; the others are added to the next gradient.

    model.register_comm_hook(TopK(0.01), TopK.hook)

Every rank picks different entries, so nothing can be summed on the way: indices travel with the
values, and each rank gets the picks of all ranks. In an all-reduce of n numbers a rank sends about
2n, whatever the number of ranks. Here it sends R-1 times what one rank picks.
"""

import torch
import torch.distributed as dist

INDEX = torch.int32  # enough for a bucket of 8 GB; topk's own int64 would send twice as much


def top_k_compress(gradient, error, k):
    """Split gradient + error into its k largest entries and the rest; inputs stay unchanged.

    Nothing is lost: the values at their indices plus the new error are gradient + error.
    Returns: (values, indices, error): the k entries of largest absolute value, their indices in the
        flattened tensor, and all other entries, to be added in the next step.
    Shape: any shape of n numbers, twice -> (min(k, n),), (min(k, n),), the same shape.
    Paper: Stich et al. 2018, "Sparsified SGD with memory"; Lin et al. 2018
    Lab: 04
    """
    target = (gradient + error).flatten()
    indices = target.abs().topk(min(k, target.numel())).indices
    values = target[indices]
    target[indices] = 0
    return values, indices, target.view(gradient.shape)


def top_k_bytes(parameters, fraction):
    """Count the bytes that TopK(fraction) sends to each other rank; a float32 entry takes 8 bytes.

    Lab: 04
    """
    return sum(8 * count_of(p, fraction) for p in parameters)


def count_of(tensor, fraction):
    """Count the entries of the tensor to send: at least one."""
    return max(1, int(fraction * tensor.numel()))


class TopK:
    """A DDP hook: send only `fraction` of each parameter's gradient entries, and at least one.

    error_feedback=False drops the entries that are not sent (for comparison). `compress` may be a
    learner's own top_k_compress.

    Cost: one all-gather a bucket: for each entry, the other ranks get its value and a 4-byte index.
    Raises: ValueError for a fraction that is not above 0 and at most 1.
    """

    def __init__(self, fraction=0.01, group=None, error_feedback=True, compress=top_k_compress):
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction} must be above 0 and at most 1")
        self.fraction, self.group, self.error_feedback = fraction, group, error_feedback
        self.compress = compress
        self.errors = {}  # by parameter and not by bucket: DDP rebuilds its buckets in step 2

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging the picked entries over ranks; return the future of the mean."""
        buffer, R = bucket.buffer(), dist.get_world_size(self.group)
        values, places = self._pick(bucket)
        count = values.numel()
        # One message: the bytes of the values, then the bytes of the indices.
        packed = torch.cat([values.view(torch.uint8), places.to(INDEX).view(torch.uint8)])
        gathered = packed.new_empty(R * packed.numel())
        work = dist.all_gather_single(gathered, packed, group=self.group, async_op=True)

        def unpack(_):
            buffer.zero_()
            # One rank at a time: inside one call places are unique, so the order of the sums, and
            # their last bits, are the same on all ranks. Otherwise, on a GPU, they would not be.
            for part in gathered.view(R, -1):
                remote, indices = part.split([values.nbytes, count * INDEX.itemsize])
                # cloned: a view as a wider type must begin at a multiple of its size
                indices = indices.clone().view(INDEX).long()
                buffer.index_add_(0, indices, remote.clone().view(buffer.dtype), alpha=1 / R)
            return buffer

        return work.get_future().then(unpack)

    def state_dict(self, model):
        """Return {name: entries not yet sent by this rank}, named as in the plain model."""
        return {name: self.errors[p] for name, p in model.named_parameters() if p in self.errors}

    def load_state_dict(self, model, state):
        self.errors = {p: state[name].to(p.device) for name, p in model.named_parameters()
                       if name in state}  # fmt: skip

    def _pick(self, bucket):
        """Pick the entries to send: their values, and their indices in the bucket."""
        values, places, start = [], [], 0
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            has_error = parameter in self.errors
            error = self.errors[parameter] if has_error else torch.zeros_like(gradient)
            k = count_of(gradient, self.fraction)
            picks, indices, error = self.compress(gradient, error, k)
            values.append(picks)
            places.append(indices + start)
            start += gradient.numel()
            if self.error_feedback:
                self.errors[parameter] = error
        return torch.cat(values), torch.cat(places)
