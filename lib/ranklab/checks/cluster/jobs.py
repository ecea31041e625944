"""The exercises of lab 15 on jobs, in the order of the lab."""

from ranklab.checks.cluster.manifest import check_train_job_manifest
from ranklab.checks.cluster.sbatch import check_sbatch_script
from ranklab.checks.exercise import Exercise
from ranklab.cluster.manifest import train_job_manifest
from ranklab.cluster.sbatch import sbatch_script

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
)
