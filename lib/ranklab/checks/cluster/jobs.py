"""The exercises of lab 15 on jobs, in the order of the lab."""

from ranklab.checks.cluster.manifest import check_train_job_manifest
from ranklab.checks.exercise import Exercise
from ranklab.cluster.manifest import train_job_manifest

JOBS = (
    Exercise(train_job_manifest, check_train_job_manifest, hints=(
        "What counts the nodes, what starts the ranks, and what starts them again?",
        "A TrainJob gives numbers, and Kubeflow makes a JobSet from them. In a JobSet you write "
        "the pods yourself: spec.replicatedJobs[0].template is a Job, and its spec.template a pod.",
        '{"failurePolicy": {"maxRestarts": job.requeues}, "replicatedJobs": [{"name": "node", '
        '"replicas": 1, "template": {"spec": {"parallelism": job.nodes, "completions": job.nodes, '
        '"completionMode": "Indexed", "backoffLimit": 0, "template": {"spec": pods}}}}]}',
    )),
)
