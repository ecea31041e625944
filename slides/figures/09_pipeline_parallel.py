"""The figures of the deck 09_pipeline_parallel.md."""
from ranklab import pipeline_parallel as pp
from ranklab.pipeline_parallel import simulate
from ranklab.plots import pipeline_parallel as plots

def stages():
    return plots.layers_on_ranks(
        [["embedding", "block 0", "block 1"], ["block 2", "block 3", "block 4"],
         ["block 5", "block 6", "block 7"], ["block 8", "norm", "head"]],
        title=""), 8, 2.5


def pieces():
    text = "F0 F1 F2 F3 B0 B1 B2 B3"
    return plots.several({
        "naive": simulate(pp.parse_schedule("F0 B0\nF0 B0"), forward=4, backward=8),
        "four pieces": simulate(pp.parse_schedule(f"{text}\n{text}"), forward=1, backward=2),
    }, title=""), 7, 2.7


def gpipe():
    return plots.timeline(simulate(pp.gpipe_schedule(4, 8))), 7, 3


def turns():
    return plots.timeline(simulate(pp.one_f_one_b_schedule(4, 8))), 7, 3


def interleaved():
    drawn = {"1F1B": simulate(pp.one_f_one_b_schedule(4, 8)),
             "2 stages a rank": simulate(pp.interleaved_schedule(4, 8, 2), 0.5, 1)}
    return plots.several(drawn, title=""), 7, 3.4


def halves():
    return plots.timeline(simulate(pp.zero_bubble_schedule(4, 8)), ranks=range(4)), 7, 3


def shapes():
    drawn = {name: simulate(make(4, 8), 0.5, 1, 0.5, 0.5) for name, make in
             {"ZB-V": pp.zb_v_schedule, "DualPipeV": pp.dualpipe_v}.items()}
    return plots.several(drawn, title=""), 7.4, 3.4


def slow():
    schedule, costs = pp.one_f_one_b_schedule(4, 8), [1, 1, 1.5, 1]
    twice = [2 * cost for cost in costs]
    drawn = {"equal stages": simulate(schedule),
             "stage 2 takes half as long again": simulate(schedule, costs, twice)}
    return plots.several(drawn, title=""), 7, 3.4
