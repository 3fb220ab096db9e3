"""Random numbers that belong to rows: however these are dealt out, each has its own."""

import math

import pytest
import torch

from visgen.nn.keyed import Rows, normal, uniform, whole

CPU = torch.device("cpu")
KEYS = torch.arange(100, 108)


def drawn(keys):
    rng = Rows(keys)
    return (
        uniform((len(keys),), rng, CPU),
        normal((len(keys), 3, 2), rng, CPU),
        normal((4, len(keys), 5), rng, CPU, axis=1).movedim(1, 0),
        whole(1 << 62, len(keys), rng, CPU),
        uniform((len(keys), 7), rng, CPU),
    )


@pytest.mark.parametrize(
    "parts", [[[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1], [2, 3, 4, 5, 6, 7]], [[7, 6, 5, 4, 3, 2, 1, 0]]]
)
def test_rows_have_their_numbers_in_any_company(parts):
    together = drawn(KEYS)
    for part in parts:
        for mine, all_ in zip(drawn(KEYS[part]), together, strict=True):
            assert torch.equal(mine, all_[part])


def test_draws_and_rows_differ():
    rng = Rows(KEYS)
    first, second = uniform((8, 50), rng, CPU), uniform((8, 50), rng, CPU)
    values = torch.cat([first, second]).flatten()
    assert len(values.unique()) > 0.99 * len(values)
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.15


def test_laws():
    rng = Rows(torch.arange(64))
    u, z, n = uniform((64, 4000), rng, CPU), normal((64, 4000), rng, CPU), whole(3, 64, rng, CPU)
    count = u.numel()
    assert float(u.min()) > 0 and float(u.max()) < 1 and abs(float(u.mean()) - 0.5) < 4 / math.sqrt(12 * count)
    assert abs(float(z.mean())) < 4 / math.sqrt(count) and abs(float(z.var()) - 1) < 4 * math.sqrt(2 / count)
    assert abs(float((z**4).mean()) - 3) < 4 * math.sqrt(96 / count)
    assert set(n.tolist()) == {0, 1, 2}


def test_a_generator_draws_as_torch_does():
    mine, torchs = (torch.Generator().manual_seed(5) for _ in range(2))
    assert torch.equal(uniform((2, 3), mine, CPU), torch.rand(2, 3, generator=torchs))
    assert torch.equal(normal((2, 3), mine, CPU), torch.randn(2, 3, generator=torchs))
    assert torch.equal(whole(9, 4, mine, CPU), torch.randint(9, (4,), generator=torchs))


def test_another_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="must have the 8 rows"):
        uniform((4, 8), Rows(KEYS), CPU)
