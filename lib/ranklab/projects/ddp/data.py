"""What each rank reads: its share of a shuffled epoch to train on, its share of the held-out set.

To train, torch's DistributedSampler: all ranks shuffle alike, by (seed, epoch), and take every
R-th image. To evaluate, no padding and no image twice, so that the counts are exact.
"""

import itertools
import signal
from functools import partial

import torch
from torch.utils.data import DataLoader, DistributedSampler

from ranklab.data.image_folder import Augment, ImageFolder, SyntheticImages

PREFETCH = 4  # batches that each worker keeps ready


def open_data(config):
    """(images to train on, held-out images); a folder is listed, nothing is decoded yet."""
    if config.data == "synthetic":
        made_up = partial(SyntheticImages, size=config.image, classes=config.classes,
                          seed=config.seed)
        return made_up(config.images), made_up(config.held_out, first=config.images)
    augment = Augment(config.smallest_crop, flip=config.flip, seed=config.seed)
    train = ImageFolder(config.data, "train", config.image, augment)
    return train, ImageFolder(config.data, "val", config.image, classes=train.classes)


class EpochSampler(DistributedSampler):
    """DistributedSampler, but it hands out (epoch, index) and can begin in the middle.

    The epoch travels with each index, because workers that persist have copies of the data set,
    and would not see that an attribute of ours has changed.
    """

    done = 0  # images of this rank that the epoch has already had

    def start(self, epoch, done=0):
        """The next pass is this epoch, without the first `done` images of this rank."""
        self.set_epoch(epoch)  # forgotten, every epoch has the same order
        self.done = done

    def __iter__(self):
        rest = itertools.islice(super().__iter__(), self.done, None)
        return ((self.epoch, index) for index in rest)


def steps_in_epoch(images, config, ranks):
    """How many whole steps so many images are.
    error  ValueError where they are less than one
    """
    if images < (batch := ranks * config.batch_per_rank):
        raise ValueError(f"{images} images are less than one step: {ranks} ranks of "
                         f"batch_per_rank={config.batch_per_rank} take {batch}")
    return images // ranks // config.batch_per_rank


def loader(images, config, sampler, device, **options):
    """This rank's batches of what the sampler names, read by config.workers processes."""
    return DataLoader(
        images, config.batch_per_rank, sampler=sampler, num_workers=config.workers,
        pin_memory=device.type != "cpu",  # so that copies to the GPU run beside its work
        prefetch_factor=PREFETCH if config.workers else None,
        worker_init_fn=outlive_sigterm, generator=torch.Generator(), **options)


def outlive_sigterm(_worker):
    """A SIGTERM to the job reaches the workers too; the last steps still need them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
