# %% [markdown]
# ### 4.5 Too little work
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 8 lines
#
# A run that hangs costs as much as one that works. Somebody must be woken, and not by a curve that somebody happens to look at. Prometheus asks each rank for its numbers every 15 seconds ("scrapes" it), keeps them, and evaluates *rules*. An expression picks series and computes with them; for what it leaves over, an alert is active. Alertmanager sends it on, to a person or to a script that drains the node.
#
# **Predict.** 16 GPUs, each with 989 TFLOP/s. Their counters grow by 100,000 tokens a second in all; the model of 7B parameters needs 42 GFLOPs for a token. How many percent is the MFU?

# %%
check(cluster_mfu_percent=...)

# %% [markdown]
# The language is PromQL. What you need of it, with a counter `c` and a gauge `g` that have the labels run and rank:
#
# | | |
# |---|---|
# | `g{run="a"}` | the newest sample of each series; none where the last scrape has failed |
# | `rate(c[5m])` | growth per second of each series over five minutes; a counter that falls has begun again at 0 |
# | `avg_over_time(g[1m])` | the mean of the samples of a minute |
# | `sum by (run) (g)`, `quantile by (run) (0.5, g)` | one number a run |
# | `x / on (run) group_left y` | many series divided by one for each run |
# | `for: 10m` | an alert fires when its condition has held that long, without a gap |
#
# Your rule is judged by what it does: series go in, alerts come out, in thirteen stories. The check evaluates PromQL by a small evaluator that a test holds equal to Prometheus' own `promtool`. Write the duration as Prometheus does: `"10m"`.

# %%
def mfu_alert_rule(least, minutes):
    """A Prometheus rule, a dict with the keys of a rules file: it alerts, once a run, where the
    run's MFU has been below `least` for `minutes` minutes.

    MFU      FLOPs of the model in a second / FLOP/s of all its GPUs, over some minutes: a step may
             take more than a minute, and counters jump
    fires    within 2 x minutes, until it is well again; also where ranks hang, where scrapes fail
             now and then, where another run is fine
    silent   while a run begins: it compiles for 4 minutes. A pause, or a restart, of a third of
             `minutes`: counters begin again at 0, maybe on other instances. A run that has ended
    labels   of the alert: run, but not rank; a severity
    annotations  one of them has the run and the value in it: {{ $labels.run }}, {{ $value }}
    metrics  train_tokens_total, a counter; train_flops_per_token; train_peak_flops, of one GPU.
             Each rank exports all three: labels run, rank, instance, job. Scraped each 15 s
    minutes  10 or more
    """
    raise NotImplementedError("exercise 4.5: about 8 lines")


# %%
mfu_alert_rule = check(mfu_alert_rule)

# %% [markdown]
# Your rule on an hour of a run: it compiles, works, pauses for a checkpoint, and is slow from minute 30 on.

# %% tags=["nbval-check-output"]
from ranklab.checks.cluster.series import stepped, trained
from ranklab.cluster.alerts import alerts

story = trained((0, [(4, 0.0), (15, 0.4), (18, 0.0), (30, 0.4), (60, 0.2)]))
fired = alerts(mfu_alert_rule(0.3, 10), story, range(0, 3601, 15))
print(f"silent for {fired[0][0] / 60:.0f} minutes; then", {"run": fired[0][1]["run"]})

# %% [markdown]
# ### 4.6 Who is slow, on a server
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 8 lines
#
# Lab 14 found the straggler inside the run. Outside of it, nobody knows which ranks belong together but by their labels, and each number may be missing.
#
# **Predict.** A usual rule is "more than three standard deviations above the mean". Of eight ranks seven need the same time, one needs more. How many standard deviations (Prometheus' `stddev`, of a population) is it above the mean, however slow it is?

# %%
check(cluster_deviations=...)

# %%
def straggler_rule(factor, minutes):
    """A Prometheus rule, as a dict: it alerts for each rank that has been slower than `factor`
    times the median rank of its run for `minutes` minutes.

    fires    within 2 x minutes, until it is well again; also for two ranks of eight, where each
             eighth scrape fails, while another rank is gone
    silent   for what is slow once, even if it stays in the gauge for two scrapes: the first step, a
             checkpoint. A rank that was slow for a third of `minutes`. All slow at once. One that
             is fast. A run whose steps are longer than another run's. A rank that is gone
    labels   of the alert: run and rank; a severity
    annotations  one of them has the run, the rank and the value in it
    metrics  train_step_seconds, a gauge: of a rank's last step, until it reached the collective;
             labels run, rank, instance, job. Scraped each 15 s
    minutes  5 or more
    """
    raise NotImplementedError("exercise 4.6: about 8 lines")


# %%
straggler_rule = check(straggler_rule)

# %%
story = stepped((5, 10, 99, 1.5), (3, 20, 20.5, 3.0))
plots.step_times(story, 1.2, alerts(straggler_rule(1.2, 5), story, range(0, 2401, 15)))

# %% [markdown]
# Rank 3's long step is over before `for` is. Rank 5 is slow for five minutes before anybody is told: that is the price of a rule that one step can't fool.

