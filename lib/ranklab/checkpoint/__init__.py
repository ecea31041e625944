"""A checkpoint on disk: all that a run needs to go on as if it had never stopped.

    run/step-000100-save-2/rank-00000.pt   boxes of named tensors, random state, what is one rank's
                           rank-00001.pt
                           index.json      written last: what lies where, checksums, step, settings

    save.py       save_checkpoint: each box is written once, by the first rank that holds it
    load.py       load_checkpoint: on any layout, or not at all; RunFingerprint
    reshard.py    reshard_checkpoint: tensors of one layout fill the tensors of another
    consensus.py  RankConsensus: an error on one rank becomes an error on all
    files.py      the folders: complete or no checkpoint; checksums

A folder without index.json is no checkpoint: whenever a run is killed, the last good one stays. No
two saves share a folder, not even of two jobs on one disk, for making a folder succeeds only once.

Tensors are known by name, shape and offset: what was saved on one layout is loaded on any other
(trainer.Piece). torch.distributed.checkpoint has the same idea, and renames its .metadata
into place last, so its new folder is also complete or no checkpoint. But it has no checksums, and
no shards that begin in the middle of a row, as ZeRO's do; and by default it overwrites the files
of a checkpoint in a folder that exists (filesystem.py of torch 2.13).
"""

from ranklab.checkpoint.load import RunFingerprint, load_checkpoint
from ranklab.checkpoint.reshard import overlap, reshard_checkpoint
from ranklab.checkpoint.save import save_checkpoint

__all__ = [
    "RunFingerprint", "load_checkpoint", "overlap", "reshard_checkpoint", "save_checkpoint",
]
