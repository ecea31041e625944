"""The exercises of lab 15 on jobs and their storage, in the order of the lab, and predictions."""

from ranklab.checks.cluster.manifest import check_train_job_manifest
from ranklab.checks.cluster.sbatch import check_sbatch_script
from ranklab.checks.cluster.storage import check_storage_plan
from ranklab.checks.exercise import Exercise, Prediction
from ranklab.cluster.manifest import train_job_manifest
from ranklab.cluster.sbatch import sbatch_script
from ranklab.cluster.storage import TECTONIC, Load, storage_plan

# Llama 3 405B: 405.85 billion parameters (planner/published), 2 bytes and 12 of the optimizer
LLAMA = Load(2048, 8, 25e9, 14 * 405.85e9, 1200.0)

JOBS = (
    Exercise(sbatch_script, check_sbatch_script, hints=(
        "First write it for one job by hand. What changes for another job?",
        "shlex.quote is for a value, shlex.join for a command. In an f-string { is {{. Only the "
        "running script knows its host and its number, so let bash compute with them, not Python.",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1); srun .. torchrun .. '
        '--rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" {shlex.join(job.command)}; '
        "code=$?; if [ $code -ne 0 ] && [ ${SLURM_RESTART_COUNT:-0} -lt N ]; then scontrol requeue "
        "$SLURM_JOB_ID; fi; exit $code",
    )),
    Exercise(train_job_manifest, check_train_job_manifest, hints=(
        "What counts the nodes, what starts the ranks, and what starts them again?",
        "A TrainJob gives numbers, and Kubeflow makes a JobSet from them. In a JobSet you write "
        "the pods yourself: spec.replicatedJobs[0].template is a Job, and its spec.template a pod.",
        '{"failurePolicy": {"maxRestarts": job.requeues}, "replicatedJobs": [{"name": "node", '
        '"replicas": 1, "template": {"spec": {"parallelism": job.nodes, "completions": job.nodes, '
        '"completionMode": "Indexed", "backoffLimit": 0, "template": {"spec": pods}}}}]}',
    )),
    Exercise(storage_plan, check_storage_plan, hints=(
        "Through which three places must each byte or file go, and how fast is each?",
        "Make a dict of three times for a save and one for a restart; the largest counts, and is "
        "the bound. A turn is an interval, or longer if data and background saves take longer, and "
        "a save if the job waits for it.",
        "beside = interval * max(data / nodes / link, data / system.read) + saving * background; "
        "turn = max(interval, beside) + saving * (not background); lost = 1 - interval / turn",
    )),
)

PREDICTIONS_OF_JOBS = (
    Prediction(
        "cluster_starts", solution="(3 + 1) * (10 + 1)", unit="times", tolerance=0,
        answer=lambda: 44.0,
        hint="How often do ranks start in one life of the job, and how many lives does it have?",
        mistakes={30.0: "each count comes on top of a first start", 33.0: "each life begins with a "
                  "start that is no restart", 40.0: "the first life is no requeue", 14.0:
                  "torchrun starts its count again in each life of the job"},
        why="11 lives of 4 starts each. Neither count knows of the other.",
    ),
    Prediction(
        "cluster_pods", solution="4 * (3 + 1)", unit="pods", tolerance=0, answer=lambda: 16.0,
        hint="Which pods are made again when one of them fails?",
        mistakes={7.0: "all pods start again, not only the failed one", 12.0: "the first life is "
                  "no restart", 128.0: "a pod has 8 GPUs: its container runs all 8 ranks"},
        why="A JobSet deletes all of its Jobs and makes them again: 4 pods in each of 4 lives.",
    ),
    Prediction(
        "cluster_save_seconds", solution="405.85e9 * 14 / 2e12", unit="seconds", tolerance=0.06,
        answer=lambda: storage_plan(LLAMA, TECTONIC).save_seconds,
        hint="How many bytes are in the checkpoint, and how many can be written in a second?",
        mistakes={405.85e9 * 2 / 2e12: "those are only the weights: the optimizer has 12 bytes "
                  "more for each", 405.85e9 * 14 / 7e12: "that is its peak, not sustained",
                  405.85e9 * 14 * 8 / 2e12: "2 TB/s are bytes, not bits"},
        why="5.7 TB at 2 TB/s. One rank, through one link of 25 GB/s, takes 3.8 minutes.",
    ),
)