# %% [markdown]
# #### `sick_rank_alarm` - open
# > difficulty 5/5 · importance 4/5 · 50 minutes · about 20 lines
#
# A rule sees one number. A person who looks for a sick GPU sees ten: clock and temperature, corrected memory errors, errors of the link, the wait for data. A bad link slows *all* ranks, and no rank's time until the collective shows it. A rank whose share is larger by design was slow from the start, and isn't ill. There is no recipe.
#
# No company publishes the metrics of a large cluster with what was wrong. So the recordings here are **emulated**: `help(recordings)` says what is published, and what is our own choice. Five kinds of sickness, eight kinds of health:

# %%
from ranklab.cluster import recordings
from ranklab.cluster.alarm import play, rule_alarm, score
from ranklab.cluster.recordings import CLOCK, DATA, ECC, LINK, SECONDS, record

for kind, words in (recordings.SICK | recordings.HEALTHY).items():
    print(f"{kind:14} {words}")
plots.recorded(record("hot GPU", seed=3))

# %%
### BEGIN SOLUTION


### END SOLUTION
def sick_rank_alarm(metrics):
    """The rank that is sick, or None: asked at each scrape, with all that was scraped of one run so
    far. Of a sick host any rank.

    The check plays 39 recordings that it has not shown. It counts the seconds from the onset to the
    alarm, and false alarms: in a healthy run, before the onset, of another rank. The first alarm
    ends a run. One run may have a false alarm, no more; and the Score must be 94% of the library's.
    metrics  {name: (scrapes, ranks)}, and train_mfu: (scrapes,); NaN where a scrape failed, each
             15 s. Not changed. The names are those of ranklab.cluster.recordings; what happens to
             runs stands in SICK and HEALTHY there. Errors are counters
    """
    raise NotImplementedError("exercise sick_rank_alarm: about 20 lines")


# %%
sick_rank_alarm = check(sick_rank_alarm)

# %%
runs = recordings.recordings(seeds=range(3))
plots.alarms({"yours": score(sick_rank_alarm, runs), "straggler_rule": score(rule_alarm, runs)})

# %%
run = record("hot GPU", seed=3)
plots.recorded(run, play(sick_rank_alarm, run))

# %% [markdown]
# ## 5. The real thing (part: monitoring)
#
# **Prometheus and Alertmanager**, the real ones, on loopback and free ports. Four ranks train; each serves its numbers at a port of its own, and a file tells Prometheus of it. Rank 2 waits for its data. Your rule, with `for: 2s` instead of minutes, and a webhook that waits:

# %%
import tempfile

from ranklab.cluster.monitor import missing
from ranklab.projects.cluster.watched import watched_run

if missing():
    print(missing())
else:
    with tempfile.TemporaryDirectory() as folder:
        found = watched_run(folder, straggler_rule(1.5, 5) | {"for": "2s"})
    print(found["alert"]["annotations"]["summary"])
    print(f"{found['seconds']:.0f} s after the start, in step {found['steps']}")

# %% [markdown]
# `labs/jobs/monitoring/` holds the files for a cluster: `prometheus.yml`, your two rules, a Grafana dashboard (MFU, tokens/s, step time of each rank, stragglers, GPUs). `promtool` and `amtool` accept them; the dashboard is linted, and was never opened, because Grafana was not there. GPUs come from NVIDIA's dcgm-exporter on each node; here a stand-in exports its names.
#
# **TensorBoard** reads files, so it needs no server beside the training. What a trainer's History holds, written and read back:

# %% tags=["nbval-check-output"]
from ranklab.cluster.curves import read_scalars, read_trace, traced_steps, waits_in_traces, write_scalars
from ranklab.trainer import History

history = History([1, 50, 100], [3.1, 2.4, 2.2], [0.0, 900.0, 950.0], [0.01, 0.01, 0.02], {100: 2.3})
with tempfile.TemporaryDirectory() as folder:
    write_scalars(folder, history)
    print(*read_scalars(folder).items(), sep="\n")

# %% [markdown]
# `tensorboard --logdir FOLDER` shows the curves. **W&B** on nodes without a network: `write_wandb(folder, history)` runs `wandb.init(mode="offline")`, and `wandb sync FOLDER` sends it later. It is not installed by `make lab`.
#
# **A trace.** Metrics say who is slow, a trace says why. `torch.profiler` writes a JSON file for each rank, which ui.perfetto.dev opens. Rank 1 of three computes eight times as much. Who waits in the all-reduce?

# %%
with tempfile.TemporaryDirectory() as folder:
    paths = launch(traced_steps, folder, 1, ranks=3)
    print(read_trace(paths[1])[0])
    waits = waits_in_traces(paths)
print("seconds in all-reduces:", {rank: round(x, 3) for rank, x in waits.items()})
print("the one for whom all wait: rank", min(waits, key=waits.get))

# %% [markdown]
# On GPUs NVIDIA's own tools see more (not run here):
#
# ```bash
# nsys profile --trace=cuda,nvtx,osrt -o rank%q{RANK} python train.py
# ncu --set full --kernel-name regex:gemm --launch-count 3 -o gemm python train.py
# ```
#
# nsys shows a timeline of kernels, NCCL and NVTX ranges; ncu takes one kernel apart, and runs it several times for that: never under collectives that others wait in.
