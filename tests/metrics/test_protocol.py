import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from visgen.config import UserError
from visgen.metrics.protocol import EvalProtocol, SamplePlan, Score, group_of, hash64, require_same

OTHER = {str: "other", int: 7}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(EvalProtocol)])
def test_hash_changes_with_every_field(field):
    base = EvalProtocol()
    value = "random" if field == "labels" else OTHER[type(getattr(base, field))]
    changed = dataclasses.replace(base, **{field: value})
    assert changed.hash != base.hash
    assert list(base.differences(changed)) == [field]
    with pytest.raises(UserError, match=f"cannot be compared: they differ in {field} .*measure both"):
        require_same({"a": base, "b": base, "c": changed})


def test_hash_is_stable_and_survives_json():
    protocol = EvalProtocol(reference="fashion_mnist/test", reference_n=10_000, size=32, pad="zero-2")
    assert protocol.hash == "d36b879c1c09"
    assert EvalProtocol.from_dict(json.loads(json.dumps(protocol.to_dict()))) == protocol
    assert protocol.id == "fd_efflite0-fashion_mnist/test-10k"
    require_same({"a": protocol, "b": dataclasses.replace(protocol)})
    require_same({})


def test_protocol_is_frozen_and_checks_its_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EvalProtocol().n = 3
    with pytest.raises(UserError, match="labels 'sorted' is unknown; allowed: balanced"):
        EvalProtocol(labels="sorted")
    with pytest.raises(UserError, match="n=0"):
        EvalProtocol(n=0)
    with pytest.raises(UserError, match="unknown field 'resise'"):
        EvalProtocol.from_dict({"resise": "x"})


def test_score_stores_nan_as_null_with_a_reason():
    score = Score(math.nan, se=0.1, terms={"mean": math.inf, "tr": 1.0}, leave_out=(1.0, 2.0), ci95=(0.0, 1.0), n=5)
    stored = json.loads(json.dumps(score.to_dict(), allow_nan=False))
    assert stored["value"] is None and stored["reason"] == "value is nan"
    assert stored["terms"] == {"mean": None, "tr": 1.0, "reason": "mean is inf"}
    back = Score.from_dict(stored)
    assert math.isnan(back.value) and back.leave_out == (1.0, 2.0) and back.ci95 == (0.0, 1.0)
    exact = Score(1.5, n=3)
    assert Score.from_dict(json.loads(json.dumps(exact.to_dict()))) == exact


# ------------------------------------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("world", [1, 3, 7, 8])
def test_shares_partition_the_plan(world):
    plan = SamplePlan(n=5003, classes=10, seed=3)
    whole = plan.rows()
    shares = [plan.rows(rank, world) for rank in range(world)]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    index = torch.cat([share.index for share in shares])
    order = index.argsort()
    assert torch.equal(index[order], torch.arange(5003))
    for name in ("label", "seed"):
        assert torch.equal(torch.cat([getattr(share, name) for share in shares])[order], getattr(whole, name))


def test_classes_are_balanced_in_every_block_and_the_order_varies():
    plan = SamplePlan(n=50_000, classes=1000, seed=1)
    labels = plan.rows().label
    assert torch.equal(labels.bincount(), torch.full((1000,), 50))
    blocks = labels.reshape(50, 1000)
    assert torch.equal(blocks.sort(1).values, torch.arange(1000).expand(50, 1000))
    assert len({tuple(block.tolist()) for block in blocks}) == 50
    assert (blocks[:, 0] != 0).any() and not torch.equal(labels, SamplePlan(50_000, 1000, seed=2).rows().label)


def test_remainder_is_a_seeded_subset():
    tails = [SamplePlan(n=1005, classes=10, seed=s).rows().label[-5:] for s in range(6)]
    assert all(len(tail.unique()) == 5 for tail in tails)
    assert len({tuple(tail.sort().values.tolist()) for tail in tails}) > 1


