"""Lab 15: manifests that lose a job or a rank."""

from mutants import mutant

from ranklab.cluster.manifest import train_job_manifest

WRONG = [mutant(train_job_manifest, *edits, says=says, called=called) for *edits, says, called in (
    ('"numProcPerNode": job.gpus', '"nprocPerNode": job.gpus', "nprocPerNode", "misspelt"),
    ('"numNodes": job.nodes', '"numNodes": job.nodes * job.gpus', "Nodes, each of them", "ranks"),
    ('= str(job.save_seconds)', '= job.save_seconds', "not of type .string", "a_number_in_env"),
    ('"maxRestarts": job.requeues', '"maxRestarts": job.restarts', "not 4", "restarts"),
    ('"backoffLimit": 0, ', "", "backoffLimit is None", "no_backoff_limit"),
    ('"limits": {"nvidia.com/gpu": job.gpus}, "requests": {', '"requests": {"nvidia.com/gpu": '
     'job.gpus, ', "limits.nvidia.com/gpu is None", "no_limit"),
    ("-node-0-0.{job.name}:", "-node-0-0:", "meet at 'gpt-70b-node-0-0'", "no_subdomain"),
    ('["torchrun", f"--max', '["torchrun", f"--nnodes={job.nodes}", f"--max', "PET_NNODES",
     "nodes_told_twice"),
    ('["torchrun", f"--max', '["torchrun", "--nnodes=1", f"--max', "An option overrides",
     "one_node"),
    ("list(job.command)", '[" ".join(job.command)]', "ranks run|does not take", "one_word"),
)]  # fmt: skip
