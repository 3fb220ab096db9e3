"""Next-token training: where it starts, that it learns, what the null label does, and what `setup` refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import visgen.checkpoint
import visgen.encode
from visgen.config import UserError, build, plugin_config
from visgen.data import Data
from visgen.decode.guidance import Guidance
from visgen.model import ModelConfig
from visgen.objectives.next_token import Config, NextToken, PreviewConfig

N, VOCAB, CLASSES = 16, 12, 3


def config(dropout: float = 0.1, **values: Any) -> Config:
    model = ModelConfig(
        grid=(1, 4, 4),
        vocab=VOCAB,
        backbone=plugin_config("visgen.backbones", "ar", layers=2, heads=4, width=32, mlp_multiple_of=16),
        condition=plugin_config("visgen.conditions", "label", classes=CLASSES, dropout=dropout),
    )
    return Config(model=model, **values)


@pytest.fixture
def objective() -> NextToken:
    torch.manual_seed(0)
    return NextToken(config())


def batch_of(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Tokens that a model can learn: they climb by the label, from a random start."""
    rng = torch.Generator().manual_seed(seed)
    label = torch.arange(rows) % CLASSES
    start = torch.randint(VOCAB, (rows, 1), generator=rng)
    return {"tokens": (start + torch.arange(N) * (label + 1).unsqueeze(1)) % VOCAB, "label": label}


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def randomised(objective: NextToken) -> nn.Module:
    """The exported model in eval mode with a head that says something."""
    model = objective.exported().eval()
    nn.init.normal_(model.head.output.weight, std=0.5)
    return model


# ---------------------------------------------------------------------------------------------------------- training


def test_the_first_loss_is_ln_v(objective: NextToken) -> None:
    for label_smoothing in (0.0, 0.1):
        made = config()
        head = plugin_config("visgen.heads", "categorical", label_smoothing=label_smoothing)
        made = Config(model=ModelConfig(made.model.grid, VOCAB, made.model.backbone, made.model.condition, head))
        loss, logs = NextToken(made).loss("model", NextToken(made).nets, batch_of(6), 0, rng())
        assert float(loss.detach()) == pytest.approx(math.log(VOCAB), abs=1e-6)
        assert float(logs["nats_per_token"]) == pytest.approx(math.log(VOCAB), abs=1e-6)
        assert not logs["nats_per_token"].requires_grad


def test_thirty_steps_learn_something(objective: NextToken) -> None:
    optimizer = torch.optim.AdamW(objective.nets["model"].parameters(), lr=3e-3)
    torch.manual_seed(0)
    losses = []
    for step in range(30):
        loss, _ = objective.loss("model", objective.nets, batch_of(48, seed=step), step, rng())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=1e-5)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5


def test_dropped_labels_change_their_rows_alone(objective: NextToken) -> None:
    model, batch = randomised(objective), batch_of(6)
    drop = torch.tensor([False, True, False, False, True, False])
    plain, dropped = (model.loss(batch["tokens"], batch, d) for d in (None, drop))
    assert torch.equal(plain[~drop], dropped[~drop])
    assert ((plain - dropped).abs().amax(1) > 1e-4)[drop].all()
    nulls = {**batch, "label": torch.full_like(batch["label"], CLASSES)}
    assert torch.equal(dropped[drop], model.loss(batch["tokens"], nulls, None)[drop])


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_labels_are_dropped_at_the_conditions_rate_by_the_given_generator(rate: float) -> None:
    objective, seen = NextToken(config(rate)), []
    nets: Any = {"model": lambda tokens, batch, drop, **_: seen.append(drop)}
    for generator in (rng(), rng(), torch.Generator().manual_seed(1)):
        objective.loss("model", nets, batch_of(4000), 0, generator)
    assert float(seen[0].float().mean()) == pytest.approx(rate, abs=0.02 * (0 < rate < 1))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2]) == (rate in (0.0, 1.0))


def test_changing_a_token_changes_no_earlier_loss(objective: NextToken) -> None:
    model, batch = randomised(objective), batch_of(4)
    plain = model.loss(batch["tokens"], batch, None)
    for k in (0, 7, N - 1):
        tokens = batch["tokens"].clone()
        tokens[:, k] = (tokens[:, k] + 1) % VOCAB
        after = model.loss(tokens, batch, None)
        assert torch.equal(after[:, :k], plain[:, :k])
        assert (after[:, k] != plain[:, k]).all()
        if k < N - 1:
            assert (after[:, k + 1] != plain[:, k + 1]).all()


