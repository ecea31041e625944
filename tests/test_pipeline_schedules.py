"""Schedules as data, without processes: valid, no deadlock, bubble and memory as published."""

from collections import defaultdict

import pytest

from ranklab import pipeline_parallel as pp
from ranklab.pipeline_parallel import Action, parse_schedule, simulate
from ranklab.pipeline_parallel.actions import dependencies, result
from ranklab.plots import pipeline_parallel as plots

RANKS = range(1, 9)
GOOD = "F0 F1 B0 B1\nF0 B0 F1 B1"


def shapes(P):
    """Numbers of micro-batches up to 4 * P: all small ones, and those around a multiple of P."""
    around = {k * P + d for k in (2, 3, 4) for d in (-1, 0, 1)}
    return sorted(M for M in {*range(1, P + 2), *around} if 1 <= M <= 4 * P)


def schedules(P, M):
    """{name: schedule}: all that P ranks can run with M micro-batches."""
    found = {"gpipe": pp.gpipe_schedule(P, M), "1f1b": pp.one_f_one_b_schedule(P, M),
             "zb-h1": pp.zero_bubble_schedule(P, M), "zb-v": pp.zb_v_schedule(P, M),
             "pipedream": pp.pipedream_schedule(P, M)}
    if M % P == 0:
        found |= {f"interleaved {V}": pp.interleaved_schedule(P, M, V) for V in (1, 2, 3, 4)}
    if M >= 2 * P:
        found["dual"] = pp.dualpipe_v(P, M)
    return found


# --- actions and text -------------------------------------------------------------------------

def test_text_is_read_and_written():
    schedule = pp.one_f_one_b_schedule(2, 2)
    assert pp.schedule_text(schedule) == GOOD
    assert parse_schedule(GOOD) == schedule and schedule[1][2] == Action("F", 1, 1)
    assert str(schedule[0]) == "(F0.0, F0.1, B0.0, B0.1)"
    thin = pp.interleaved_schedule(2, 2, 2)
    assert pp.schedule_text(thin).startswith("F0.0 F0.1 F2.0 F2.1") and pp.places(thin)[3] == 1
    assert parse_schedule(pp.schedule_text(thin)) == thin


@pytest.mark.parametrize("word", ["X0", "F", "F0.", "Fx", "F1.2.3", "F-1"])
def test_a_word_that_is_no_action(word):
    with pytest.raises(ValueError, match="on rank 1 is no action"):
        parse_schedule(f"F0 B0\nF0 {word}")


# --- every schedule: valid, bubble, memory ----------------------------------------------------

@pytest.mark.parametrize("P", RANKS)
def test_every_schedule_is_valid(P):
    for M in shapes(P):
        for name, schedule in schedules(P, M).items():
            assert pp.problems(schedule, P, M) == [], (name, M)
            V = len(pp.places(schedule)) // P
            down = list(range(P))
            way = down + down[::-1] if name in ("zb-v", "dual") else down * V
            assert list(pp.places(schedule).values()) == way, (name, M)


@pytest.mark.parametrize("P", RANKS)
def test_bubbles_equal_the_formulas(P):
    for M in shapes(P):
        bubbles = {name: pp.bubble_fraction(simulate(schedule))
                   for name, schedule in schedules(P, M).items()}
        expected = {"gpipe": pp.flush_bubble(P, M), "1f1b": pp.flush_bubble(P, M),
                    "zb-h1": pp.zb_h1_bubble(P, M), "dual": (P - 1) / (6 * M + P - 1)}
        expected |= {f"interleaved {V}": pp.flush_bubble(P, M, V) for V in (1, 2, 3, 4)}
        for name in bubbles.keys() & expected:
            assert bubbles[name] == pytest.approx(expected[name]), (name, M)
        if M >= 2 * P - 1:
            spans = simulate(pp.zb_v_schedule(P, M))
            assert pp.bubble_fraction(spans, flush=False) == 0


