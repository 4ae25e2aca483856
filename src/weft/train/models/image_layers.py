"""What the models of images share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Pool(nn.Module):
    """The mean over all points of each channel."""

    def forward(self, image: Tensor) -> Tensor:
        return image.mean((2, 3))


def laid_out(image: Tensor) -> Tensor:
    """The image with the channels of a point side by side, where convolutions are faster so: measured, 1.2 to 2 times.

    Every layer asks for it, as what comes from another rank is laid out plainly; else nothing is copied.
    """
    return image.contiguous(memory_format=torch.channels_last) if image.device.type == "cpu" else image