def test_the_last_token_is_a_target_and_never_an_input(objective: NextToken) -> None:
    model, batch = randomised(objective), batch_of(2)
    seen: list[Tensor] = []
    handle = model.backbone.tok_embeddings.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    assert model.loss(batch["tokens"], batch, None).shape == (2, N)
    handle.remove()
    assert torch.equal(seen[0], batch["tokens"][:, :-1])


def test_pixels_are_encoded_without_autocast_and_without_gradient(objective: NextToken) -> None:
    def encode(pixels: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
        return torch.full((len(pixels), N), 5)

    objective.frozen["tokenizer"] = SimpleNamespace(encode=encode)
    batch: Any = {"pixels": torch.zeros(2, 1, 3, 8, 8), "label": torch.tensor([0, 1])}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (objective.tokens(batch) == 5).all()
    cached = torch.zeros(2, N, dtype=torch.int64)
    assert objective.tokens({**batch, "tokens": cached}) is cached, "cached tokens come first"


# ------------------------------------------------------------------------------------------------------------ setup


def pixels(classes: int = CLASSES, image_size: int = 16) -> Data:
    return build(plugin_config("visgen.data", "synthetic", classes=classes, image_size=image_size), "train")


class Cached(Data):
    """Cached codes of some grid."""

    def __init__(self, grid: tuple[int, int, int] = (1, 4, 4), vocab: int = VOCAB) -> None:
        self.config = plugin_config("visgen.data", "codes")
        self.grid, self.vocab, self.classes, self.image_size = grid, vocab, ["a", "b", "c"], (16, 16)
        self.checked: list[str] = []

    def __len__(self) -> int:
        return 4

    def get(self, index: int, rng: Any = None) -> dict[str, Any]:
        return {"tokens": torch.zeros(N, dtype=torch.int64), "label": 0}

    def check(self, digest: str) -> None:
        self.checked.append(digest)


class FakeTokenizer(nn.Module):
    image_size, grid, vocab = (16, 16), (1, 4, 4), VOCAB

    def decode(self, tokens: Tensor) -> Tensor:
        return tokens.reshape(-1, 1, 1, 4, 4).expand(-1, 1, 3, 4, 4).float() / VOCAB


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> FakeTokenizer:
    """What any tokenizer's path gives."""
    fake = FakeTokenizer()
    monkeypatch.setattr(visgen.checkpoint, "load_tokenizer", lambda path: fake)
    monkeypatch.setattr(visgen.checkpoint, "tokenizer_hash", lambda tokenizer: "abc")
    return fake


def refused(objective: NextToken, data: Data) -> str:
    with pytest.raises(UserError) as caught:
        objective.setup(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("classes", [2, 4])
def test_other_classes_than_the_condition_knows(classes: int) -> None:
    message = refused(NextToken(config()), pixels(classes=classes))
    assert f"{classes} classes" in message and "objective.model.condition.classes is 3" in message
    assert f"pass --objective.model.condition.classes {classes}" in message


def test_pixels_need_a_tokenizer() -> None:
    message = refused(NextToken(config()), pixels())
    assert "'synthetic' gives pixels" in message and "objective.tokenizer" in message and "visgen.encode" in message


@pytest.mark.parametrize(("grid", "vocab"), [((1, 8, 8), VOCAB), ((1, 4, 4), 99)])
def test_cached_codes_of_another_grid_or_vocabulary(grid: tuple[int, int, int], vocab: int) -> None:
    message = refused(NextToken(config()), Cached(grid, vocab))
    assert f"{grid} and vocab {vocab}" in message and f"(1, 4, 4) and {VOCAB}" in message
    assert "objective.model.grid" in message


def test_views_that_the_data_do_not_have() -> None:
    condition = plugin_config("visgen.conditions", "label", classes=CLASSES, views=18)
    made = config()
    made = replace(made, model=replace(made.model, condition=condition))
    message = refused(NextToken(made), Cached())
    assert "condition.views is 18" in message and "1 views" in message and "--views shift" in message


def test_cached_codes_alone_are_enough() -> None:
    objective, data = NextToken(config()), Cached()
    objective.setup(data)
    assert objective.frozen == {} and data.checked == []


def test_a_tokenizer_of_another_grid(tokenizer: FakeTokenizer) -> None:
    tokenizer.grid = (1, 2, 2)
    message = refused(NextToken(config(tokenizer=Path("runs/vq"))), pixels())
    assert "objective.tokenizer runs/vq" in message and "(1, 2, 2)" in message and "(1, 4, 4)" in message


def test_pixels_of_another_size_than_the_tokenizers(tokenizer: FakeTokenizer) -> None:
    message = refused(NextToken(config(tokenizer=Path("runs/vq"))), pixels(image_size=32))
    assert "(32, 32)" in message and "(16, 16)" in message and "data.image_size" in message


def test_a_missing_tokenizer() -> None:
    message = refused(NextToken(config(tokenizer=Path("runs/nowhere"))), pixels())
    assert message.startswith("objective.tokenizer: ") and "runs/nowhere does not exist" in message


def test_a_fitting_tokenizer_is_frozen(tokenizer: FakeTokenizer) -> None:
    objective = NextToken(config(tokenizer=Path("runs/vq")))
    objective.setup(pixels())
    assert objective.frozen == {"tokenizer": tokenizer}


def test_cached_codes_are_checked_against_the_tokenizer(
    tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(visgen.encode, "preflight", lambda *given: seen.append(given))
    objective, data = NextToken(config(tokenizer=Path("runs/vq"))), Cached()
    objective.setup(data)
    assert data.checked == ["abc"] and seen == [(tokenizer, data)]


# --------------------------------------------------------------------------------------------------- what is exported


def test_preview_draws_all_classes_from_the_seed(tokenizer: FakeTokenizer) -> None:
    made = config(tokenizer=Path("runs/vq"), preview=PreviewConfig(images=5, guidance=Guidance(2.0)))
    objective = NextToken(made)
    model = randomised(objective)
    assert objective.preview(model, {}, 0) is None, "without a tokenizer"
    objective.setup(pixels())
    images = objective.preview(model, {}, seed=3)
    assert images is not None and images.shape == (5, 3, 4, 4) and images.unique().numel() > 3
    assert torch.equal(images, objective.preview(model, {}, seed=3))
    assert not torch.equal(images, objective.preview(model, {}, seed=4))


def test_preview_of_a_model_of_texts_goes_round_those_of_the_batch(tokenizer: FakeTokenizer) -> None:
    condition = plugin_config("visgen.conditions", "text", tokens=3, channels=8)
    made = replace(config(tokenizer=Path("runs/vq")).model, condition=condition)
    objective = NextToken(Config(made, Path("runs/vq"), PreviewConfig(images=5, guidance=Guidance(2.0))))
    model = randomised(objective)
    data: Any = pixels()
    with pytest.raises(UserError, match="gives no features of any"):
        objective.setup(data)
    told = {name: getattr(condition, name) for name in ("encoder", "clean", "tokens", "channels")}
    data.features = SimpleNamespace(folder=Path("text"), index=SimpleNamespace(**told))
    objective.setup(data)
    rows = torch.Generator().manual_seed(0)
    text, mask = torch.randn(2, 3, 8, generator=rows), torch.tensor([[False, True, True], [True, True, True]])
    batch: Any = {**batch_of(2), "text": text, "text_mask": mask}
    drawn = objective.preview(model, batch, seed=3)
    again = torch.tensor([0, 1, 0, 1, 0])
    whole = objective.preview(model, {"text": text[again], "text_mask": mask[again]}, seed=3)
    assert drawn is not None and drawn.shape == (5, 3, 4, 4) and torch.equal(drawn, whole)
    assert not torch.equal(drawn, objective.preview(model, {**batch, "text": text.flip(0)}, seed=3))
    loss, _ = objective.loss("model", objective.nets, batch, 0, rng())
    assert torch.isfinite(loss)
    with pytest.raises(UserError, match="the batch holds no `text` features"):
        objective.preview(model, batch_of(2), seed=3)


def test_what_is_saved_says_how_to_build_it_again(objective: NextToken) -> None:
    assert objective.exported() is objective.nets["model"].model
    assert objective.exported().config == objective.config.model
    assert objective.turns(0) == objective.turns(1000) == ["model"]
