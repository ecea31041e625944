"""Lab 05: more mistakes in the optimizer and in Adasum: zeros, other types, more ranks.

The first line of each docstring is a pattern that the check's output must hold.
"""

import torch
import torch.distributed as dist

import ranklab.horovod as hvd
from ranklab.collectives import sendrecv
from ranklab.horovod import Compression, allreduce_async_, dot_products, gather_halves, synchronize


# --- distributed_optimizer ------------------------------------------------------------------------


def _distributed(optimizer, named_parameters, compression, zeros=torch.zeros_like,
                 is_unused=lambda p: p.grad is None, one_ctx=False, drops=False, late=False,
                 register="register_step_pre_hook"):
    names = {p: name for name, p in named_parameters if p.requires_grad}
    handles = {}

    def ask(p, gradient):
        small, ctx = compression.compress(gradient)
        handles[p] = allreduce_async_(small, name=names[p]), ctx

    def wait(*_):
        for p in names.keys() - handles.keys():
            ask(p, zeros(p) if is_unused(p) else p.grad)
        ctxs = [ctx for _, ctx in handles.values()]
        for p, (handle, ctx) in handles.items():
            average = compression.decompress(synchronize(handle), ctxs[-1] if one_ctx else ctx)
            p.grad = p.grad if drops and p.grad is None else average
        handles.clear()

    for p in names:
        p.register_post_accumulate_grad_hook(lambda own: ask(p if late else own, p.grad if late
                                                             else own.grad))
    getattr(optimizer, register)(wait)
    return optimizer


def distributed_optimizer__zeros_for_all_the_rest(optimizer, named_parameters,
                                                  compression=Compression.none):
    """zeros only where p.grad is None"""
    return _distributed(optimizer, named_parameters, compression, is_unused=lambda p: True)


def distributed_optimizer__zeros_of_float32(optimizer, named_parameters,
                                            compression=Compression.none):
    """zeros_like\\(p\\) where there is no gradient"""
    return _distributed(optimizer, named_parameters, compression,
                        zeros=lambda p: torch.zeros(p.shape, device=p.device))


def distributed_optimizer__one_ctx_for_all(optimizer, named_parameters,
                                           compression=Compression.none):
    """its own ctx"""
    return _distributed(optimizer, named_parameters, compression, one_ctx=True)


def distributed_optimizer__drops_what_others_had(optimizer, named_parameters,
                                                 compression=Compression.none):
    """also where that was None"""
    return _distributed(optimizer, named_parameters, compression, drops=True)


def distributed_optimizer__after_the_step(optimizer, named_parameters,
                                          compression=Compression.none):
    """before the optimizer's own step begins"""
    return _distributed(optimizer, named_parameters, compression,
                        register="register_step_post_hook")


def distributed_optimizer__the_loops_last_parameter(optimizer, named_parameters,
                                                    compression=Compression.none):
    """as a lambda in a loop does"""
    return _distributed(optimizer, named_parameters, compression, late=True)


def distributed_optimizer__returns_nothing(optimizer, named_parameters,
                                           compression=Compression.none):
    """and return it"""
    _distributed(optimizer, named_parameters, compression)


def distributed_optimizer__the_librarys_class(optimizer, named_parameters,
                                              compression=Compression.none):
    """another object than the optimizer"""
    return hvd.DistributedOptimizer(optimizer, named_parameters, compression)


# --- adasum ---------------------------------------------------------------------------------------


def _weights(ab, aa, bb):
    return 1 - torch.where(aa > 0, ab / (2 * aa), 0), 1 - torch.where(bb > 0, ab / (2 * bb), 0)


