#!/bin/bash
# A lab's project by torchrun: the name of the lab's idea, then the project's own options.
#     labs/jobs/torchrun.sh ranks                                    # on one machine
#     NODES=2 HEAD=node-0 labs/jobs/torchrun.sh collectives --nodes 2  # on every node
# HEAD is the first node's name. As many ranks as GPUs, or four on the CPU; RANKS=8 says otherwise.
set -eu
idea=${1:?"say which lab, such as: labs/jobs/torchrun.sh ranks"}
shift
RANKS=${RANKS:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)}
[ "${RANKS:-0}" -gt 0 ] || RANKS=4

if [ "${NODES:-1}" -eq 1 ]; then
    where=(--standalone)
else
    where=(--nnodes="$NODES" --rdzv-backend=c10d --rdzv-endpoint="$HEAD:29400" --rdzv-id="$idea")
fi
exec .venv/bin/torchrun "${where[@]}" --nproc-per-node="$RANKS" -m "ranklab.projects.$idea" "$@"