@pytest.mark.parametrize("P", RANKS)
def test_activations_equal_the_formulas(P):
    for M in shapes(P):
        held = {name: pp.in_flight_activations(s) for name, s in schedules(P, M).items()}
        expected = {"gpipe": pp.gpipe_in_flight(P, M), "1f1b": pp.one_f_one_b_in_flight(P, M),
                    "zb-h1": pp.zb_h1_in_flight(P, M), "dual": [2 * P + 1] * P}
        expected |= {f"interleaved {V}": pp.interleaved_in_flight(P, M, V) for V in (1, 2, 3, 4)}
        for name in held.keys() & expected:
            assert held[name] == expected[name], (name, M)
        assert held["zb-v"] == [2 * P] * P if M >= 2 * P - 1 else max(held["zb-v"]) <= 2 * P


def test_the_memory_line_has_the_same_peak():
    for schedule in schedules(4, 12).values():
        spans = simulate(schedule)
        lines = [pp.memory_line(spans, rank) for rank in range(4)]
        assert [max(held for _, held in line) for line in lines] \
            == pp.in_flight_activations(schedule)
        assert all(line[-1][1] == 0 for line in lines)


def test_numbers_by_hand():
    assert pp.bubble_fraction(simulate(pp.gpipe_schedule(4, 8))) == pytest.approx(3 / 11)
    assert pp.flush_bubble(4, 8, V=2) == 3 / 19
    assert pp.one_f_one_b_in_flight(4, 8) == [4, 3, 2, 1]
    assert pp.zb_h1_bubble(4, 8) == pytest.approx(3 / 27)
    assert pp.interleaved_in_flight(4, 8, 2) == [11, 9, 7, 5]


# --- the simulation ---------------------------------------------------------------------------

def test_costs_of_each_stage_and_of_messages():
    spans = {str(s.action): (s.start, s.end)
             for s in simulate(parse_schedule(GOOD), forward=[1, 3], backward=[2, 4], send=0.5)}
    assert spans == {"F0.0": (0, 1), "F0.1": (1, 2), "F1.0": (1.5, 4.5), "B1.0": (4.5, 8.5),
                     "B0.0": (9, 11), "F1.1": (8.5, 11.5), "B1.1": (11.5, 15.5), "B0.1": (16, 18)}


def test_a_message_inside_a_rank_takes_no_time():
    spans = simulate(pp.zb_v_schedule(1, 1), send=100)
    assert max(span.end for span in spans) == 6


@pytest.mark.parametrize("costs", [(2, 3, 1), (3, 3, 2), (1, 1, 0.5)])
def test_zero_bubble_with_other_costs(costs):
    F, I, W = costs
    for P in (2, 4, 8):
        spans = simulate(pp.zero_bubble_schedule(P, 3 * P), F, I + W, I, W)
        assert pp.bubble_fraction(spans) == pytest.approx(pp.zb_h1_bubble(P, 3 * P, F, I, W))


# arXiv 2401.10241: p, m, chunks a rank for 1F1B-I (a layer each); table 9: F, B, W and a message in
# ms; table 5: bubble rates of 1F1B, of 1F1B-I and of ZB-H1.
PUBLISHED = """
    8  24 3  18.522 18.086  9.337 0.601  0.2431 0.1055 0.1585
    8  32 3  18.513 18.086  9.331 0.626  0.1985 0.0818 0.1242
    8  64 3  18.546 18.097  9.321 0.762  0.1240 0.0443 0.0674
    8  24 4  29.718 29.444 19.927 0.527  0.2347 0.0808 0.1323
    8  32 4  29.802 29.428 19.530 0.577  0.1898 0.0628 0.1045
    8  64 4  29.935 29.621 19.388 0.535  0.1091 0.0320 0.0554
    16 48 3  11.347 11.248  8.132 0.377  0.2552 0.1104 0.1397
    16 64 3  11.307 11.254  8.101 0.379  0.2082 0.0852 0.1088
    16 128 3 11.325 11.308  8.109 0.378  0.1251 0.0445 0.0576
    32 96 2  10.419 10.207  7.715 0.408  0.2646 0.1493 0.1421
    32 128 2 10.408 10.204  7.703 0.408  0.2168 0.1164 0.1106
    32 256 2 10.402 10.248  7.698 0.460  0.1352 0.0624 0.0594"""


