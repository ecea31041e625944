"""Pipeline parallelism: each rank has some layers, and micro-batches pass through all ranks.

    actions.py      Action and its dependencies; places; text form: parse_schedule, schedule_text
    schedules.py    gpipe_schedule, one_f_one_b_schedule, interleaved_schedule: several stages on a
                    rank; zero_bubble_schedule: ZB-H1, the backward in two halves
    executor.py     StageExecutor: computes a rank's stages; PipelineExecutor: sends and receives
                    as well, and runs any schedule on real ranks

Those three are the idea. Then:
    v_shaped.py     zb_v_schedule, dualpipe_v: for drawing and comparison
    validity.py     problems: the errors of a schedule
    simulate.py     simulate, bubble_fraction, in_flight_activations, memory_line; the papers'
                    own numbers are in formulas/pipeline_parallel.py
    messages.py     with_messages: the sends and receives between the actions
    deferred.py     the backward in two halves, for I and W
    pipedream.py    pipedream_schedule, stale_weights; PipeDreamExecutor updates after each backward
    stages.py       split_stages: which layers a stage has; GPTStage: a GPT of only these layers;
                    tied_embedding_sync
    emulated.py     SleepingStage: work that only takes time
    training.py     PipelineParallel: the training loop's view

A schedule is pure data: it lists what each rank does, in order. Running, drawing and checking all
read the same tuples.
"""

from ranklab.formulas.overlap import micro_batches_for
from ranklab.formulas.pipeline_parallel import (
    flush_bubble, gpipe_in_flight, interleaved_in_flight, one_f_one_b_in_flight, zb_h1_bubble,
    zb_h1_in_flight,
)
from ranklab.pipeline_parallel.actions import (
    Action, check_counts, parse_schedule, places, schedule_text,
)
from ranklab.pipeline_parallel.deferred import WeightQueue
from ranklab.pipeline_parallel.emulated import SleepingStage
from ranklab.pipeline_parallel.executor import PipelineExecutor, ScheduleRunner, StageExecutor
from ranklab.pipeline_parallel.messages import Message, with_messages
from ranklab.pipeline_parallel.pipedream import PipeDreamExecutor, pipedream_schedule, stale_weights
from ranklab.pipeline_parallel.schedules import (
    gpipe_schedule, interleaved_schedule, one_f_one_b_schedule, zero_bubble_schedule,
)
from ranklab.pipeline_parallel.simulate import (
    Span, bubble_fraction, in_flight_activations, memory_line, simulate,
)
from ranklab.pipeline_parallel.stages import (
    GPTStage, gpt_costs, keep_layers, split_stages, tied_embedding_sync,
)
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.pipeline_parallel.v_shaped import dualpipe_v, zb_v_schedule
from ranklab.pipeline_parallel.validity import problems

__all__ = [
    "Action", "GPTStage", "Message", "PipeDreamExecutor", "PipelineExecutor", "PipelineParallel",
    "ScheduleRunner", "SleepingStage", "Span", "StageExecutor", "WeightQueue", "bubble_fraction",
    "check_counts", "dualpipe_v", "flush_bubble", "gpipe_in_flight", "gpipe_schedule", "gpt_costs",
    "in_flight_activations", "interleaved_in_flight", "interleaved_schedule", "keep_layers",
    "memory_line", "micro_batches_for", "one_f_one_b_in_flight", "one_f_one_b_schedule",
    "parse_schedule", "pipedream_schedule", "places", "problems", "schedule_text", "simulate",
    "split_stages", "stale_weights", "tied_embedding_sync", "with_messages", "zb_h1_bubble",
    "zb_h1_in_flight", "zb_v_schedule", "zero_bubble_schedule",
]