def test_seeds_are_distinct_int63_and_do_not_depend_on_n_or_classes():
    seeds = SamplePlan(n=100_000, classes=10).rows().seed
    assert seeds.dtype == torch.int64 and int(seeds.min()) >= 0 and len(seeds.unique()) == 100_000
    assert torch.equal(SamplePlan(n=50, classes=3).rows().seed, seeds[:50])
    assert abs(float((seeds.double() / 2**63).mean()) - 0.5) < 0.005
    assert not set(SamplePlan(n=1000, seed=1).rows().seed.tolist()) & set(seeds.tolist())


def test_plan_is_what_it_was():
    """A changed hash would silently change every sample of every published number."""
    plan = SamplePlan(n=100, classes=10, seed=0)
    rows = plan.take(np.array([0, 1, 57]))
    assert rows.label.tolist() == [5, 4, 1] and plan[1] == (4, 5765471757556443867)
    assert rows.seed.tolist() == [1695622787639244048, 5765471757556443867, 5265858607641033616]
    assert plan.hash == "7c0a7931c09a"


def test_hash64_is_splitmix64():
    """First output of SplitMix64 seeded with 0, from the reference implementation."""
    assert int(hash64(0)) == 0xE220A8397B1DCDAF


def test_random_mode_is_uniform_and_unbalanced():
    labels = SamplePlan(n=10_000, classes=10, mode="random").rows().label
    counts = labels.bincount(minlength=10).double()
    assert counts.min() > 880 and counts.max() < 1120 and counts.std() > 5


def test_source_mode_asks_for_each_class_as_often_as_the_data_have_it():
    counts = (5, 0, 70, 25)
    plan = SamplePlan(n=3000, classes=4, seed=4, mode="source", counts=counts)
    label = plan.rows().label
    assert torch.equal(label[:200], SamplePlan(200, 4, 4, "source", counts).rows().label), "a longer plan extends it"
    for stretch in (label, label[:700], label[1234:1334]):
        found = torch.bincount(stretch, minlength=4) / len(stretch)
        assert (found - torch.tensor(counts) / 100).abs().max() < 4 / len(stretch)
    assert not torch.equal(label, SamplePlan(3000, 4, 5, "source", counts).rows().label)
    assert plan.hash != SamplePlan(3000, 4, 4, "source", (5, 1, 70, 25)).hash
    for wrong in ((), (1, 2), (0, 0, 0, 0), (1, 2, -1, 3)):
        with pytest.raises(UserError, match="counts"):
            SamplePlan(10, 4, 0, "source", wrong)


def test_batches_have_one_size_and_mask_the_filling():
    plan = SamplePlan(n=103, classes=4)
    got = [batch for rank in range(3) for batch in plan.batches(8, rank, 3)]
    assert all(len(batch) == 8 for batch in got)
    index = torch.cat([batch.index[batch.valid] for batch in got])
    assert torch.equal(index.sort().values, torch.arange(103))
    assert all((batch.index[~batch.valid] == -1).all() for batch in got)
    last = got[4]
    assert torch.equal(last.label[last.valid], plan.take(last.index[last.valid]).label)


@pytest.mark.parametrize("world", [1, 3, 7])
def test_chunks_partition_the_plan(world):
    plan = SamplePlan(n=10_500, classes=10)
    chunks = [chunk for rank in range(world) for chunk in plan.chunks(2000, rank, world)]
    assert sorted(i for chunk in chunks for i in chunk) == list(range(10_500))
    assert sorted(map(len, chunks)) == [500, *[2000] * 5]


def test_jackknife_groups_are_equal_and_class_balanced():
    plan = SamplePlan(n=50_000, classes=1000)
    rows = plan.rows()
    group = group_of(rows.index, 50_000, 25)
    for g in range(25):
        assert torch.equal(rows.label[group == g].bincount(), torch.full((1000,), 2))


def test_plan_errors_name_the_value():
    with pytest.raises(UserError, match="mode 'sorted' is unknown; allowed: balanced, random"):
        SamplePlan(10, 2, mode="sorted")
    with pytest.raises(UserError, match="seed=-1"):
        SamplePlan(10, 2, seed=-1)
    with pytest.raises(UserError, match=r"0\.\.9"):
        SamplePlan(10, 2).take(np.array([3, 10]))
