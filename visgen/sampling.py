"""How images are drawn, and on what: the settings that programs, YAML files and saved images share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from visgen.backbones import Backbone
from visgen.config import UserError, plugin
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.launch import device_of
from visgen.model import Model
from visgen.nn.blocks import blocks_of, compile_blocks

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class EngineConfig:
    """Where and how to compute.

    Attributes:
        kind: "captured" replays a CUDA graph of fused kernels, "eager" runs plain PyTorch; "auto" is captured on a GPU.
        device: a torch device; "auto" takes a GPU when there is one.
        precision: of the transformer; "auto" is bf16 on a GPU and fp32 on a CPU. The tokenizer always runs in fp32.
        batch: images decoded at once.
        compile: torch.compile the blocks of a backbone that has no kernels of its own, such as acdit's. It takes a
            while, before the first image.
    """

    kind: Literal["auto", "captured", "eager"] = "auto"
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    batch: int = 16
    compile: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UserError(f"engine.batch {self.batch} must be at least 1")

    def resolve(self) -> tuple[torch.device, torch.dtype]:
        """The device and dtype that "auto" stands for here."""
        device = device_of(self.device, "engine.device")
        precision = self.precision
        if precision == "auto":
            precision = "bf16" if device.type == "cuda" else "fp32"
        return device, PRECISIONS[precision]

    def kind_on(self, device: torch.device) -> str:
        """The kind that "auto" stands for on `device`."""
        if self.kind == "captured" and device.type != "cuda":
            raise UserError(
                f"engine.kind captured needs a CUDA GPU, not {device.type}; use --engine.kind eager (or auto)"
            )
        return self.kind if self.kind != "auto" else "captured" if device.type == "cuda" else "eager"

    def make(
        self,
        model: Model,
        guidance: Guidance | None = None,
        warp: Warp | None = None,
        tokenizer: str | None = None,
    ) -> Engine:
        """The engine of `model`, where it lies; for the arguments see `Engine`."""
        kind = self.kind_on(model.parameter_device())
        if self.compile:
            self._compile(model.backbone, kind)
        if kind == "eager":
            return Engine(model, guidance, warp, tokenizer)
        from visgen.decode.captured import CapturedEngine  # needs Triton

        return CapturedEngine(model, guidance, warp, tokenizer)

    def _compile(self, backbone: Backbone, kind: str) -> None:
        """Compiles the blocks, once."""
        plain = type(backbone).fused is Backbone.fused and type(backbone).fused_pass is Backbone.fused_pass
        if kind == "captured" and not plain:
            raise UserError("engine.compile true: this backbone has kernels of its own, which are faster; leave it out")
        if not any("forward" in vars(block) for block in blocks_of(backbone)):
            compile_blocks(backbone)


@dataclass(frozen=True)
class SamplingConfig:
    """How images are drawn: what `configs/sample/*.yaml` set and what a saved image records."""

    sampler: Any = plugin("visgen.samplers", "ar")
    guidance: Guidance = field(default_factory=Guidance)
    warp: Warp = field(default_factory=Warp)
    engine: EngineConfig = field(default_factory=EngineConfig)
