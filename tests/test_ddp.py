"""Lab 04's library: scaling, exposed communication, what compressors keep, and the diagnosis."""

import random
import threading
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ranklab import ddp, device, launch
from ranklab.ddp import situations
from ranklab.engine.surroundings import patience
from ranklab.meter import Event, Timeline, Traffic

pytestmark = pytest.mark.usefixtures("one_thread")


def event(kind, start, end, lane="main"):
    return Event(kind, kind, start, end, lane)


# --- scaling ------------------------------------------------------------------------------------

def test_efficiency_is_relative_to_the_fewest_ranks():
    strong = ddp.scaling_efficiency({4: 3.0, 1: 8.0, 2: 4.0}, "strong")
    assert strong == {1: 1.0, 2: 1.0, 4: pytest.approx(2 / 3)} and list(strong) == [1, 2, 4]
    assert ddp.scaling_efficiency({8: 1.25, 2: 1.0}, "weak") == {2: 1.0, 8: 0.8}
    assert ddp.scaling_efficiency({8: 1.0, 2: 3.0}, "strong") == {2: 1.0, 8: 0.75}


@pytest.mark.parametrize("seconds, kind, sentence", [
    ({1: 1.0}, "string", "kind='string' is neither 'strong' nor 'weak'"),
    ({}, "weak", "must be positive, and there at all: {}"),
    ({1: 1.0, 2: 0.0}, "weak", "must be positive"),
    ({0: 1.0}, "weak", "must be positive"),
])
def test_efficiency_of_nonsense_is_a_sentence(seconds, kind, sentence):
    with pytest.raises(ValueError, match=sentence):
        ddp.scaling_efficiency(seconds, kind)


# --- exposed communication ------------------------------------------------------------------------

def exposed_by_hand(events, kind="communication"):
    """The oracle: whole seconds, one after the other."""
    return sum(any(e.kind == kind and e.start <= t < e.end for e in events)
               and not any(e.kind == "compute" and e.start <= t < e.end for e in events)
               for t in range(100))


def test_exposed_communication_is_what_no_computing_hides():
    work, send = event("compute", 0, 10), event("communication", 6, 15, "gloo 1")
    assert ddp.exposed_communication([work, send]) == 5
    assert ddp.exposed_communication([send]) == 9
    assert ddp.exposed_communication([work]) == ddp.exposed_communication([]) == 0
    twice = [send, event("communication", 8, 12, "gloo 2"), event("compute", 3, 7, "backward 1")]
    assert ddp.exposed_communication([*twice, work]) == 5
    assert ddp.exposed_communication([event("loader", 0, 3), event("wait", 2, 9), send]) == 9
    assert ddp.exposed_communication([event("loader", 8, 13), work], kind="loader") == 3


@pytest.mark.parametrize("seed", range(5))
def test_exposed_communication_of_any_overlaps(seed):
    draw = random.Random(seed)
    events = []
    for _ in range(40):
        start = draw.randrange(90)
        kind = draw.choice(("compute", "communication", "communication", "loader", "wait"))
        events.append(event(kind, start, start + draw.randrange(8), f"lane {draw.randrange(3)}"))
    for kind in ("communication", "loader"):
        assert ddp.exposed_communication(events, kind) == exposed_by_hand(events, kind)


# --- top-k ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape, k", [((7,), 3), ((4, 5), 1), ((2, 3, 4), 24), ((3,), 10),
                                      ((1,), 1), ((1000,), 10), ((0,), 2)])
def test_sent_plus_error_is_gradient_plus_error_exactly(shape, k):
    torch.manual_seed(0)
    gradient, error = torch.randn(shape), torch.randn(shape)
    given = gradient.clone(), error.clone()
    values, indices, left = ddp.top_k_compress(gradient, error, k)
    assert torch.equal(gradient, given[0]) and torch.equal(error, given[1])
    wanted = (gradient + error).flatten()
    sent = torch.zeros_like(wanted)
    sent[indices] = values
    assert left.shape == gradient.shape and torch.equal(sent + left.flatten(), wanted)
    assert len(values) == len(indices.unique()) == min(k, wanted.numel())
    kept = wanted.abs().sort(descending=True).values[: len(values)]
    assert torch.equal(values.abs().sort(descending=True).values, kept)


def test_top_k_of_nothing_is_nothing():
    zero = torch.zeros(5)
    values, indices, left = ddp.top_k_compress(zero, zero, 2)
    assert values.tolist() == [0, 0] and left.tolist() == [0] * 5
    assert len(set(indices.tolist())) == 2


def test_what_is_left_behind_comes_later():
    """A constant gradient: in the end every entry has been sent, in the right amount."""
    gradient = torch.arange(1.0, 9.0)
    total, error = torch.zeros(8), torch.zeros(8)
    for step in range(1, 201):
        values, indices, error = ddp.top_k_compress(gradient, error, 1)
        total[indices] += values
        assert torch.allclose(total + error, step * gradient)
    assert (error.abs() <= 40).all()  # it does not grow with the steps
    assert torch.allclose(total / 200, gradient, atol=0.2)


