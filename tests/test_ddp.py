"""Lab 04's library: steps of a timeline, the recorded situations, and the slow link."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ranklab import ddp, launch
from ranklab.ddp import situations
from ranklab.ddp.situations import BANDWIDTH, BATCH, COMPUTE, FETCH, LAYERS, MORE_WORK, SITUATIONS
from ranklab.meter import Event, Timeline

pytestmark = pytest.mark.usefixtures("one_thread")


def seconds(events, kind):
    """Of all events of a kind together. A sleep may take longer than it should, but never less."""
    return 1.001 * sum(event.end - event.start for event in events if event.kind == kind)


def test_steps_begin_with_their_loader():
    kinds = ("compute", *("loader", "compute", "communication") * 3, "loader")
    events = [Event(kind, kind, at, at + 2, "main") for at, kind in enumerate(kinds)]
    steps = ddp.steps_of(events)
    assert [step[0].kind for step in steps] == ["compute", "loader", "loader"]
    assert sum(map(len, steps)) == len(events) - 1  # but for the search for the end
    assert ddp.steps_of(events[:1]) == [events[:1]] and ddp.steps_of([]) == []


def test_each_recorded_situation_has_its_cause(steps=3):
    """Only what a busy machine can't change: how many steps, and how long the sleeps are at least.
    That diagnose tells such jobs apart is its check's matter, where times are made up.
    """
    seen = situations.record(ranks=2, steps=steps)
    work = 3 * LAYERS * BATCH * COMPUTE * steps  # forward, and twice that in backward
    for name in SITUATIONS:
        for rank, timeline in enumerate(seen[name]):
            assert len(ddp.steps_of(timeline.events)) == steps
            times = MORE_WORK if (name, rank) == ("straggler", 1) else 1
            assert seconds(timeline.events, "compute") >= times * work
    for rank in range(2):
        assert seconds(seen["loader-bound"][rank].events, "loader") >= BATCH * FETCH * steps
        sent = 4 * (situations.SIDE**4 + situations.SIDE**2) * LAYERS * steps  # and a last layer
        assert seconds(seen["communication-bound"][rank].events, "communication") >= (
            sent / BANDWIDTH)
    with pytest.raises(ValueError, match="situation 'slow' is not one of healthy, loader-bound"):
        situations.record(("slow",))


def _through_a_slow_link(bandwidth):
    """(gradient, gradient by the slow link, seconds that it is on its way)."""
    gradients = []
    for link in (None, ddp.SlowLink(bandwidth)):
        model = torch.nn.Linear(50, 20)
        torch.nn.init.ones_(model.weight)
        model = DistributedDataParallel(model)
        if link:
            model.register_comm_hook(link, ddp.SlowLink.hook)
        with Timeline() as timeline:
            model(torch.full((4, 50), 1.0 + dist.get_rank())).sum().backward()
        gradients.append(model.module.weight.grad.clone())
    link.close()
    return *gradients, seconds(timeline.events, "communication")


def test_a_slow_link_changes_no_gradient_and_is_as_slow_as_it_says():
    for plain, slow, taken in launch(_through_a_slow_link, 1e5, ranks=2):
        assert torch.equal(plain, slow)
        assert taken >= (50 * 20 + 20) * 4 / 1e5
    with pytest.raises(ValueError, match="bandwidth=0 bytes/s must be above 0"):
        ddp.SlowLink(bandwidth=0)