@pytest.mark.parametrize("row", PUBLISHED.strip().splitlines(), ids=str.strip)
def test_bubble_rates_of_the_zero_bubble_paper(row):
    P, M, V, F, I, W, send, plain, interleaved, h1 = map(float, row.split())
    P, M, V = int(P), int(M), int(V)

    def rate(schedule, stages=1):
        costs = [cost / stages for cost in (F, I + W, I, W)]
        return pp.bubble_fraction(simulate(schedule, *costs, send=send), flush=False)

    assert rate(pp.one_f_one_b_schedule(P, M)) == pytest.approx(plain, abs=6e-5)
    assert rate(pp.zero_bubble_schedule(P, M)) == pytest.approx(h1, abs=6e-5)
    # The paper does not say how it counts messages of 1F1B-I. Here all 2 * (P * V - 1) of the first
    # micro-batch delay the rest; its numbers are those of P fewer.
    work, ours = M * (F + I + W), rate(pp.interleaved_schedule(P, M, V), V)
    assert 1 - work / (work / (1 - ours) - P * send) == pytest.approx(interleaved, abs=2e-4)


# --- what is refused --------------------------------------------------------------------------

@pytest.mark.parametrize(("make", "sentence"), [
    (lambda: pp.interleaved_schedule(4, 6, 2),
     "micro_batches=6 must be a multiple of ranks=4 for the interleaved schedule"),
    (lambda: pp.dualpipe_v(4, 7),
     "micro_batches=7 must be 8 or more, two for each of the 4 ranks, for the DualPipe schedule"),
    (lambda: pp.gpipe_schedule(0, 1), "stages=0 must be 1 or more"),
    (lambda: pp.one_f_one_b_schedule(2, 0), "micro_batches=0 must be 1 or more"),
    (lambda: pp.interleaved_schedule(2, 2, 0), "virtual=0 must be 1 or more"),
    (lambda: pp.zero_bubble_schedule(-1, 2), "stages=-1 must be 1 or more"),
    (lambda: pp.zb_v_schedule(0, 2), "ranks=0 must be 1 or more"),
])
def test_illegal_shapes(make, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        make()


@pytest.mark.parametrize(("text", "sentence"), [
    ("F0 F1 B0 B1", "the schedule has 1 rank, not 2"),
    ("F0 F1 B0 B1\nF0 B0 B1", "F1.1 is there 0 times, not once"),
    ("F0 F1 F0 B0 B1\nF0 B0 F1 B1", "F0.0 is there 2 times, not once"),
    ("F0 F1 B0 B1\nF0 B0 F1", "micro-batch 1 on stage 1 has 0 B, 0 I and 0 W"),
    ("F0 F1 B0 B1\nF0 B0 F1 I1", "micro-batch 1 on stage 1 has 0 B, 1 I and 0 W"),
    ("F0 F1 B0 B1\nF0 B0 W0 F1 B1", "micro-batch 0 on stage 1 has 1 B, 0 I and 1 W"),
    ("F0 F1 B0 B1\nF0 B0 F1 B1 F2 B2", "rank 1: F1.2 is no action of a pipeline with 2"),
    ("F0 F1 B0 B1\nF0.0 F0 B0 F1 B1", "stage 0 is on rank 0 and on rank 1"),
    ("F0 F1 B0 B1 F2.0 F2.1 B2.0 B2.1\nF0 B0 F1 B1", "the ranks have 2, 1 stages"),
    ("F0 F1 B0 B1\nF0 W0 I0 F1 B1", "rank 1 does W1.0 before I1.0"),
    ("F0 B0 F1 B1\nF0 B0 B1 F1", "rank 1 does B1.1 before F1.1"),
    ("F0 F1 B0 B1\nB0 F0 F1 B1", "rank 1 does B1.0 before F1.0"),
    ("F0 B0 F1 B1\nF0 F1 B0 B1", "no rank can go on: rank 0 waits for B1.0 to do B0.0; "
                                 "rank 1 waits for F0.1 to do F1.1"),
])
def test_what_is_wrong_is_said(text, sentence):
    found = pp.problems(parse_schedule(text), 2, 2)
    assert any(one.startswith(sentence) for one in found), found


def test_other_things_than_actions_are_wrong():
    assert pp.problems([[("F", 0, 0)]], 1, 1) \
        == ["rank 0: ('F', 0, 0) is no action of a pipeline with 1 micro-batches"]
    assert pp.problems([[Action("X", 0, 0)]], 1, 1)
    assert pp.problems([[]], 1, 1) == ["the ranks have 0 stages: they must have equally many"]


def test_other_right_schedules_are_right():
    assert pp.problems(parse_schedule("F0 F1 B1 B0\nF0 F1 B1 B0"), 2, 2) == []
    assert pp.problems(parse_schedule("F0 F1 I0 B1 W0\nF0 I0 F1 B1 W0"), 2, 2) == []
    assert pp.problems([list(rank) for rank in pp.gpipe_schedule(2, 2)], 2, 2) == []


def test_what_is_done_twice_is_no_deadlock():
    assert len(simulate(parse_schedule("F0 F0 B0"))) == 3


def test_what_deadlocks_has_no_times_and_no_messages():
    for use in (simulate, pp.with_messages):
        with pytest.raises(ValueError, match="no rank can go on"):
            use(parse_schedule("F0 B0 F1 B1\nF0 F1 B0 B1"))


# --- PipeDream --------------------------------------------------------------------------------

def test_stale_weights_of_pipedream():
    P, M = 4, 12
    schedule = pp.pipedream_schedule(P, M)
    stashed, newest = pp.stale_weights(schedule), pp.stale_weights(schedule, stash=False)
    for (kind, stage, m), version in stashed.items():
        assert version == max(0, m - (P - 1 - stage))    # behind by one for each stage to come
        assert newest[kind, stage, m] == (m if kind == "B" else version)
    assert pp.bubble_fraction(simulate(pp.pipedream_schedule(P, 1000))) < 0.004


# --- messages ---------------------------------------------------------------------------------

def test_messages_of_the_smallest_pipeline():
    first, second = pp.with_messages(pp.gpipe_schedule(2, 2))
    assert str(first) == "(F0.0, SF0.0>1, F0.1, SF0.1>1, RB0.0<1, B0.0, RB0.1<1, B0.1)"
    assert str(second) == "(RF1.0<0, RF1.1<0, F1.0, F1.1, B1.0, SB1.0>0, B1.1, SB1.1>0)"


def test_nothing_is_sent_inside_a_rank():
    assert not [e for e in pp.with_messages(pp.zb_v_schedule(1, 3))[0] if isinstance(e, pp.Message)]
    last = pp.with_messages(pp.zb_v_schedule(4, 8))[3]
    assert {m.stage for m in last if isinstance(m, pp.Message) and m.kind == "SF"} == {4}


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "started early"])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
def test_messages_never_deadlock(P, blocking):
    for M in (1, P, 2 * P + 1, 4 * P):
        for name, schedule in schedules(P, M).items():
            lists = pp.with_messages(schedule)
            assert [tuple(e for e in entries if isinstance(e, Action)) for entries in lists] \
                == list(schedule), name
            assert run(lists, len(pp.places(schedule)), blocking), (name, M)


