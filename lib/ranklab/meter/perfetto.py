"""Merge the traces of all ranks into one file, for Perfetto or chrome://tracing."""

import json
from pathlib import Path

from ranklab.meter.timeline import durations, lanes_of

FLOWS = 2**32  # an arrow's number in one rank's trace is below this


def merged_trace(timelines, path):
    """Write one trace of all ranks to `path`: a process for each rank, in rank order, time from 0.

    timelines: for each rank its Timeline, the trace in it, or a trace read from a file
    Raises: ValueError if a rank occurs twice (torch notes the rank in a trace when a group is up)
    """
    traces = [getattr(timeline, "trace", timeline) for timeline in timelines]
    ranks = [trace.get("distributedInfo", {}).get("rank", i) for i, trace in enumerate(traces)]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"each rank's trace must be there once, but these are of ranks {ranks}")
    bases = [trace.get("baseTimeNanoseconds", 0) for trace in traces]
    shifts = [(base - bases[0]) / 1e3 for base in bases]  # to the first trace's microseconds
    begin = min((shift + record["ts"] for trace, shift in zip(traces, shifts)
                 for record in durations(trace)), default=0)
    events = []
    for rank, trace, shift in zip(ranks, traces, shifts):
        events += _of_rank(rank, trace, shift - begin)
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _of_rank(rank, trace, shift):
    """Return the trace's events as process `rank`, `shift` microseconds later, a thread per lane.

    Torch's own names of processes and threads are left out.
    """
    lanes = lanes_of(trace)
    places = {thread: place for place, thread in enumerate(sorted(lanes, key=_order(lanes)))}
    name = f"rank {rank}, {trace['host_name']}" if "host_name" in trace else f"rank {rank}"
    events = [_label("process_name", rank, 0, name=name),
              _label("process_sort_index", rank, 0, sort_index=rank)]
    for thread, place in places.items():
        events += [_label("thread_name", rank, place, name=lanes[thread]),
                   _label("thread_sort_index", rank, place, sort_index=place)]
    for event in trace["traceEvents"]:
        place = places.get((event.get("pid"), event.get("tid")))
        if place is None or event["ph"] == "M":
            continue
        moved = {**event, "pid": rank, "tid": place, "ts": event["ts"] + shift}
        if "id" in event:  # or an arrow would go from one rank to another
            moved["id"] = rank * FLOWS + event["id"]
        events.append(moved)
    return events


def _order(lanes):
    def key(thread):
        word, _, number = lanes[thread].partition(" ")
        return ("main", "backward", "thread", "gloo", "stream").index(word), int(number or 0)

    return key


def _label(kind, pid, tid, **args):
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}
