"""Lab 15: scripts, manifests and plans that lose a job, a rank or an hour."""

from mutants import mutant

from ranklab.cluster.manifest import train_job_manifest
from ranklab.cluster.sbatch import sbatch_script
from ranklab.cluster.storage import storage_plan

SIGNAL = "--signal=TERM@{job.save_seconds}"
SRUN = "srun --cpus-per-task={job.cpus * job.gpus} --kill-on-bad-exit=0 \\\\\n" \
    "    --wait={max(30, job.save_seconds)}"
KILLS = SRUN.split(" --kill")[0] + " --kill-on-bad-exit=1"
TRAPPED = "pid=$!\nwait $pid\ncode=$?"
COMMAND = "{shlex.join(job.command)}\ncode=$?"
AGAIN = '"${{SLURM_RESTART_COUNT:-0}}" -lt {job.requeues}'
HEAD = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
PORT = "$head:$((20000 + SLURM_JOB_ID % 10000))"


def trap(action, waits="pid=$!\nwait $pid; wait $pid\ncode=$?"):
    """Edits: the batch shell alone gets a USR1, and does this."""
    return (SIGNAL, SIGNAL.replace("TERM", "B:USR1"), HEAD, f"trap '{action}' USR1\n{HEAD}",
            COMMAND, f"{{shlex.join(job.command)}} &\n{waits}")


WRONG = [mutant(sbatch_script, *edits, says=says, called=called) for *edits, says, called in (
    ("nodes} --ntasks-per-node=1", "nodes} --ntasks-per-node={job.gpus}", "gpus x gpus",
     "a_task_each_gpu"),
    ("--wait={max(30, job.save_seconds)}", "--no-kill", "srun's --wait is 0",
     "no_wait"),
    (SRUN, KILLS, "ends the others while they save", "kill_on_bad_exit"),
    (*trap("scontrol requeue $SLURM_JOB_ID"), "hosts have saved when the script requeues",
     "requeue_in_a_trap"),
    (SIGNAL, SIGNAL.replace("TERM", "USR1"), "torchrun ends at a SIGUSR1", "usr1_to_all"),
    ("head -n 1)", "head -n 1 | cut -c 1-3)", "they meet at 'gpu'", "a_part_of_a_name"),
    (HEAD, "head=${{SLURM_JOB_NODELIST%%,*}}", "meet at 'gpu\\[07'", "list_cut_at_a_comma"),
    (SIGNAL, SIGNAL.replace("TERM", "B:TERM"), "bash runs a trap when", "batch_shell_alone"),
    (*trap("kill -TERM $pid"), "that kills ranks.*SIGKILL", "term_to_srun"),
    (*trap("scancel --signal=TERM $SLURM_JOB_ID", TRAPPED), "A trap ends `wait`", "waits_once"),
    (SIGNAL, SIGNAL.replace("TERM", "B:USR1"), HEAD,
     f"trap 'scancel --signal=TERM $SLURM_JOB_ID' USR1\n{HEAD}",
     "no rank gets.*srun ... & and wait",
     "trap_in_the_foreground"),
    (f" {SIGNAL}", "", "no --signal", "no_signal"),
    (SIGNAL, "--signal=TERM@30", "comes 30 s before the end", "too_late"),
    ("{job.cpus * job.gpus} --kill", "{job.cpus} --kill", "srun is given 7 CPUs", "few_cpus"),
    ("--cpus-per-task={job.cpus * job.gpus} --kill", "--kill", "srun is given 1 CPUs", "no_cpus"),
    (" --requeue --open", " --open", "no --requeue", "no_requeue"),
    (" --open-mode=append", "", "truncates the output", "no_append"),
    ("%x-%j.log", "%x.log", "jobs of one name write into one file", "no_number"),
    ("--time={job.minutes}", "--time={job.minutes}:00:00", "--time is 91800 minutes", "hours"),
    ("--gpus-per-node={job.gpus}", "--gpus={job.gpus}", "2 GPUs a node", "gpus_of_all"),
    ("--gpus-per-node", "--gpu-per-node", "knows no option", "an_unknown_option"),
    ("#!/bin/bash\n", "\n#!/bin/bash\n", "begins with", "an_empty_line_first"),
    ("#!/bin/bash\n", "#!/bin/bash\nset -x\n", "comes after the first command", "a_command_first"),
    ("--requeue --open-mode=append --output=%x-%j.log\n",
     "--requeue --open-mode=append --output=%x-%j.log\nset -e\n", "After set -e", "set_e"),
    (AGAIN, '"$SLURM_RESTART_COUNT" -lt {job.requeues}', "first life.*not requeued", "no_default"),
    (AGAIN, AGAIN.replace("-lt", "-le"), "after 4 restarts of 4: it is requeued", "once_too_often"),
    (AGAIN, '1 -lt 2', "after 4 restarts of 4: it is requeued", "for_ever"),
    ("-lt {job.requeues}", "-lt {job.restarts}", "after 3 restarts of 4.*not requeued", "restarts"),
    ('exit "$code"', "", "the script with [0-9]", "no_exit"),
    ("code=$?\n", 'echo "it has ended"\ncode=$?\n', "not requeued", "code_of_another"),
    ('"$code" -ne 0', '"$code" -eq 1', "first life.*not requeued", "one_code_alone"),
    ("&& sleep 60", "&& sleep 60; exit 0", "the script with 0", "exit_0"),
    ("--nproc-per-node={job.gpus}", "--nproc-per-node={job.gpus * job.nodes}", "is 32, not 8",
     "all_ranks"),
    ("--nnodes={job.nodes}", "--nnodes=1:{job.nodes}", "--nnodes is 1:4", "elastic"),
    ("--max-restarts={job.restarts}", "--max-restarts={job.requeues}", "is 4, not 2", "requeues"),
    ("{shlex.join(job.command)}", '{" ".join(job.command)}', "ranks run|no torchrun", "not_quoted"),
    ('f"export {name}={shlex.quote(text)}"', "f'export {name}=\"{text}\"'", "NOTE is",
     "double_quotes"),
    ("{shlex.quote(text)}", "{text}", "no torchrun ran", "no_quotes"),
    (PORT, "$head:29400", "meet at one port", "one_port"),
    (PORT, "$head:$((20000 + SLURM_JOB_ID))", "port '67", "port_too_large"),
    ('--rdzv-id="$SLURM_JOB_ID"', "--rdzv-id={job.name}", "have one id", "one_id"),
    ("--rdzv-backend=c10d --rdzv-id", "--rdzv-id", "rdzv-backend='(static)?'", "static"),
    (f"{HEAD}\n", "", "they meet at ''", "no_head"),
    ('if job.interface else []', "if True else []", "NCCL_SOCKET_IFNAME is ''", "empty_interface"),
    ('"NCCL_SOCKET_IFNAME", "GLOO', '"NCCL_SOCKET_IFNAMES", "GLOO', "NCCL_SOCKET_IFNAME is None",
     "misspelt"),
    ('"TORCH_ELASTIC_SHUTDOWN_TIMEOUT"', '"TORCH_SHUTDOWN"', "kills its ranks 30 s after", "30_s"),
    ("if job.image else", "if False else", "--container-image is ''", "no_image"),
    ("{image}torchrun", "torchrun", "--container-image is ''", "no_image_2"),
    ("{image}torchrun", "{image}python", "no torchrun ran, but python", "no_torchrun"),
    (SRUN, "env", "torchrun runs without srun|no torchrun", "no_srun"),
)]  # fmt: skip

