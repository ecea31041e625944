"""A checkpoint on disk: everything a run needs to continue as if it had never stopped.

    run/step-000100-save-2/rank-00000.pt   boxes of named tensors, random state, one rank's state
                           rank-00001.pt
                           index.json      written last: location of tensors, checksums, step,
                                           settings

    save.py       save_checkpoint: each box is written once, by the first rank that holds it
    load.py       load_checkpoint: on any layout, or not at all; RunFingerprint
    reshard.py    reshard_checkpoint: fills the tensors of one layout from those of another
    consensus.py  RankConsensus: an error on one rank becomes an error on all
    files.py      the folders, each a complete checkpoint or none; checksums

A folder without index.json is not a checkpoint: whenever a run is killed, the last good checkpoint
stays. No two saves share a folder, not even saves of two jobs on one disk, because making a folder
succeeds only once.

Tensors are identified by name, shape and offset: a checkpoint of one layout loads on any other
(trainer.Piece). torch.distributed.checkpoint has the same idea, and renames its .metadata into
place last, so its new folder is also either a complete checkpoint or none. But it has no checksums,
and no shards that begin in the middle of a row, such as ZeRO's; and by default it overwrites the
files of a checkpoint in an existing folder (filesystem.py of torch 2.13).
"""

from ranklab.checkpoint.load import RunFingerprint, load_checkpoint
from ranklab.checkpoint.reshard import overlap, reshard_checkpoint
from ranklab.checkpoint.save import save_checkpoint

__all__ = [
    "RunFingerprint", "load_checkpoint", "overlap", "reshard_checkpoint", "save_checkpoint",
]
