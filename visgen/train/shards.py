"""Fully sharded weights (FSDP2): which part of a tensor lies here, and the whole of it.

A net is sharded block by block (`blocks.blocks_of`): before a block runs its weights are gathered in the precision of
the computation, afterwards they are freed; gradients are reduced in float32. The optimiser works on the shards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from visgen.config import UserError
from visgen.nn.blocks import blocks_of


def sharding(accelerator: Accelerator) -> bool:
    """Whether this launch asks for sharded weights. (On the CPU accelerate knows no FSDP, but tells of the wish.)

    Raises:
        UserError: it asks for the older kind.
    """
    if not parse_flag_from_env("ACCELERATE_USE_FSDP") or accelerator.num_processes == 1:
        return False
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError("fsdp_version 1 is not supported; launch with configs/accelerate/fsdp8.yaml, which has 2")
    return True


def shard(net: nn.Module, accelerator: Accelerator, bf16: bool) -> None:
    """Shards `net` over all processes, in place.

    Inputs are not cast: times and noise keep their precision; autocast around the forward pass does the rest.
    """
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in blocks_of(net):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)


@contextlib.contextmanager
def no_sync(accelerator: Accelerator, net: nn.Module) -> Iterator[None]:
    """Within it gradients of `net` add up on each process, and are not reduced."""
    if not isinstance(net, FSDPModule):
        with accelerator.no_sync(net):
            yield
        return
    net.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        net.set_requires_gradient_sync(True)


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


def local(tensor: Tensor) -> Tensor:
    """What lies on this process of a tensor, be it sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """All of a tensor; of a sharded one all processes must ask together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, other: Tensor, whole: bool = False) -> Tensor:
    """`tensor` sharded as `other` is: made of this process's shard, or of the `whole` that every process has."""
    if not isinstance(other, DTensor):
        return tensor
    if whole:
        moved = tensor.to(other.device_mesh.device_type)
        return distribute_tensor(moved, other.device_mesh, other.placements, src_data_rank=None)
    return DTensor.from_local(
        tensor, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride()
    )


def gathered(values: Any) -> Any:
    """A state dict with all tensors whole and on the CPU, by all processes together."""
    if isinstance(values, Tensor):
        return full(values).detach().to("cpu", copy=True).contiguous()
    if isinstance(values, dict):
        return {key: gathered(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(map(gathered, values))
    return values


def weights_like(net: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole `tensors`, each as `net` has its own."""
    own = net.state_dict()
    return {name: like(value, own[name], whole=True) if name in own else value for name, value in tensors.items()}


def moments_like(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A whole state dict of an optimiser, its tensors as those of `optimizer` are to be, and run as it runs."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for number, values in saved["state"].items():
        parameter = parameters[number]
        state[number] = {
            name: like(value, parameter, whole=True) if isinstance(value, Tensor) and value.ndim else value
            for name, value in values.items()
        }
    groups = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    return {"state": state, "param_groups": [{**its, "fused": own["fused"]} for its, own in groups]}


def unwrapped(net: nn.Module) -> nn.Module:
    """The net itself, without what DDP puts around it."""
    return net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net
