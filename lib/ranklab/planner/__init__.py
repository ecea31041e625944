"""The planner: does a training run fit, how long is a step, how near is that to published runs?

From top to bottom; each file reads only those above it:
    model.py      Model: a transformer's shape, its parameters and its matrix products
    machine.py    Machine: the GPUs, their links and their network, from published tables
    plan.py       Plan: a layout and the tool that runs it
    memory.py     memory_per_gpu: the bytes that a GPU holds, in the tool of the plan
    placement.py  place: how far the group of each axis reaches on the machine
    traffic.py    volumes: the bytes that each group sends
    links.py, compute.py  the seconds of messages, and of a layer's computation
    step.py       step_time: the parts of a step's time, which add up
    space.py      layouts: the plans that a tool can run
    search.py     search_layouts: all layouts that fit, the fastest first
    choose.py     choose_layout: the same for the course's own trainer (lab 12); hybrid_jobs.py: its
                  jobs and layouts as Model and Plan, and back
    cost.py, scaling.py  cost_per_token, scaling_curve: dollars, and the gain from more GPUs
    why.py        where a step's time goes, and the assumptions behind it
    muon.py       what Muon changes in a plan that was found with AdamW

Those are the core. Then:
    catalog.py    models and nodes by name
    constants.py  the few fitted numbers, each with its meaning and its bounds
    request.py, offers.py, sensitivity.py  a requested training run: the nearest possible
                  one; numbers of GPUs within a budget; the effect of halving or doubling each size
    page.py, export/  an HTML page of many choices; a plan as a file that its tool reads
    failures.py, mixed.py  the time lost to failures; clusters with several kinds of GPUs
    published/    published measurements, and the loader that reads them
    jobs.py, sources.py  a published run as a Model, a Machine and a Plan
    fp8.py        what FP8 changes in a plan that was found in bf16; published pairs of runs
    domains.py    experts' all-to-alls in an NVLink domain of 72 GPUs, and in nodes of 8
    score.py, fit.py  errors on files of runs and on runs like a plan; the fit of the constants
    rough.py      rough_step_seconds: a rule of five lines, and its errors on the same runs
"""

import importlib

from ranklab.planner.catalog import find_model, find_node, model_of_size
from ranklab.planner.cost import bill, cost_per_token
from ranklab.planner.domains import crossing_share, expert_traffic
from ranklab.planner.fp8 import fp8_change, fp8_speedup
from ranklab.planner.memory import GpuMemory, memory_per_gpu
from ranklab.planner.model import Model
from ranklab.planner.plan import Plan
from ranklab.planner.rough import rough_step_seconds
from ranklab.planner.scaling import scaling_curve
from ranklab.planner.search import NoLayout, search_layouts
from ranklab.planner.step import Step, step_time

__all__ = [
    "GpuMemory", "Model", "NoLayout", "Plan", "Step", "bill", "catalog", "choose", "choose_layout",
    "constants", "cost", "cost_per_token", "crossing_share", "domains", "expert_traffic", "export",
    "find_model", "find_node", "fp8", "fp8_change", "fp8_speedup", "jobs", "memory",
    "memory_per_gpu", "model_of", "model_of_size", "plan_of", "published", "rough",
    "rough_step_seconds", "scaling_curve", "search", "search_layouts", "space", "step",
    "step_time", "why",
]

# For the course's own trainer, which needs torch; the rest of the planner does not.
_OURS = {"choose_layout": "choose", "model_of": "hybrid_jobs", "plan_of": "hybrid_jobs"}


def __getattr__(name):
    if name not in _OURS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_OURS[name]}"), name)
