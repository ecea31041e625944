#!/bin/bash
# The same by torchrun (lab 02). Run it on every node, with the first node's name as HEAD:
#     NODES=2 HEAD=node-0 labs/jobs/collectives.torchrun.sh --max 1G
# On one machine, HEAD and NODES can be left out. What follows is handed to the project.
set -eu
RANKS=${RANKS:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)}
[ "${RANKS:-0}" -gt 0 ] || RANKS=4   # no GPU here: four ranks on the CPU

if [ "${NODES:-1}" -eq 1 ]; then
    where=(--standalone)
else
    where=(--nnodes="$NODES" --rdzv-backend=c10d --rdzv-endpoint="$HEAD:29400"
           --rdzv-id=collectives)
fi
exec .venv/bin/torchrun "${where[@]}" --nproc-per-node="$RANKS" \
    -m ranklab.projects.collectives --nodes "${NODES:-1}" "$@"
