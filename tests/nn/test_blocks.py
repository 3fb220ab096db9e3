"""What is compiled of a net: its repeated blocks, and the large methods that its modules name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from visgen.model import Model
from visgen.nn.blocks import compile_blocks
from visgen.objectives.next_token import NextTokenNet

STILL = {"token_dropout": 0.0, "residual_dropout": 0.0, "mlp_dropout": 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_and_the_loss_are_whole_graphs_and_change_nothing(
    make_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    net, compiled, run = NextTokenNet(make_model(**STILL).train().requires_grad_()), [], torch.compile

    def recorded(method: Any) -> Any:
        compiled.append(method.__self__)
        return run(method, backend="aot_eager", fullgraph=True)

    given: Any = torch.arange(48).view(3, 16) % 16, {"label": torch.tensor([0, 1, 2])}, None
    found = []
    for _ in range(2):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss, _ = net(*given)
        found.append([loss, *torch.autograd.grad(loss, list(net.parameters()))])
        if not compiled:
            monkeypatch.setattr(torch, "compile", recorded)
            assert compile_blocks(net)
    assert compiled == [*net.model.backbone.layers, net.model.head]
    near = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 2e-2}
    assert all(torch.allclose(a, b, **near) for a, b in zip(*found, strict=True))


def test_a_net_without_blocks_is_left_to_be_compiled_whole(make_model: Callable[..., Model]) -> None:
    head = make_model().head
    before = head.loss
    assert not compile_blocks(head) and head.loss == before
