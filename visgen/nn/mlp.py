"""Feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visgen.nn.dropout import Dropout


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x), no biases; hidden width floor(2/3 * 4 D) rounded up to `multiple_of` (LlamaGen 2.1)."""

    def __init__(self, width: int, multiple_of: int = 256, dropout: float = 0.0) -> None:
        super().__init__()
        hidden = -(-int(2 * 4 * width / 3) // multiple_of) * multiple_of
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # [B, W, D]
        return self.dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class Projection(nn.Module):
    """fc2(gelu(fc1 x)) with the tanh form of GELU and no biases: zero features stay zero."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, width, bias=False)
        self.fc2 = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [..., C] -> [..., D]
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CodeEmbedding(nn.Module):
    """fc2(gelu(fc1 c)) of code vectors: ids [...] or vectors [..., C] -> [..., D], in place of a table of embeddings.

    Attributes:
        codes: [V, C] float32, the tokenizer's, scaled by `nn.mixture.scale_of`; set before training.
    """

    codes: Tensor

    def __init__(self, vocab: int, channels: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(vocab, channels))
        self.fc1 = nn.Linear(channels, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        values = tokens if tokens.is_floating_point() else self.codes[tokens]
        return self.fc2(F.gelu(self.fc1(values.to(self.fc1.weight.dtype))))


class DropPath(nn.Module):
    """Drops the whole residual branch of a sample with probability `rate`, rescaling the kept ones."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:  # [B, W, D]
        if self.rate == 0.0 or not self.training:
            return x
        keep = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)
