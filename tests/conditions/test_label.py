"""The label condition's views: the model is told which view it reads and samples as from plain ones."""

import torch

from visgen.config import build, plugin_config

LABEL = torch.tensor([0, 2, 1])


def made(**values):
    torch.manual_seed(0)
    return build(plugin_config("visgen.conditions", "label", classes=3, **values), 8)


def test_a_view_moves_the_prefix_and_none_is_the_plain_one():
    condition = made(views=4)
    plain, zero, third = (
        condition({"label": LABEL, **view}).vectors
        for view in ({}, {"view": torch.zeros(3, dtype=torch.int64)}, {"view": torch.full((3,), 3)})
    )
    assert torch.equal(plain, zero)
    assert ((plain - third).abs().amax(-1) > 1e-4).all()


def test_a_dropped_label_keeps_its_view_and_the_null_branch_is_plain():
    condition = made(views=4)
    batch = {"label": LABEL, "view": torch.tensor([0, 3, 3])}
    dropped = condition(batch, torch.tensor([True, True, True])).vectors
    null = condition.null(condition(batch)).vectors
    assert torch.equal(dropped[0], null[0])
    assert torch.equal(dropped[1], dropped[2])
    assert not torch.equal(dropped[1], null[1])


def test_without_views_a_batchs_views_are_not_read():
    condition = made()
    assert [name for name, _ in condition.named_parameters()] == ["embedding_table.weight"]
    assert torch.equal(
        condition({"label": LABEL}).vectors, condition({"label": LABEL, "view": torch.full((3,), 9)}).vectors
    )
