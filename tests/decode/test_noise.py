"""Counter-based noise: equal to Python's integers, distributed as promised, independent of the batch."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from scipy import stats
from torch import Tensor

from visgen.decode.noise import Noise, Stream, mix

BIG = [0, 1, 7, 2**31, 2**62 + 12345, 2**63 - 1, -1, -(2**63), -987654321]


def _values(
    seeds: int = 200, index: int = 25, lanes: int = 20, stream: int = Stream.TOKEN, iteration: int = 0
) -> Tensor:
    """Uniform noise [seeds, index, lanes], 1e5 values by default."""
    noise = Noise(torch.arange(seeds))
    return noise.uniform(torch.arange(index).expand(seeds, -1), lanes, stream, iteration).double()


def test_mixing_equals_python_integers() -> None:
    expected = [reference.mix(x) for x in BIG]
    assert [x % 2**64 for x in mix(torch.tensor(BIG)).tolist()] == expected


def test_mixing_function_is_splitmix64() -> None:
    """First outputs of the published generator from state 0: finaliser of multiples of the golden gamma."""
    assert reference.mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert reference.mix(2 * 0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@pytest.mark.parametrize("iteration", [0, 1, 2, 3, 1000, 2**40])
def test_bits_equal_python_integers(iteration: int) -> None:
    index = torch.tensor([[0, 1, 255], [9, 2**20, 4]])
    for stream in Stream:
        for seeds in ([0, 1], [-5, 2**62], BIG[-2:]):
            noise = Noise(torch.tensor(seeds))
            found = noise.bits(index, 3, stream, iteration)
            expected = [
                [[reference.bits(s, i, lane, stream, iteration) for lane in range(3)] for i in row]
                for s, row in zip(seeds, index.tolist(), strict=True)
            ]
            assert found.tolist() == expected
            rows = torch.full((2, 1), iteration)
            assert torch.equal(noise.bits(index, 3, stream, rows), found), "a number and a tensor say the same"
            assert torch.equal(noise.bits(index, 3, stream, rows.expand(2, 3)), found)


def test_every_row_and_token_may_have_its_own_iteration() -> None:
    noise, index = Noise(torch.tensor([3, 4])), torch.tensor([[0, 1], [2, 2]])
    found = noise.bits(index, 2, Stream.ACCEPT, torch.tensor([[0, 5], [6, 7]]))
    assert found[0, 1].tolist() == [reference.bits(3, 1, lane, Stream.ACCEPT, 5) for lane in range(2)]
    assert found[1, 0].tolist() == [reference.bits(4, 2, lane, Stream.ACCEPT, 6) for lane in range(2)]
    assert found[1, 1].tolist() == [reference.bits(4, 2, lane, Stream.ACCEPT, 7) for lane in range(2)]


def test_uniform_and_gumbel_equal_their_twins() -> None:
    noise, index = Noise(torch.tensor([11])), torch.tensor([[5]])
    uniform, gumbel = noise.uniform(index, 50, 2)[0, 0].tolist(), noise.gumbel(index, 50, 2)[0, 0].tolist()
    for lane in range(50):
        assert math.isclose(uniform[lane], reference.uniform(11, 5, lane, 2), rel_tol=2e-7)
        assert math.isclose(gumbel[lane], reference.gumbel(11, 5, lane, 2), rel_tol=1e-4, abs_tol=1e-5)


def test_uniform_range_mean_and_variance() -> None:
    u = _values()
    assert 0 < u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1
    n = u.numel()
    assert abs(u.mean() - 0.5) < 4 / math.sqrt(12 * n)
    assert abs(u.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("bits", [0, -1, 2**63 - 1, -(2**63), 1 << 24])
def test_extreme_bits_stay_inside_the_open_interval(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noise, "bits", lambda self, index, lanes, *rest: torch.full((1, 1, lanes), bits))
    noise, index = Noise(torch.tensor([0])), torch.tensor([[0]])
    assert 0 < noise.uniform(index, 1, 0) < 1
    assert noise.gumbel(index, 1, 0).isfinite().all() and noise.normal(index, 1, 0).isfinite().all()


@pytest.mark.parametrize("law", ["gumbel_r", "norm"])
def test_gumbel_and_normal_follow_their_laws(law: str) -> None:
    noise, index = Noise(torch.arange(100)), torch.arange(20).expand(100, -1)
    draw = noise.gumbel if law == "gumbel_r" else noise.normal
    values = draw(index, 10, Stream.DENOISE).flatten().double().numpy()
    assert stats.kstest(values, law).pvalue > 1e-3
    assert stats.kstest(1.1 * values, law).pvalue < 1e-6, "positive control"


def test_the_right_tail_of_the_gumbel_is_not_cut() -> None:
    """The largest of 1e6 draws is about ln 1e6; float32 uniforms that round to 1 would cap it at 16.6."""
    noise = Noise(torch.arange(1000))
    top = noise.gumbel(torch.arange(10).expand(1000, -1), 100, 0).max()
    assert 11 < top < 25
    assert Noise.uniform(noise, torch.arange(10).expand(1000, -1), 100, 0).min() < 1e-5


def test_lanes_of_one_normal_draw_are_independent() -> None:
    noise, index = Noise(torch.arange(500)), torch.arange(50).expand(500, -1)
    x = noise.normal(index, 4, Stream.DENOISE).double().reshape(-1, 4)
    assert (torch.corrcoef(x.T) - torch.eye(4)).abs().max() < 4 / math.sqrt(len(x))


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) * math.sqrt(a.numel())


def test_streams_iterations_seeds_positions_and_lanes_are_uncorrelated() -> None:
    u = _values()
    others = {f"stream {s.name}": _values(stream=s) for s in Stream if s != Stream.TOKEN}
    others |= {f"iteration {i}": _values(iteration=i) for i in (1, 2, 3, 64)}
    assert _correlation(u, u) > 100, "positive control"
    for name, other in others.items():
        assert abs(_correlation(u, other)) < 4, name
        assert not (u == other).all(-1).any(), name
    assert abs(_correlation(u[1:], u[:-1])) < 4, "seeds"
    assert abs(_correlation(u[:, 1:], u[:, :-1])) < 4, "positions"
    assert abs(_correlation(u[..., 1:], u[..., :-1])) < 4, "lanes"
    assert abs(_correlation(u[1:, :-1], u[:-1, 1:])) < 4, "seed + position: a sum of counters would repeat"
    everything = Noise(torch.arange(200)).bits(torch.arange(25).expand(200, -1), 20, Stream.TOKEN)
    assert everything.unique().numel() == everything.numel() == u.numel()


def test_no_two_streams_are_one() -> None:
    assert len(Stream) == len(Stream.__members__), "two names of one number are one member"


def test_a_row_depends_on_its_seed_alone() -> None:
    seeds, index = torch.tensor([7, 3, 9, 3]), torch.tensor([[0, 4], [1, 2], [5, 6], [1, 2]])
    together = Noise(seeds).gumbel(index, 6, Stream.TOKEN)
    for row in range(4):
        alone = Noise(seeds[row : row + 1]).gumbel(index[row : row + 1], 6, Stream.TOKEN)
        assert torch.equal(together[row], alone[0])
    assert torch.equal(together[1], together[3])
    one_by_one = [Noise(seeds).gumbel(index[:, w : w + 1], 6, Stream.TOKEN) for w in range(2)]
    assert torch.equal(torch.cat(one_by_one, 1), together), "nor on the window"
    assert torch.equal(Noise(seeds).gumbel(index, 3, Stream.TOKEN), together[..., :3]), "nor on the number of lanes"
