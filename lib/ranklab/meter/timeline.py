"""Timeline: what this rank did when, from torch's profiler, on a clock that all ranks share.

A trace has a line for every op and for every op inside it. Four kinds of events are enough to see
why a step is slow:

    compute        ops on CPU threads; with a GPU its kernels (launching them is not compute)
    communication  gloo's work on gloo's threads, NCCL's kernels on their stream: the transfer,
                   including the wait for the other ranks, but not the call that starts it
    loader         the main thread fetches the next batch
    wait           the main thread is blocked until a transfer, or the GPU, is done

Times are seconds of the Unix clock, so ranks on one machine compare to the microsecond. Ranks on
different machines compare as well as the machines' clocks do: NTP keeps those within milliseconds,
PTP within microseconds.
"""

import bisect
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

KINDS = ("compute", "communication", "loader", "wait")
MARK = "ranklab."  # before the kind, in the name of an annotation
# Namespaces of ops that wrap other ops, or that only start a transfer.
NO_WORK = ("autograd", "c10d", "_c10d_functional", "profiler", "torch")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


class Event(NamedTuple):
    """One thing that happened on one lane: a thread or a stream."""

    name: str
    kind: str  # one of KINDS
    start: float  # seconds, as time.time()
    end: float
    lane: str  # "main", "backward 1", "gloo 1", "stream 7", "thread 1"


def loading():
    """Count everything inside `with loading():` as loader time. DataLoader marks its own."""
    return mark("loader")


def mark(kind):
    """Count the block as `kind`, whatever runs in it, such as a sleep that emulates work.

    Raises: ValueError for a kind that is not in KINDS.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
    return record_function(MARK + kind)


class Timeline:
    """Record what this rank does inside the block, on all threads and on its GPU.

        with Timeline() as timeline:
            for x, y in batches: step(x, y)
        timeline.events        # [Event], sorted by start; an op and the ops in it are one event
        timeline.trace         # torch's own complete trace: see merged_trace

    A GPU is recorded only if this process has used one before. A Timeline can be pickled: return
    it, or its events, from a launch.
    Cost: nothing is sent; a few microseconds for every op, so small ops look slower than they are
    """

    def __init__(self):
        self.trace, self.events = None, []

    def __enter__(self):
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints a line at start and stop
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        # All threads, because a hook or a coordinator may communicate from its own thread.
        config = _ExperimentalConfig(profile_all_threads=True, trace_only=True)
        self._profile = profile(activities=activities, experimental_config=config)
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # kernels that still run belong to the block
        self._profile.__exit__(*error)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            self.trace = json.loads(path.read_text())
        del self._profile  # so that a Timeline pickles
        self.events = events_of(self.trace)


def events_of(trace):
    """List the Events of one rank's trace, sorted by start.

    trace: a dict in the format of torch's profiler
    """
    records, lanes = durations(trace), lanes_of(trace)
    base = trace.get("baseTimeNanoseconds", 0)
    has_gpu = any(r.get("cat") == "kernel" for r in records)
    events, inside = [], {}  # (pid, tid) -> the end of what was taken last on that thread
    for record in sorted(records, key=lambda r: (r["ts"], -r["dur"])):
        thread = record["pid"], record["tid"]
        kind = _kind(record, has_gpu)
        is_nested = record["ts"] < inside.get(thread, -1) and record["cat"] not in ON_GPU
        if kind is None or is_nested:
            continue
        inside[thread] = record["ts"] + record["dur"]
        start, end = ((base + t * 1e3) / 1e9 for t in (record["ts"], inside[thread]))
        events.append(Event(record["name"], kind, start, end, lanes[thread]))
    if not has_gpu:
        events += _waits(events)
    return sorted(events, key=lambda event: event.start)


def durations(trace):
    """List the records of a trace that have a beginning, an end and a thread or stream."""
    return [r for r in trace["traceEvents"] if r.get("ph") == "X" and "dur" in r
            and isinstance(r["pid"], int)]  # the profiler's own spans have words for a pid


def _kind(record, has_gpu):
    """One of KINDS, or None for what only wraps, starts or annotates other work."""
    category, name = record.get("cat"), record["name"]
    if category == "kernel":
        return "communication" if "nccl" in name.lower() else "compute"
    if category == "user_annotation":
        if name.startswith("enumerate(DataLoader)"):
            return "loader"
        if name.startswith(MARK):
            return name.removeprefix(MARK)
        return "communication" if name.startswith("gloo:") else None
    if category in ("cuda_runtime", "cuda_driver"):
        return "wait" if "Synchronize" in name else None
    if category != "cpu_op" or has_gpu:
        return None
    namespace, is_op, _ = name.partition("::")
    if is_op:
        return None if namespace.split(".")[0] in NO_WORK else "compute"
    return "compute" if name.startswith("## Call CompiledFxGraph") else None


def _waits(events):
    """List the gaps of the main thread in which a transfer ends, each up to the end of that one.

    They are inferred, because torch writes nothing to a trace while it blocks in Work.wait().
    """
    main = sorted((e.start, e.end) for e in events if e.lane == "main")
    ends = sorted(e.end for e in events if e.kind == "communication" and e.lane != "main")
    waits = []
    for (_, start), (stop, _) in zip(main, [*main[1:], (float("inf"), None)]):
        last = bisect.bisect_right(ends, stop) - 1  # the last transfer that ends before `stop`
        if last >= 0 and ends[last] > start:
            waits.append(Event("wait", "wait", start, ends[last], "main"))
    return waits


def lanes_of(trace):
    """Return {(pid, tid): lane} for every thread and stream of one rank, in the order they started.
    """
    begins, streams, gloo = {}, set(), set()
    for record in durations(trace):
        thread = record["pid"], record["tid"]
        begins[thread] = min(record["ts"], begins.get(thread, record["ts"]))
        if record.get("cat") in ON_GPU:
            streams.add(thread)
        elif record["name"].startswith("gloo:"):
            gloo.add(thread)
    backward = {(r["pid"], r["tid"]) for r in trace["traceEvents"] if r.get("name") == "thread_name"
                and "autograd" in r["args"]["name"]}
    lanes, count = {}, Counter()
    for thread in sorted(begins, key=begins.get):
        pid, tid = thread
        if thread in streams or pid == tid:
            lanes[thread] = f"stream {tid}" if thread in streams else "main"
            continue
        word = "backward" if thread in backward else "gloo" if thread in gloo else "thread"
        count[word] += 1
        lanes[thread] = f"{word} {count[word]}"
    return lanes