RANKS = 'f"--nnodes={job.nodes}", '
NODES = '"parallelism": job.nodes, "completions": job.nodes'

WRONG += [mutant(train_job_manifest, *edits, says=says, called=called,
                 RUNTIME={"name": "torch-distributed"}) for *edits, says, called in (
    ('"runtimeRef": {"name": "torch-distributed"}', '"runtimeRef": RUNTIME', "one manifest shows",
     "a_shared_part"),
    ('"numProcPerNode": job.gpus', '"nprocPerNode": job.gpus', "nprocPerNode", "misspelt"),
    ('"numNodes": job.nodes', '"numNodes": job.nodes * job.gpus', "numNodes is 32", "ranks"),
    ('"numNodes": job.nodes', '"numNodes": str(job.nodes)', "not of type .integer", "a_text"),
    ('= str(job.save_seconds)', '= job.save_seconds', "not of type .string", "a_number_in_env"),
    ('"maxRestarts": job.requeues', '"maxRestarts": job.restarts', "not 5.*requeues", "restarts"),
    ('--max-restarts={job.restarts}', '--max-restarts={job.requeues}', "is 5, not 2", "requeues"),
    ('"maxRestarts": job.requeues', '"maxRestart": job.requeues', "maxRestart", "unknown_field"),
    ('"replicas": 1', '"replicas": job.nodes', "replicas are.*4", "replicas"),
    (NODES, NODES.split(",")[0], "completions is None", "no_completions"),
    (NODES, '"parallelism": job.nodes * job.gpus, "completions": job.nodes * job.gpus',
     "is 32, not 4", "a_pod_each_gpu"),
    ('"Indexed"', '"NonIndexed"', "Only Indexed pods have names", "not_indexed"),
    ('"backoffLimit": 0, ', "", "backoffLimit is None", "no_backoff_limit"),
    ('"restartPolicy": "Never", ', "", "OnFailure", "no_restart_policy"),
    ('"terminationGracePeriodSeconds": job.save_seconds', '"enableServiceLinks": False', "has 30 s",
     "no_grace"),
    ("60 * job.minutes", "job.minutes", "activeDeadlineSeconds is 1530", "minutes"),
    ("-node-0-0.{job.name}:", "-node-0-0:", "meet at .gpt-70b-node-0-0:29400", "no_subdomain"),
    ("-node-0-0.{job.name}:", "-0.{job.name}:", "meet at", "a_statefulset_name"),
    ("{job.name}-node-0-0.{job.name}:29400", "localhost:29400", "meet at .localhost", "localhost"),
    (RANKS, "", "--nnodes is 1:1", "no_nnodes"),
    ('"--rdzv-backend=c10d",', "", "rendezvous .static", "no_backend"),
    ('["torchrun", f"--max', '["torchrun", f"--nnodes={job.nodes}", "--rdzv-endpoint=x:1", f"--max',
     "Kubeflow sets PET_MASTER", "endpoint_in_a_trainjob"),
    ('["torchrun", f"--max-restarts={job.restarts}"]', '["python"]', "it runs .'python'", "python"),
    ("list(job.command)", '[" ".join(job.command)]', "torchrun does not take", "one_word"),
    ('"nvidia.com/gpu": job.gpus', '"nvidia.com/gpu": job.gpus * job.nodes', "limit is 32",
     "all_gpus"),
    ('"limits": {"nvidia.com/gpu": job.gpus}, "requests": {', '"requests": {"nvidia.com/gpu": '
     'job.gpus, ', "limit is None GPUs", "no_limit"),
    ('"requests": {"cpu": job.cpus * job.gpus}', '"requests": {"nvidia.com/gpu": 1}',
     "requested, with a limit", "request_is_not_the_limit"),
    ('{"cpu": job.cpus * job.gpus}', '{"cpu": job.cpus}', "7.0 CPUs requested, not 56", "few_cpus"),
    ("job.interface else []", "True else []", "NCCL_SOCKET_IFNAME is ''", "empty_interface"),
    (" | dict(job.environment)", "", "STEPS is None", "no_environment"),
    ('"jobset.x-k8s.io/v1alpha2"', '"jobset.x-k8s.io/v1"', "apiVersion", "a_version"),
    ("{0,38}[a-z0-9])?", "{0,60}[a-z0-9])?", "gggg.*no ValueError", "long_names"),
    ('fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?"', 'match("[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"',
     "gpt.n.*no ValueError", "match"),
    (" or not job.image", "", "'image': ''.*no ValueError", "no_image"),
    ('if kind not in ("TrainJob", "JobSet") or', "if", "kind='Job'", "any_kind"),
    ("list(job.command)", "job.command", "tuples", "a_tuple"),
)]  # fmt: skip


