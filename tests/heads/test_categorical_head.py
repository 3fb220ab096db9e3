"""The categorical head: smoothing is of the training loss alone."""

from __future__ import annotations

import torch

from visgen.heads.categorical import CategoricalHead, Config

H = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(8, (3, 4), generator=torch.Generator().manual_seed(1))


def test_smoothing_spreads_its_mass_in_training_alone() -> None:
    torch.manual_seed(0)
    head = CategoricalHead(Config(label_smoothing=0.3), 16, 8)
    torch.nn.init.normal_(head.output.weight, std=0.5)
    logs = head.output(H).log_softmax(-1)
    plain = -logs.gather(-1, TOKENS.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(head.eval().loss(H, TOKENS), plain, atol=1e-5)
    assert torch.allclose(head.train().loss(H, TOKENS), 0.7 * plain - 0.3 * logs.mean(-1), atol=1e-5)


def test_it_starts_at_the_uniform_law() -> None:
    assert torch.allclose(CategoricalHead(Config(), 16, 8).loss(H, TOKENS), torch.tensor(8.0).log())
