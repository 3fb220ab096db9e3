"""The law by what its logits are a linear map of, against the plain law."""

from __future__ import annotations

import pytest
import torch

from visgen.nn import projected
from visgen.nn.categorical import Categorical
from visgen.nn.projected import Projected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_at_a_time_are_the_whole(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    h, weight = (torch.randn(shape, generator=rng).to(dtype) for shape in ((3, 7, 16), (50, 16)))
    plain = Categorical((h @ weight.T).float())
    monkeypatch.setattr(projected, "ROWS", 4)
    law = Projected(h, weight)
    assert torch.equal(law.likeliest(), plain.likeliest()) and law.vocab == 50
    assert "logits" not in vars(law), "all of them at once were not needed"
    assert torch.equal(law.logits, plain.logits)
    assert torch.equal(law.warped(lambda x: 2 * x).logits, 2 * plain.logits)


def test_known_tokens_are_certain() -> None:
    rng = torch.Generator().manual_seed(0)
    h, weight = torch.randn(2, 5, 8, generator=rng), torch.randn(11, 8, generator=rng)
    tokens, mask = torch.randint(11, (2, 5), generator=rng), torch.arange(10).view(2, 5) % 2 == 0
    law, plain = Projected(h, weight), Categorical(h @ weight.T)
    found, wanted = law.pin(tokens, mask), plain.pin(tokens, mask)
    assert torch.equal(found.likeliest(), wanted.likeliest()) and torch.equal(found.likeliest()[mask], tokens[mask])
    assert torch.equal(law.pin(tokens, mask).pin(tokens, ~mask).likeliest(), tokens)
    assert torch.allclose(law.pin(tokens, mask).logits, plain.pin(tokens, mask).logits)
