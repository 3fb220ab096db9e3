"""Two nets like a GAN tokenizer: an autoencoder with dropout, training noise and a counting buffer; a critic."""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from visgen.nn.keyed import normal
from visgen.objectives import Objective


@dataclass(frozen=True)
class Config:
    dropout: float = 0.0
    noise: float = 0.0
    gan_start: int = 2
    poison: int = -1  # step from which on the autoencoder's loss is NaN
    poisoned: int = 1  # for so many steps
    trace: str = ""  # folder: what every turn saw, one file per process


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.encode, self.drop, self.decode = nn.Linear(48, 8), nn.Dropout(config.dropout), nn.Linear(8, 48)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):  # [B, 48]
        if self.training:
            self.calls += 1
        return self.decode(self.drop(torch.tanh(self.encode(x))))


class Net(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = Model(config)

    def forward(self, x, noise, critic=None):
        made = self.model(x + noise)
        loss = (made - x).square().mean()
        if critic is not None:
            loss = loss - 0.1 * critic(made).mean()
        return loss, {"made": made.detach(), "error": (made - x).detach().abs().mean()}


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, real, fake):
        loss = (1 - self.model(real)).relu().mean() + (1 + self.model(fake)).relu().mean()
        return loss, {}


class Toy(Objective):
    export = "model"
    held_out_values = ("error", "calls")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.nets = {"model": Net(config), "critic": Critic()}
        self.frozen: dict[str, nn.Module] = {}
        self.optim_overrides = {"critic": {"betas": (0.5, 0.9), "lr_scale": 0.5}}
        self.moving = torch.zeros(())  # of the critic's loss; saved with the run
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def state_dict(self) -> dict:
        return {"moving": self.moving}

    def load_state_dict(self, state: dict) -> None:
        self.moving = state["moving"]

    def turns(self, step: int) -> list[str]:
        return ["model", "critic"] if step >= self.config.gan_start else ["model"]

    def loss(self, name, nets, batch, step, rng):
        self.write(name, batch, step)
        real = batch["pixels"].flatten(1)
        if name == "critic":
            index = next(i for i, (pixels, _) in enumerate(self.kept) if pixels is batch["pixels"])
            loss, logs = nets[name](real, self.kept.pop(index)[1])
            self.moving = 0.9 * self.moving.to(loss.device) + 0.1 * loss.detach()
            return loss, {**logs, "moving": self.moving}
        noise = self.config.noise * normal(real.shape, rng, real.device)
        critic = self.nets["critic"].model if "critic" in self.turns(step) else None
        loss, logs = nets[name](real, noise, critic)
        if critic is not None:
            self.kept.append((batch["pixels"], logs["made"]))
        if 0 <= step - self.config.poison < self.config.poisoned and self.config.poison >= 0:
            loss = loss * torch.nan
        return loss, {"error": logs["error"]}

    def preview(self, model, batch, seed):
        torch.rand(7)  # a preview may draw from the global stream; training must not notice
        return model(batch["pixels"].flatten(1)).view(-1, 3, 4, 4)

    def held_out(self, model, batch):
        torch.rand(7)  # nor may it notice this
        x = batch["pixels"].flatten(1)
        return {"error": (model(x) - x).abs().mean(), "calls": model.calls.float()}

    def write(self, name, batch, step) -> None:
        if not self.config.trace:
            return
        weights = b"".join(p.detach().cpu().numpy().tobytes() for n in self.nets.values() for p in n.parameters())
        line = f"{step} {name} {hashlib.sha256(weights).hexdigest()} {','.join(map(str, batch['index'].tolist()))}\n"
        name = f"rank{os.environ.get('RANK', '0')}"
        with open(Path(self.config.trace) / f"{name}.txt", "a") as file:
            file.write(line)
        if not (Path(self.config.trace) / f"{name}.pid").exists():
            (Path(self.config.trace) / f"{name}.pid").write_text(str(os.getpid()))
        time.sleep(float(os.environ.get("TOY_PAUSE", "0")))  # so that a signal comes in the middle of a run
