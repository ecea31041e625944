"""Lab 04's library: scaling, exposed communication, what compressors keep, and the diagnosis."""

import threading
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ranklab import ddp, launch
from ranklab.ddp import situations
from ranklab.engine.surroundings import patience
from ranklab.meter import Event, Timeline

pytestmark = pytest.mark.usefixtures("one_thread")


def event(kind, start, end, lane="main"):
    return Event(kind, kind, start, end, lane)


# --- top-k ----------------------------------------------------------------------------------------

def test_top_k_of_nothing_is_nothing():
    zero = torch.zeros(5)
    values, indices, left = ddp.top_k_compress(zero, zero, 2)
    assert values.tolist() == [0, 0] and left.tolist() == [0] * 5
    assert len(set(indices.tolist())) == 2


# --- PowerSGD -------------------------------------------------------------------------------------

def test_power_iterations_come_near_the_best_approximation():
    def steps():
        torch.manual_seed(0)
        matrix, q = torch.randn(30, 20), torch.randn(20, 2)
        u, s, v = matrix.svd()
        best = (matrix - u[:, :2] @ s[:2].diag() @ v[:, :2].T).norm()
        distances = []
        for _ in range(60):  # the same gradient again and again, errors thrown away
            approximation, q, _ = ddp.power_sgd(matrix, q, torch.zeros_like(matrix))
            distances.append(((matrix - approximation).norm() / best).item())
        return distances

    distances, = launch(steps, ranks=1)
    assert distances[0] > 1.05 and distances[-1] == pytest.approx(1, abs=1e-3)


# --- diagnosis ------------------------------------------------------------------------------------

def timeline(loader=1.0, compute=10.0, communication=2.0, late=0.0, steps=5, hiccup=0.0):
    """One rank's events: it loads, computes, waits `late` for others, and communicates."""
    events, now = [], 0.0
    for step in range(steps):
        compute_s = compute + (hiccup if step == 2 else 0)
        done = now + loader + compute_s
        events += [event("loader", now, now + loader), event("compute", now + loader, done),
                   event("communication", done - 1, done + late + communication, "gloo 1")]
        now = done + late + communication
    return [*events, event("loader", now, now + 0.5)]  # DataLoader finds its end


def test_shares_are_of_the_median_step():
    _, shares = ddp.diagnose([timeline(loader=4, late=3), timeline(loader=4, compute=13)])
    assert shares == {"loader-bound": pytest.approx(4 / 19),
                      "communication-bound": pytest.approx(2 / 19),
                      "straggler": pytest.approx(3 / 19)}


def test_steps_begin_with_their_loader():
    events = [event("compute", -1, 0), *timeline(steps=3)]
    steps = ddp.steps_of(events)
    assert [step[0].kind for step in steps] == ["compute", "loader", "loader"]
    assert sum(map(len, steps)) == len(events) - 1  # but for the search for the end
    assert ddp.steps_of(events[:1]) == [events[:1]] and ddp.steps_of([]) == []


@pytest.mark.timeout(180)
def test_the_four_recorded_situations_are_told_apart():
    seen = situations.record(ranks=2, slower=round(2 * patience()))
    verdicts = {name: ddp.diagnose([one.events for one in of_ranks])
                for name, of_ranks in seen.items()}
    assert {name: verdict for name, (verdict, _) in verdicts.items()} == {
        name: name for name in situations.SITUATIONS}, verdicts
    for of_ranks in seen.values():
        assert [len(ddp.steps_of(one.events)) for one in of_ranks] == [5, 5]
    with pytest.raises(ValueError, match="situation 'slow' is not one of healthy, loader-bound"):
        situations.record(("slow",))


def _beside_gpus(steps):
    """As if the ranks had GPUs: (backend of the group, events, threads that are left)."""
    class Noted(DistributedDataParallel):
        def __init__(self, *args, process_group=None, **kwargs):
            super().__init__(*args, process_group=process_group, **kwargs)
            backends.append(process_group and dist.get_backend(process_group))

    backends, meta = [], lambda: torch.device("meta")
    with patch.object(situations, "DistributedDataParallel", Noted), \
            patch.object(situations, "device", meta, create=True):
        seen = situations._record(("communication-bound",), steps)["communication-bound"]
    return backends, len(ddp.steps_of(seen.events)), [
        thread.name for thread in threading.enumerate() if "ThreadPoolExecutor" in thread.name]


def test_situations_stay_on_the_cpu_and_leave_no_thread():
    assert launch(_beside_gpus, 1, ranks=2) == [(["gloo"], 1, [])] * 2


def _through_a_slow_link(bandwidth):
    """(gradient, gradient by the slow link, seconds in which it is exposed)."""
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
    return *gradients, ddp.exposed_communication(timeline.events)


def test_a_slow_link_changes_no_gradient_and_is_as_slow_as_it_says():
    for plain, slow, exposed in launch(_through_a_slow_link, 1e5, ranks=2):
        assert torch.equal(plain, slow)
        assert exposed > 0.95 * (50 * 20 + 20) * 4 / 1e5  # sleeping takes no less, anywhere
    with pytest.raises(ValueError, match="bandwidth=0 bytes/s must be above 0"):
        ddp.SlowLink(bandwidth=0)


def test_a_slow_link_refuses_what_is_not_on_the_cpu():
    class Bucket:
        def buffer(self):
            return torch.empty(3, device="meta")

    with pytest.raises(ValueError, match="a bucket of 12 bytes is on meta: SlowLink emulates"):
        ddp.SlowLink(bandwidth=1e6).hook(Bucket())
