# %% [markdown]
# ### 4.5 Too little work
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 8 lines
#
# A run that hangs costs as much as a run that works. Somebody must hear of it, also at night. **Prometheus** asks each rank for its numbers ("scrapes" it), here every 15 seconds, and keeps them. It also evaluates *rules*: where the expression of an alert rule has a result, the alert is active for each series of the result. After the time in `for` it fires, and Alertmanager sends it to a person, or to a script that drains the node (Prometheus' guide, "Alerting rules").
#
# **MFU** is the share of the GPUs' FLOP/s that the model's own FLOPs use (lab 01). It falls for every reason that makes a run slow.
#
# **Predict.** 16 GPUs do 989 TFLOP/s each. Together they train on 100,000 tokens a second. The model of 7 billion parameters needs 42 GFLOPs for a token. How many percent is the MFU?

# %%
check(cluster_mfu_percent=...)

# %% [markdown]
# The language of the expression is PromQL. This is what you need. `c` is a counter and `g` a gauge, both with the labels run and rank.
#
# | PromQL | gives |
# |---|---|
# | `g` | the newest sample of each series; nothing where the last scrape has failed |
# | `rate(c[5m])` | growth per second of each series over five minutes. Where a counter falls it has begun again at 0 |
# | `avg_over_time(g[1m])` | the mean of the samples of a minute |
# | `sum by (run) (g)`, `quantile by (run) (0.5, g)` | one number for each run |
# | `x / on (run) group_left y` | each series of x divided by the one of y with the same run |
# | `x < 0.3` | the series of x that are below 0.3; the others are gone |
# | `for: 10m` | the alert fires when it was active at each evaluation of ten minutes |
#
# The check judges a rule by what it does: series go in, alerts come out, in ten stories. It evaluates PromQL in Python; a test holds that equal to Prometheus' own `promtool`. Write a time as Prometheus does: `"10m"`.

# %%
def mfu_alert_rule(least, minutes):
    """A Prometheus rule, a dict with the keys of a rules file: it alerts, once a run, where the
    run's MFU has been below `least` for `minutes` minutes.

    MFU      FLOPs of the model in a second / FLOP/s of all its GPUs, over some minutes: a step may
             take more than a minute, and counters jump
    fires    within 2 x minutes, and until it is well again, `minutes` more at most; also where
             ranks hang, where scrapes fail now and then, where another run is fine
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
# Your rule on an hour of a run. It compiles for 4 minutes, pauses for a checkpoint from minute 15 to 18, and is slow from minute 30 on. When do you hear of it?

# %% tags=["nbval-check-output"]
from ranklab.checks.cluster.series import stepped, trained
from ranklab.cluster import promql
from ranklab.cluster.alerts import alerts

story = trained((0, [(4, 0.0), (15, 0.4), (18, 0.0), (30, 0.4), (60, 0.2)]))
if promql.missing():
    print(promql.missing())
else:
    fired = alerts(mfu_alert_rule(0.3, 10), story, range(0, 3601, 15))
    print(f"run {fired[0][1]['run']}: silent for {fired[0][0] / 60:.0f} minutes")

# %% [markdown]
# ### 4.6 Which rank is slow
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 8 lines
#
# In lab 14 the ranks found the slow one among themselves. A server outside knows the ranks by their labels only, and any number may be missing.
#
# **Predict.** A usual rule is "more than three standard deviations above the mean". Eight ranks: seven need the same time, one needs more. How many standard deviations is it above the mean, however slow it is? (Prometheus' `stddev` is that of a population.)

# %%
check(cluster_deviations=...)

# %%
def straggler_rule(factor, minutes):
    """A Prometheus rule, as a dict: it alerts for each rank that has been slower than `factor`
    times the median rank of its run for `minutes` minutes.

    fires    within 2 x minutes, and until it is well again, `minutes` more at most; also for two
             ranks of eight, where each eighth scrape fails, while another rank is gone
    silent   for what is slow once, even if it stays in the gauge for two scrapes: the first step, a
             checkpoint. A rank that was slow for a third of `minutes`. All slow at once. Some that
             are fast. A run whose steps are longer than another run's. A rank that is gone
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
if not promql.missing():
    plots.step_times(story, 1.2, alerts(straggler_rule(1.2, 5), story, range(0, 2401, 15)))

# %% [markdown]
# Rank 3 has one long step, and it is over before `for` is. Rank 5 stays slow, and you hear of it after five minutes. That is the price of a rule that one step can't fool.

# %% [markdown]
# #### `sick_rank_alarm` - open
# > difficulty 5/5 · importance 4/5 · 50 minutes · about 20 lines
#
# A rule sees one number. A person who looks for a sick GPU sees ten: clock, temperature, corrected memory errors, errors of the link, the wait for data. A bad link makes *all* ranks slow, and no rank's own time shows it. Ranks whose share is larger are slow from the start, and are well. There is no recipe for this one.
#
# Nobody publishes the metrics of a large cluster together with what was wrong. So the recordings are **emulated**. `help(recordings)` says which parts are published, and which are our own choice. There are five kinds of sickness, and eight kinds of health that look like one:

# %%
from ranklab.cluster import recordings
from ranklab.cluster.alarm import play, rule_alarm, score
from ranklab.cluster.recordings import CLOCK, DATA, ECC, LINK, SECONDS, record

for kind, words in (recordings.SICK | recordings.HEALTHY).items():
    print(f"{kind:14} {words}")
plots.recorded(record("hot GPU", seed=3))

# %% [markdown]
# Each run counts between 0 and 1. A sick one gives 1 for an alarm at once, 0 after 15 minutes; a healthy one gives 1; a false alarm gives 0. The mean is the score. An alarm that never fires has 0.62, your straggler rule alone has 0.64, and the library's answer 0.94: its alarm comes after 140 s. Of 520 runs that nobody had looked at one had a false alarm.

# %%
### BEGIN SOLUTION


### END SOLUTION
def sick_rank_alarm(metrics):
    """The rank that is sick, or None: asked at each scrape, with all that was scraped of one run so
    far. Of a sick host any rank.

    metrics  {name: (scrapes, ranks)}, and train_mfu: (scrapes,); a scrape each 15 s, NaN where it
             failed. Not changed. Names, and what may happen to a run: see recordings. Errors are
             counters
    counted  the seconds from onset to alarm; false alarms: in a healthy run, before the onset, of
             another rank. The first alarm ends a run
    least    of 39 recordings that the lab has not shown one may have a false alarm, and their Score
             is 0.88 or more. On 26 that are drawn in that moment it is 0.75 or more
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
# **Prometheus and Alertmanager**, the real ones, on loopback and free ports. Four ranks train, and each serves its numbers at a port of its own. A file for each tells Prometheus where. Rank 2 waits for its data. The rule is yours, with seconds in `for`, and a webhook waits for the alert. (Prometheus looks for new targets every 5 seconds, so this takes about ten.)

# %%
import tempfile

from ranklab.cluster.monitor import missing
from ranklab.projects.cluster.watched import watched_run

if missing():
    print(missing())
else:
    with tempfile.TemporaryDirectory() as folder:
        found = watched_run(folder, straggler_rule(1.5, 5) | {"for": "1s"})
    print(found["alert"]["annotations"]["summary"])
    print(f"{found['seconds']:.0f} s after the start, in step {found['steps']}")

# %% [markdown]
# `labs/jobs/monitoring/` has the files for a cluster: `prometheus.yml`, the two rules, a Grafana dashboard with MFU, tokens/s, the step time of each rank, stragglers and GPUs. `promtool` and `amtool` accept them. The dashboard was never opened, because Grafana was not there; a test evaluates each of its queries. On a cluster the numbers of GPUs come from NVIDIA's dcgm-exporter on each node. Here a stand-in exports its names.
#
# **TensorBoard** reads files, so nothing must run beside the training. This writes what a trainer's History holds, and reads it back:

# %% tags=["nbval-check-output"]
from ranklab.cluster.curves import read_scalars, write_scalars
from ranklab.trainer import History

history = History([1, 50], [3.1, 2.2], [0.0, 950.0], [0.01, 0.02], {50: 2.3})
if promql.missing("tensorboard"):
    print(promql.missing("tensorboard"))
else:
    with tempfile.TemporaryDirectory() as folder:
        write_scalars(folder, history)
        print(*read_scalars(folder).items(), sep="\n")

# %% [markdown]
# `tensorboard --logdir FOLDER` shows the curves. **Weights & Biases** on nodes without a network: `write_wandb(folder, history)` writes the same with `mode="offline"`, and `wandb sync FOLDER` sends it later. `make lab` does not install it; it was run with wandb 0.31.0.
#
# **A trace.** Metrics say who is slow, a trace says why. `torch.profiler` writes a JSON file for each rank, and ui.perfetto.dev opens it. Rank 1 of three computes eight times as much here. Which rank waits least in the all-reduce?

# %%
from ranklab.cluster.curves import read_trace, traced_steps, waits_in_traces

with tempfile.TemporaryDirectory() as folder:
    paths = launch(traced_steps, folder, 1, ranks=3)
    print(read_trace(paths[1])[0])
    waits = waits_in_traces(paths)
print("seconds in all-reduces:", {rank: round(x, 3) for rank, x in waits.items()})
print(f"all others wait for rank {min(waits, key=waits.get)}")

# %% [markdown]
# On GPUs NVIDIA's own tools see more. These two lines were not run here:
#
# ```bash
# nsys profile --trace=cuda,nvtx,osrt -o rank%q{RANK} python train.py
# ncu --set full --kernel-name regex:gemm --launch-count 3 -o gemm python train.py
# ```
#
# nsys shows a timeline of kernels, NCCL and NVTX ranges. ncu takes one kernel apart and runs it several times for that, so give it no collective: the other ranks would wait.
