"""What Horovod's optimizer has beside the exercise: refusals, factors, Adasum, the same start."""

import pytest
import torch
from test_horovod import hvd_ranks
from torch import nn

import ranklab.horovod as hvd

pytestmark = pytest.mark.usefixtures("one_thread")


def one_weight(**options):
    w = nn.Parameter(torch.zeros(2))
    return w, hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("w", w)], **options)


def test_compression_predivision_sum_several_passes_and_adasum():
    def moved(gradients, **options):
        w, optimizer = one_weight(**options)
        for gradient in gradients:
            (w * gradient).sum().backward()
        optimizer.step()
        return w.tolist()

    def steps():
        one, fp16 = torch.tensor([1.0, hvd.rank()]), hvd.Compression.fp16
        return {
            "fp16": moved([one], compression=fp16), "sum": moved([one], op=hvd.Sum),
            "predivided": moved([one], gradient_predivide_factor=2.0),
            "twice": moved([one, one], backward_passes_per_step=2),
            # A sum of 60,000 on two ranks is infinite in 16 bits; divided before, it is not.
            "large": moved([60000.0], compression=fp16, gradient_predivide_factor=2.0),
            "orthogonal": moved([torch.eye(2)[hvd.rank()]], op=hvd.Adasum),
            "equal": moved([3.0], op=hvd.Adasum)}

    assert hvd_ranks(steps) == [{
        "fp16": [-1.0, -0.5], "sum": [-2.0, -1.0], "predivided": [-1.0, -0.5],
        "twice": [-2.0, -1.0], "large": [-60000.0] * 2, "orthogonal": [-1.0, -1.0],
        "equal": [-3.0, -3.0]}] * 2


def test_races_and_bad_arguments_are_errors():
    def bad():
        w, optimizer = one_weight()
        (w * 1.0).sum().backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) came after backward\(\)"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step=1 times"):
            (w * 1.0).sum().backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="averages once more"):
            optimizer.step()
        net = nn.Linear(2, 2)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        for sentence, options in (
            (r"give it model.named_parameters\(\)", {"named_parameters": net.parameters()}),
            ("given twice: w", {"named_parameters": [("w", net.weight), ("w", net.bias)]}),
            ("1 of the optimizer's 2 parameters have no name",
             {"named_parameters": [("w", net.weight)]}),
            ("=0 must be 1 or more", {"backward_passes_per_step": 0}),
            ("it needs op=Average", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
        ):
            with pytest.raises(ValueError, match=sentence):
                hvd.DistributedOptimizer(sgd, **options)
        with pytest.raises(ValueError, match=r"call backward\(\) before step\(\)"):
            hvd.DistributedOptimizer(sgd).step(lambda: None)
        return True

    assert hvd_ranks(bad, ranks=1) == [True]


def test_state_and_scheduler_live_on():
    def wrap():
        w = nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD([w], lr=1.0, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.1)
        w.grad = torch.ones(1)
        sgd.step()
        optimizer = hvd.DistributedOptimizer(sgd)
        (w * 2.0).sum().backward()  # on top of the gradient that is there: 3
        optimizer.step()  # momentum 0.5 * 1 + 3
        scheduler.step()
        return w.item(), optimizer.param_groups[0]["lr"]

    assert hvd_ranks(wrap) == [(-4.5, 0.1)] * 2


def test_a_fresh_optimizer_takes_over_the_state_of_rank_1():
    def take_over():
        torch.manual_seed(hvd.rank())
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        groups = [{"params": net[0].parameters(), "lr": 0.1 + hvd.rank()},
                  {"params": net[1].parameters(), "betas": (0.5, 0.9)}]
        adam = torch.optim.AdamW(groups, amsgrad=True)
        if hvd.rank() == 1:  # the others have no state yet
            net(torch.ones(2, 4)).sum().backward()
            adam.step()
        hvd.broadcast_parameters(net.named_parameters(), root_rank=1)
        hvd.broadcast_optimizer_state(adam, root_rank=1)
        state = adam.state_dict()
        return state["param_groups"], state["state"], list(net.parameters())

    seen = hvd_ranks(take_over, ranks=3)
    assert len(seen[1][1]) == 4
    for groups, *tensors in seen:
        assert groups == seen[1][0]
        torch.testing.assert_close(tensors, list(seen[1][1:]), rtol=0, atol=0)
