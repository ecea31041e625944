"""Lab 15: scripts and manifests that lose a job or a rank."""

from mutants import mutant

from ranklab.cluster.manifest import train_job_manifest
from ranklab.cluster.sbatch import sbatch_script

WRONG = [mutant(sbatch_script, *edits, says=says, called=called) for *edits, says, called in (
    ("--ntasks-per-node=1 --gpus", "--ntasks-per-node={job.gpus} --gpus", "A task is a torchrun",
     "a_task_for_each_gpu"),
    ("--signal=TERM@{", "--signal=B:TERM@{", "With B: the batch shell alone", "batch_shell_alone"),
    ("TERM@{job.save_seconds + 60}", "TERM@{job.save_seconds}", "--signal is 'TERM@240', not "
     "'TERM@300'", "no_room_after_the_save"),
    ("srun --cpus-per-task={cpus}", "srun", "srun does not take it over", "no_cpus"),
    ("{shlex.join(job.command)}", "{' '.join(job.command)}", "the shell says .*matching",
     "no_quotes"),
    ('head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
     "head=${{SLURM_JOB_NODELIST%%,*}}", "meet at 'gpu.07'", "list_cut_at_a_comma"),
    ("$((20000 + SLURM_JOB_ID % 10000))", "29400", "meet at one port, 29400", "one_port"),
    ("${{SLURM_RESTART_COUNT:-0}}", "$SLURM_RESTART_COUNT", "In the first life",
     "no_default"),
    ("-lt {job.requeues}", "-lt {job.restarts}", "after 3 requeues of 4: it requeues ''",
     "restarts"),
    ("code=$?\n", 'echo "srun has ended"\ncode=$?\n', "exit code for the next command",
     "code_of_another"),
)]  # fmt: skip

WRONG += [mutant(train_job_manifest, *edits, says=says, called=called) for *edits, says, called in (
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