def run(lists, stages, blocking):
    """True if all ranks come to the end of their lists. A message passes when both ends name it:
    blocking, both wait for that; else they go on, and two ranks' messages pass one by one in the
    order in which they were named. An action waits for what it needs.
    """
    at, have, named = [0] * len(lists), defaultdict(set), defaultdict(list)

    def goes_on(rank, entry):
        if isinstance(entry, Action):
            if not have[rank].issuperset(dependencies(entry, stages)):
                return False
            have[rank].add(result(entry))
            return True
        peer = entry.peer
        if blocking:
            if lists[peer][at[peer]:at[peer] + 1] != (other_end(rank, entry),):
                return False
            at[peer] += 1
        else:
            mine, theirs = named[rank, peer], named[peer, rank]
            mine.append(entry)
            if len(mine) > len(theirs):
                return True
            assert theirs[len(mine) - 1] == other_end(rank, entry)
        source, sent = (rank, entry) if entry.kind[0] == "S" else (peer, other_end(rank, entry))
        passes = Action(sent.kind[1], sent.stage, sent.micro_batch)
        assert passes in have[source]
        have[sent.peer].add(passes)
        return True

    before = None
    while at != before:
        before = list(at)
        for rank, entries in enumerate(lists):
            while at[rank] < len(entries) and goes_on(rank, entries[at[rank]]):
                at[rank] += 1
    return at == [len(entries) for entries in lists]