def _adasum(x, sizes, group, weights=_weights, steps=lambda distance: (1, 2, 4), talk_in=None,
            precision=torch.float64, each=lambda of, tensor_of: of[tensor_of]):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if R & (R - 1):
        raise ValueError(f"{R} is not a power of two")
    sizes = torch.tensor(sizes or [x.numel()])
    tensor_of = torch.arange(len(sizes)).repeat_interleave(sizes)
    part, lengths, distance = x.flatten(), [], 1
    while distance < R:
        peer, is_left = rank ^ distance, rank & distance == 0
        lengths.append(part.numel())
        left, right = part.tensor_split(2)
        mine, give = (left, right) if is_left else (right, left)
        tensor_of = tensor_of.tensor_split(2)[0 if is_left else 1]
        theirs = sendrecv(give, peer, torch.empty_like(mine), peer, group)
        a, b = (mine, theirs) if is_left else (theirs, mine)
        dots = dot_products(a, b, tensor_of, len(sizes)).to(precision)
        for step in steps(distance):
            if step <= distance:
                dots += sendrecv(dots, rank ^ step, torch.empty_like(dots), rank ^ step,
                                 talk_in or group)
        of_a, of_b = weights(*dots)
        part = (each(of_a, tensor_of) * a + each(of_b, tensor_of) * b).to(x.dtype)
        distance *= 2
    return gather_halves(part, lengths, group).view(x.shape) if R > 1 else x.clone()


def adasum__first_and_last_partner(x, sizes=None, group=None):
    """of 8: .+only part of the sum"""
    return _adasum(x, sizes, group, steps=lambda distance: sorted({1, distance}))


def adasum__guards_only_the_left(x, sizes=None, group=None):
    """be it a or b that is zero"""
    return _adasum(x, sizes, group, lambda ab, aa, bb: (_weights(ab, aa, bb)[0],
                                                        1 - ab / (2 * bb)))


def adasum__adds_a_little(x, sizes=None, group=None):
    """Nothing is added to"""
    return _adasum(x, sizes, group, lambda ab, aa, bb: (1 - ab / (2 * aa + 1e-8),
                                                        1 - ab / (2 * bb + 1e-8)))


def adasum__sums_in_float32(x, sizes=None, group=None):
    """1e20 \\* 1e20 not into float32"""
    return _adasum(x, sizes, group, precision=torch.float32)


def adasum__dots_of_all_ranks_of_the_job(x, sizes=None, group=None):
    """also for the dot products"""
    return _adasum(x, sizes, group, talk_in=dist.group.WORLD)


def adasum__coefficients_of_tensors(x, sizes=None, group=None):
    """is each element's own"""
    return _adasum(x, sizes, group, each=lambda of, tensor_of: of)


def adasum__coefficient_of_the_first_tensor(x, sizes=None, group=None):
    """coefficient of its own tensor"""
    return _adasum(x, sizes, group, each=lambda of, tensor_of: of[0])


def adasum__other_sign(x, sizes=None, group=None):
    """so that what agrees is not counted twice"""
    return _adasum(x, sizes, group, lambda ab, aa, bb: _weights(-ab, aa, bb))


def adasum__without_brackets(x, sizes=None, group=None):
    """It is ab / \\(2 \\* aa\\)"""
    return _adasum(x, sizes, group, lambda ab, aa, bb: (1 - ab / 2 * aa, 1 - ab / 2 * bb))


def adasum__a_root_too_many(x, sizes=None, group=None):
    """squares already"""
    return _adasum(x, sizes, group, lambda ab, aa, bb: _weights(ab, aa.sqrt(), bb.sqrt()))


def adasum__one_length_for_both(x, sizes=None, group=None):
    """Each vector has its own coefficient"""
    return _adasum(x, sizes, group, lambda ab, aa, bb: _weights(ab, *[(aa * bb).sqrt()] * 2))


def adasum__average_of_it(x, sizes=None, group=None):
    """Nothing is divided by the number of ranks"""
    return _adasum(x, sizes, group) / dist.get_world_size(group)


def adasum__odd_number_refused_on_one_rank(x, sizes=None, group=None):
    """On every rank"""
    if dist.get_world_size(group) == 3 and dist.get_rank(group) < 2:
        return x.clone()
    return _adasum(x, sizes, group)