# --- PowerSGD -------------------------------------------------------------------------------------

def _matrix(rank, n, m, r):
    """Of rank r, and with the same row space on each rank, so that the mean has rank r as well."""
    right = torch.randn(r, m, generator=torch.Generator().manual_seed(99))
    return torch.randn(n, r, generator=torch.Generator().manual_seed(rank)) @ right


def _power(cases):
    """On one rank: of each case (relative error of each step, mean error + approximation is right,
    inputs unchanged, bytes of one call)."""
    rank, R, found = dist.get_rank(), dist.get_world_size(), []
    for n, m, true_rank, r in cases:
        matrix = _matrix(rank, n, m, true_rank).to(device())
        mean = sum(_matrix(other, n, m, true_rank) for other in range(R)).to(device()) / R
        q = torch.randn(m, r, generator=torch.Generator().manual_seed(7)).to(device())
        error, distances, whole = torch.zeros_like(matrix), [], []
        for _ in range(3):
            before = [x.clone() for x in (matrix, q, error)]
            with Traffic() as traffic:
                approximation, q_next, error_next = ddp.power_sgd(matrix, q, error)
            same = all(torch.equal(a, b) for a, b in zip(before, (matrix, q, error)))
            missing, wanted = error_next / R, (matrix + error) / R
            for summed in (missing, wanted):
                dist.all_reduce(summed)
            whole.append(same and torch.allclose(approximation + missing, wanted, atol=1e-4))
            distances.append(((approximation - mean).norm() / mean.norm()).item())
            q, error = q_next, error_next
        found.append((distances, all(whole), traffic.sent_bytes, approximation.cpu()))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_power_sgd_is_exact_for_a_matrix_of_its_rank(ranks):
    cases = [(12, 8, 1, 1), (8, 20, 2, 3), (9, 9, 9, 9), (5, 4, 3, 6), (13, 7, 4, 1)]
    seen = launch(_power, cases, ranks=ranks)
    for i, (n, m, true_rank, r) in enumerate(cases):
        for distances, whole, sent, approximation in (of_rank[i] for of_rank in seen):
            assert whole  # nothing is lost: what is not sent is in the errors
            assert torch.equal(approximation, seen[0][i][3])  # all ranks hold the same
            exact = all(distance < 1e-4 for distance in distances)
            assert exact == (true_rank <= r), (n, m, true_rank, r, distances)
        both = [ring_bytes(n * min(n, r), ranks), ring_bytes(m * min(n, r), ranks)]
        assert sum(of_rank[i][2] for of_rank in seen) == sum(both)


def ring_bytes(numbers, ranks):
    """What all ranks together send in an all-reduce of that many float32."""
    return 2 * (ranks - 1) * 4 * numbers


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


def test_power_sgd_of_zeros_and_of_several_at_once():
    def calls():
        zero, q = torch.zeros(6, 4), torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
        first = ddp.power_sgd(zero, q, zero)
        again = ddp.power_sgd(_matrix(0, 6, 4, 2), first[1], first[2])  # from a q of zeros
        stack = torch.stack([_matrix(dist.get_rank(), 6, 4, 3), _matrix(5, 6, 4, 3)])
        together = ddp.power_sgd(stack, torch.stack([q, 2 * q]), torch.zeros_like(stack))
        alone = [ddp.power_sgd(matrix, each, zero) for matrix, each in zip(stack, (q, 2 * q))]
        return first, again, together, [torch.stack(three) for three in zip(*alone)]

    for first, again, together, alone in launch(calls, ranks=2):
        assert all(not tensor.any() for tensor in first)
        assert all(tensor.isfinite().all() for tensor in again) and again[1].any()
        for a, b in zip(together, alone):
            assert torch.allclose(a, b, atol=1e-5)


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


@pytest.mark.parametrize("verdict, timelines", [
    ("healthy", [timeline(), timeline()]),
    ("loader-bound", [timeline(loader=20), timeline(loader=19)]),
    ("communication-bound", [timeline(communication=9), timeline(communication=9)]),
    ("straggler", [timeline(late=20), timeline(compute=30), timeline(late=20)]),
    ("straggler", [timeline(late=20), timeline(loader=21)]),  # slow to load, and alone in it
    ("healthy", [timeline(hiccup=100), timeline()]),
    ("healthy", [timeline()]),
    ("loader-bound", [timeline(loader=20)]),
    ("healthy", [timeline(communication=3.4), timeline(communication=3.4)]),
])
def test_the_diagnosis(verdict, timelines):
    found, shares = ddp.diagnose(timelines)
    assert found == verdict, shares
    assert found == "healthy" or shares[found] == max(shares.values()) >= 0.25


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


@pytest.mark.parametrize("timelines", [[], [[]], [timeline(), [event("loader", 0, 1)]]])
def test_a_diagnosis_without_steps_is_a_sentence(timelines):
    with pytest.raises(ValueError, match="a diagnosis needs one or more everywhere"):
        ddp.diagnose(timelines)


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
