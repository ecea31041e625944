#!/bin/bash
# The same by torchrun (lab 00). Run it on every node, with the first node's name as HEAD:
#     NODES=4 HEAD=node-0 labs/jobs/ranks.torchrun.sh
# On one machine, HEAD and NODES can be left out.
set -eu
RANKS=${RANKS:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)}
[ "${RANKS:-0}" -gt 0 ] || RANKS=4   # no GPU here: four ranks on the CPU

if [ "${NODES:-1}" -eq 1 ]; then
    where=(--standalone)
else
    where=(--nnodes="$NODES" --rdzv-backend=c10d --rdzv-endpoint="$HEAD:29400" --rdzv-id=ranks)
fi
exec .venv/bin/torchrun "${where[@]}" --nproc-per-node="$RANKS" -m ranklab.projects.ranks