SAVE = "load.checkpoint / (1 if alone else load.nodes) / link"
BUSY = "max(rate / load.nodes / link, rate / system.read)"

WRONG += [mutant(storage_plan, *edits, says=says, called=called) for *edits, says, called in (
    (SAVE, "load.checkpoint / link", "of one link for all", "one_link"),
    (SAVE, "load.checkpoint / load.nodes / link", "of all links", "all_links"),
    (SAVE, "load.copies * " + SAVE, "of copies written", "copies_written_link"),
    ("load.checkpoint / system.write", "load.copies * load.checkpoint / system.write",
     "of copies written", "copies_written"),
    ("min(load.link, system.client)", "load.link", "with the link's own rate", "no_client"),
    ("(1 if alone else ranks) / system", "(1 if alone else load.nodes) / system", "a file of each "
     "node", "a_file_of_a_node"),
    ("(1 if alone else ranks) / system", "0 / system", "without metadata", "no_metadata"),
    ("saving = max(", "saving = sum(", "the sum of three", "sum"),
    ("load.nodes if alone else load.copies", "1", "of each number read once", "read_once"),
    ("read / system.read", "read / system.write", "read at the rate of writing", "write_rate"),
    ("ranks * (1 if alone else load.copies)", "ranks", "a file of each rank opened", "opened"),
    ("1 - load.interval / turn", "turn / load.interval - 1", "of the interval alone", "of_work"),
    ("saving * (not load.beside)", "saving", "also beside the work", "always_lost"),
    ("max(load.interval, busy)", "load.interval", "without waiting for the data", "no_waiting"),
    ("rate / load.nodes / link, rate", "rate / link, rate", "all data by each node|fits is",
     "each_all"),
    (" * load.bytes_per_token", "", "of tokens, not bytes|fits is", "tokens"),
    ("    busy += saving * load.beside\n", "", "fits is True", "beside_costs_nothing"),
    ("busy <= load.interval", "True", "fits is True, not False", "always_fits"),
    ("max(save, key=save.get)", "min(save, key=save.get)", "save_bound is", "fastest"),
    ("max(save, key=save.get)", "max(save.values())", "save_bound is", "seconds_for_a_name"),
)]  # fmt: skip
