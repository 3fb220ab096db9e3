"""The Inception v3 of FID (TensorFlow graph of 2015-12-05), as torchvision's network with three corrections.

The graph differs from torchvision's model in its pooling branches: average pools leave out the padding, and the last
block takes a maximum. It has 1008 classes; the Inception Score of the ADM suite uses its logits *without* bias.
The weights are those of the public torch port, whose keys are torchvision's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.inception import (
    BasicConv2d,
    Inception3,
    InceptionA,
    InceptionAux,
    InceptionB,
    InceptionC,
    InceptionD,
    InceptionE,
)

DIMS = {"pool": 2048, "spatial": 2023, "logits": 1008}
_TRUNK = (
    *("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "maxpool1", "Conv2d_3b_1x1", "Conv2d_4a_3x3", "maxpool2"),
    *("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"),
    *("Mixed_7a", "Mixed_7b", "Mixed_7c"),
)


class _InsidePool:
    """Mixed in before a torchvision block: the pooling branch averages over pixels inside the image only."""

    def _forward(self, x: Tensor) -> list[Tensor]:
        return [*super()._forward(x)[:-1], self.branch_pool(self._pool(x))]  # type: ignore[misc, attr-defined]

    @staticmethod
    def _pool(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class _MaxPool(_InsidePool):
    @staticmethod
    def _pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, stride=1, padding=1)


class _BlockA(_InsidePool, InceptionA):
    pass


class _BlockC(_InsidePool, InceptionC):
    pass


class _BlockE(_InsidePool, InceptionE):
    pass


class _LastBlock(_MaxPool, InceptionE):
    pass


class FidInception(Inception3):
    """[B, 3, 299, 299] in [-1, 1) to {"pool": [B, 2048], "spatial": [B, 2023], "logits": [B, 1008]}."""

    def __init__(self) -> None:
        blocks = [BasicConv2d, _BlockA, InceptionB, _BlockC, InceptionD, _BlockE, InceptionAux]
        super().__init__(num_classes=1008, aux_logits=False, inception_blocks=blocks, init_weights=False)
        self.Mixed_7c = _LastBlock(2048)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for name in _TRUNK:
            if name == "Mixed_6d":
                spatial = spatial_features(self.Mixed_6d.branch1x1(x))
            x = getattr(self, name)(x)
        pool = x.mean((2, 3))  # [B, 2048, 8, 8] -> [B, 2048]
        return {"pool": pool, "spatial": spatial, "logits": pool @ self.fc.weight.T}


def spatial_features(branch: Tensor) -> Tensor:
    """The sFID features of a 1x1 branch [B, 192, 17, 17]: its first 7 channels, flattened channels last, [B, 2023]."""
    return branch[:, :7].permute(0, 2, 3, 1).flatten(1)


def state_for(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The port's state dict with the batch counters that its file lacks, so that loading can be strict."""
    means = [key for key in state if key.endswith("bn.running_mean")]
    return {**{key.replace("running_mean", "num_batches_tracked"): torch.tensor(0) for key in means}, **state}