def other_end(rank, message):
    kind, stage, m, _ = message
    to = stage + (1 if kind in ("SF", "RB") else -1)
    return pp.Message(("R" if kind[0] == "S" else "S") + kind[1], to, m, rank)


# --- torch's own ------------------------------------------------------------------------------

def torch_schedule(name, P, M, V=None):
    """The order of torch.distributed.pipelining: a private module, so it is used here only."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    ranks = get_schedule_ops(name, P, M, V)
    actions = [[one for action in rank if action for one in (action.sub_actions or (action,))]
               for rank in ranks]
    return tuple(tuple(Action(a.computation_type.value, a.stage_index, a.microbatch_index)
                       for a in rank if len(a.computation_type.value) == 1) for rank in actions)


@pytest.mark.parametrize("P", [1, 2, 3, 4, 6])
def test_torch_has_the_same_order(P):
    for M in (1, P, 2 * P, 3 * P + 1):
        assert torch_schedule("GPipe", P, M) == pp.gpipe_schedule(P, M)
        assert torch_schedule("ZBVZeroBubble", P, M, 2) == pp.zb_v_schedule(P, M)
        if M % P == 0:
            for V in (2, 3, 4):
                assert torch_schedule("Interleaved1F1B", P, M, V) == \
                    pp.interleaved_schedule(P, M, V)
        if M >= 2 * P:
            assert torch_schedule("DualPipeV", P, M, 2) == pp.dualpipe_v(P, M)
        if M >= P:
            *theirs, last = torch_schedule("1F1B", P, M)
            *ours, ours_last = pp.one_f_one_b_schedule(P, M)
            assert theirs == ours
            # torch 2.13 lists the forwards of the last stage from 1 on, and runs them from 0 on.
            assert [a.kind for a in last] == [a.kind for a in ours_last]


# --- figures ----------------------------------------------------------------------------------

def test_figures():
    named = {name: simulate(schedule) for name, schedule in schedules(2, 4).items()}
    later = [span._replace(start=span.start + 5, end=span.end + 5) for span in named["1f1b"]]
    fig = plots.timeline(later, "1F1B")
    lanes, below = fig.axes
    assert lanes.get_xlim() == (0, 15) and len(lanes.patches) == len(later)
    assert [text.get_text() for text in below.get_legend().get_texts()] \
        == ["rank 0, at most 2", "rank 1, at most 1"]
    fig = plots.layers_on_ranks([["embedding", "block 0"], ["head"]])
    assert [text.get_text() for text in fig.axes[0].texts if "rank" in text.get_text()] \
        == ["rank 0", "rank 1"]
    fig = plots.several(named, "all", xlabel="time (forward of a stage: 1)")
    words = dict(zip(named, (ax.texts[-1].get_text() for ax in fig.axes)))
    assert words["gpipe"] == "bubble 20.0%\nholds 4\nmicro-batches"
    assert words["interleaved 2"] == "bubble 11.1%\nholds 2.5\nmicro-batches"
