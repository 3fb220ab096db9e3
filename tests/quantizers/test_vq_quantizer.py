"""Vector quantizer: look-up against a naive twin, initialisation, restarts, statistics, ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pair import spawn_pair

from visgen.config import build
from visgen.quantizers import vq
from visgen.quantizers.vq import Config, nearest


def naive(z: torch.Tensor, table: torch.Tensor) -> list[int]:
    """First of the nearest rows, one pair at a time in float64."""
    found = []
    for vector in z.double():
        distances = [(vector - row).square().sum().item() for row in table.double()]
        found.append(distances.index(min(distances)))
    return found


def make(**settings) -> vq.VQ:
    torch.manual_seed(0)
    return build(Config(**{"codes": 16, "channels": 4, **settings}))


def clusters(count: int, tokens: int, channels: int = 4, noise: float = 0.02, seed: int = 1) -> torch.Tensor:
    """[1, tokens, channels]: noisy copies of `count` random directions, each equally often."""
    rng = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(count, channels, generator=rng), dim=-1)
    return (centres.repeat(tokens // count, 1) + noise * torch.randn(tokens, channels, generator=rng))[None]


# ----------------------------------------------------------------------------------------------------- look-up


@pytest.mark.parametrize("channels", [3, 8, 40])  # 40 goes through the matrix product
@pytest.mark.parametrize("budget", [2**24, 100])  # 100: pieces of 4 tokens
def test_nearest_equals_the_naive_twin(monkeypatch, channels, budget):
    monkeypatch.setattr(vq, "BUDGET", budget)
    torch.manual_seed(0)
    z, table = torch.randn(50, channels), torch.randn(25, channels)
    table[7] = table[20] = table[3]  # exact ties: the first wins
    z[:5] = table[3]
    ids, distances = nearest(z, table)
    assert ids.tolist() == naive(z, table)
    assert ids[:5].tolist() == [3] * 5
    torch.testing.assert_close(distances, (z - table[ids]).square().sum(1), atol=1e-4, rtol=1e-4)


def test_ids_do_not_depend_on_pieces_or_batch(monkeypatch):
    """Near-ties are where rounding would tell: bitwise equal scores are needed."""
    torch.manual_seed(0)
    table = F.normalize(torch.randn(1, 8) + 1e-4 * torch.randn(300, 8), dim=-1)
    z = F.normalize(torch.randn(500, 8), dim=-1)
    whole = nearest(z, table)
    monkeypatch.setattr(vq, "BUDGET", 300 * 7)
    pieces = nearest(z, table)
    assert torch.equal(whole[0], pieces[0]) and torch.equal(whole[1], pieces[1])
    assert torch.equal(nearest(z[123:124], table)[0], whole[0][123:124])


def test_normalised_at_lookup_and_stored_as_it_is():
    quantizer = make()
    with torch.no_grad():
        quantizer.table.mul_(torch.rand(16, 1) + 0.5)
    z = torch.randn(2, 9, 4)
    ids = quantizer.encode(z)
    assert ids.flatten().tolist() == naive(F.normalize(z, dim=-1).view(-1, 4), F.normalize(quantizer.table, dim=-1))
    torch.testing.assert_close(quantizer.embed(ids).norm(dim=-1), torch.ones(2, 9))
    assert (quantizer.table.norm(dim=-1) - 1).abs().max() > 0.1
    assert torch.equal(quantizer.encode(z * 7), ids)
    assert not torch.equal(make(normalise=False).encode(z * 7), make(normalise=False).encode(z))


def test_losses_and_straight_through_gradient():
    quantizer, z = make(commitment=0.5), torch.randn(2, 9, 4, requires_grad=True)
    out = quantizer(z)
    assert set(out.losses) == {"codebook", "commitment"}
    unit, codes = F.normalize(z, dim=-1), F.normalize(quantizer.table, dim=-1)[out.ids]
    torch.testing.assert_close(out.vectors, codes)
    torch.testing.assert_close(out.losses["codebook"], (codes - unit).square().mean())
    torch.testing.assert_close(out.losses["commitment"], 0.5 * (codes - unit).square().mean())
    upstream = torch.randn(2, 9, 4)
    (given,) = torch.autograd.grad((out.vectors * upstream).sum(), z, retain_graph=True)
    (wanted,) = torch.autograd.grad((F.normalize(z, dim=-1) * upstream).sum(), z)
    torch.testing.assert_close(given, wanted)
    assert torch.autograd.grad(out.losses["codebook"], z, retain_graph=True, allow_unused=True) == (None,)
    assert torch.autograd.grad(out.losses["commitment"], quantizer.table, allow_unused=True, retain_graph=True) == (
        None,
    )
    (grad,) = torch.autograd.grad(out.losses["codebook"], quantizer.table)
    assert set(grad.abs().sum(1).nonzero().flatten().tolist()) == set(out.ids.unique().tolist())


def test_float32_under_autocast():
    quantizer, z = make(), torch.randn(2, 9, 4)
    wanted = quantizer(z)
    with torch.autocast("cpu", torch.bfloat16):
        found = quantizer(z)
    assert found.vectors.dtype == torch.float32
    assert torch.equal(found.ids, wanted.ids) and torch.equal(found.losses["codebook"], wanted.losses["codebook"])


def test_entropy_is_computed_only_when_weighed(monkeypatch):
    monkeypatch.setattr(vq, "ENTROPY_ROWS", 5)
    seen = []
    monkeypatch.setattr(
        vq.VQ, "_entropy", lambda self, z, table, real=vq.VQ._entropy: seen.append(1) or real(self, z, table)
    )
    z = torch.randn(1, 10, 4)
    assert "entropy" not in make()(z).losses and not seen
    quantizer = make(entropy=2.0, temperature=0.5)
    found = quantizer(z).losses["entropy"]
    unit, table = F.normalize(z[0, ::2], dim=-1), F.normalize(quantizer.table, dim=-1)
    p = torch.softmax(-torch.cdist(unit, table).square() / 0.5, -1)
    wanted = torch.special.entr(p).sum(1).mean() - torch.special.entr(p.mean(0)).sum()
    torch.testing.assert_close(found, 2 * wanted, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------- initialisation and restart


def test_bypass_then_one_initialisation():
    quantizer, z = make(init_after=2), clusters(16, 160)
    first = quantizer.table.detach().clone()
    for _ in range(2):
        out = quantizer(z)
        torch.testing.assert_close(out.vectors, F.normalize(z, dim=-1))
        assert sum(out.losses.values()) == 0
        sum(out.losses.values()).backward()
        assert torch.equal(quantizer.table.grad, torch.zeros_like(first))  # in the graph, as DDP wants, but unmoved
    assert torch.equal(quantizer.table, first)
    out = quantizer(z)
    assert out.metrics["restarts"] == 16
    rows, vectors = quantizer.table.detach(), F.normalize(z[0], dim=-1)
    assert all((vectors == row).all(1).any() for row in rows)  # drawn from the batch
    assert out.losses["codebook"] > 0
    torch.testing.assert_close(out.vectors, quantizer.embed(out.ids))
    second = rows.clone()
    quantizer(z)
    assert torch.equal(quantizer.table, second)


def test_resuming_does_not_initialise_again():
    quantizer, z = make(init_after=1), clusters(16, 160)
    for _ in range(2):
        quantizer(z)
    again = make(init_after=1)
    again.load_state_dict(quantizer.state_dict())
    before = again.table.detach().clone()
    other = clusters(16, 160, seed=9)
    assert torch.equal(again(other).ids, quantizer(other).ids)
    assert torch.equal(again.table, before)
    fresh = make(init_after=1)
    fresh(other)
    fresh(other)
    assert not torch.equal(fresh.table, before)  # what a lost flag would do


def test_restart_revives_dead_codes_and_resets_their_share():
    quantizer, z = make(restart_below=0.1, decay=0.5), clusters(16, 160)
    with torch.no_grad():
        quantizer.table[3:] = quantizer.table[0]  # copies of code 0, which wins every tie: all unused
        quantizer.share[5] = 0.01
    old, alive = quantizer.table.detach().clone(), [i for i in range(16) if i != 5]
    out = quantizer(z)
    assert out.metrics["restarts"] == 1
    assert torch.equal(quantizer.table[alive], old[alive])
    row = quantizer.table[5].detach()
    assert (F.normalize(z[0], dim=-1) == row).all(1).any()
    assert 5 in out.ids  # in use at once
    expected = 0.5 * 1 + 0.5 * (out.ids == 5).sum() * 16 / 160  # from 1, not from 0.01
    torch.testing.assert_close(quantizer.share[5], expected)
    for _ in range(30):
        out = quantizer(z)
    assert out.metrics["usage"] == 1
    assert out.metrics["perplexity"] > 14
    assert out.metrics["restarts"] == 0


def test_restart_goes_where_tokens_are_served_badly():
    """999 tokens sit on a code, 1 far from all: the dead code takes the lonely one."""
    quantizer = make(codes=2, channels=2, restart_below=0.1)
    z = torch.tensor([[1.0, 0.0]]).repeat(1000, 1)[None]
    z[0, 577] = torch.tensor([0.0, 1.0])
    with torch.no_grad():
        quantizer.table.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        quantizer.share[1] = 0
    quantizer(z)
    torch.testing.assert_close(quantizer.table[1].detach(), torch.tensor([0.0, 1.0]))


def test_restart_until_and_eval_mode():
    quantizer, z = make(restart_below=0.1, restart_until=1), clusters(16, 160)
    quantizer.share.zero_()
    assert quantizer(z).metrics["restarts"] == 16
    quantizer.share.zero_()
    assert quantizer(z).metrics["restarts"] == 0
    state = {k: v.clone() for k, v in quantizer.state_dict().items()}
    quantizer.eval()(z)
    assert all(torch.equal(v, state[k]) for k, v in quantizer.state_dict().items())


def test_fewer_tokens_than_codes():
    quantizer = make(init_after=0, restart_below=0.1)
    out = quantizer(torch.randn(1, 5, 4))
    assert out.ids.unique().numel() == 5
    assert torch.isfinite(quantizer.table).all()


def test_a_moving_share_moves_by_one_minus_the_decay():
    quantizer, z = make(codes=4, decay=0.9).train(), torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(quantizer.encode(z).flatten(), minlength=4)
    assert counts.unique().numel() > 1, "shares that differ"
    before = quantizer.share.clone()
    quantizer(z)
    torch.testing.assert_close(quantizer.share, 0.9 * before + 0.1 * counts * 4 / 8)


def test_usage_forgets_codes_after_the_window():
    quantizer = make(window=2)  # 32 tokens
    every = quantizer.table.detach()[None]
    assert quantizer(every).metrics["usage"] == 1
    one = every[:, :1].repeat(1, 8, 1)
    usages = [quantizer(one).metrics["usage"].item() for _ in range(5)]
    assert usages == [1, 1, 1, 1 / 16, 1 / 16]


# ------------------------------------------------------------------------------------------------------- ranks


def _rank(rank: int, world: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.set_num_threads(1)
    quantizer = make(codes=32, init_after=1, restart_below=0.3, decay=0.8, entropy=0.1)
    restarts = 0.0
    for step in range(20):
        out = quantizer(clusters(8, 48, noise=0.3, seed=100 * rank + step))
        restarts += out.metrics["restarts"].item()
        with torch.no_grad():
            quantizer.table.add_(0.01 * torch.randn(32, 4, generator=torch.Generator().manual_seed(step)))
    torch.save({**quantizer.state_dict(), "restarts": restarts, "usage": out.metrics["usage"]}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_stay_identical_through_restarts(tmp_path):
    spawn_pair(_rank, 2, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["restarts"] > 32  # the initialisation and some more
    for name, value in first.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[name])), name
    assert first["steps"] == 20
