"""What every test shares: one thread, no network, a tiny model."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of this process and of the programs that tests start
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # trainings here are compared bit by bit, over processes too
sys.path.insert(0, str(Path(__file__).parent))  # so that every test can `import reference`

import interpreter
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the fused kernels run on the CPU, element by element
    interpreter.start()

from visgen import checkpoint, run_files
from visgen.config import build, dump, plugin_config
from visgen.config import load as loads
from visgen.data import emoji
from visgen.data.synthetic import SHAPES
from visgen.model import Model, ModelConfig

torch.set_num_threads(1)

LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


class NetworkBlocked(BaseException):
    """Not an `Exception`: code that falls back when the network fails cannot hide its attempt."""


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Fails every test that connects to anything but this machine."""

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def connect(self: socket.socket, address: Any) -> Any:
            outside = self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(LOOPBACK)
            if outside:
                raise NetworkBlocked(f"a test tried to connect to {address}")
            return real(self, address)

        return connect

    patch = pytest.MonkeyPatch()
    for name in ("connect", "connect_ex"):
        patch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """Undo what a training in an earlier test set for its process: float32 products may be rounded, on CPUs too."""
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session", autouse=True)
def no_folders_left() -> Iterator[None]:
    """Fails where a test left a folder in the repository, such as a program's default --out."""
    root = Path(__file__).parents[1]
    before = set(root.iterdir())
    yield
    left = [p.name for p in set(root.iterdir()) - before if p.name in ("out", "runs", "data_cache", "wandb")]
    assert not left, f"{left}: give the programs that tests run an --out of their own"


@pytest.fixture(scope="session", autouse=True)
def sheets_read_once() -> Iterator[None]:
    """Emoji sheets that did not change on disk are decoded once for all tests of a process."""
    real, known = emoji.read_sheets, {}

    def read(files: Sequence[Path], *args: int) -> np.ndarray:
        if not all(file.is_file() for file in files):
            return real(files, *args)
        seen = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        key = (*files, *seen, *args)
        if key not in known:
            known[key] = real(files, *args)
            known[key].flags.writeable = False
        return known[key]

    patch = pytest.MonkeyPatch()
    patch.setattr(emoji, "read_sheets", read)
    yield
    patch.undo()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Model]:
    """Builds a tiny AR model in eval mode, class-conditional unless `condition` says another kind, with random weights
    in its head too; and in its control, where a kind is named."""

    def make(
        grid: tuple[int, int, int] = (1, 4, 4),
        vocab: int = 16,
        classes: int = 3,
        seed: int = 0,
        head_std: float = 0.5,
        condition: dict[str, Any] | None = None,
        control: str | None = None,
        **backbone: Any,
    ) -> Model:
        small = {"layers": 2, "heads": 4, "width": 32, "mlp_multiple_of": 16}
        asked = {"kind": "label", **(condition or {})}
        if asked["kind"] == "label":
            asked.setdefault("classes", classes)
        config = ModelConfig(
            grid=grid,
            vocab=vocab,
            backbone=plugin_config("visgen.backbones", "ar", **{**small, **backbone}),
            condition=plugin_config("visgen.conditions", **asked),
            control=None if control is None else small_config("controls", control),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Model(config).eval()
            for parameter in model.parameters():  # far from the initialisation: attention and norms must matter
                torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.25)
            torch.nn.init.normal_(model.head.output.weight, std=head_std)
        return model.requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def make_blocks() -> Callable[..., Model]:
    """Builds a tiny ACDiT over vectors in eval mode, class-conditional, with random weights everywhere."""

    def make(
        grid: tuple[int, int, int] = (1, 4, 4),
        block: tuple[int, int, int] = (1, 2, 2),
        channels: int = 3,
        classes: int = 3,
        seed: int = 0,
        predicts: str = "epsilon",
        **backbone: Any,
    ) -> Model:
        small = {"layers": 2, "heads": 2, "width": 32, "block": block}
        config = ModelConfig(
            grid=grid,
            channels=channels,
            backbone=plugin_config("visgen.backbones", "acdit", **{**small, **backbone}),
            condition=plugin_config("visgen.conditions", "label", classes=classes),
            head=plugin_config("visgen.heads", "denoiser", predicts=predicts),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Model(config).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.15)
            torch.nn.init.zeros_(model.head.output.bias)
        return model.requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def make_masked() -> Callable[..., Model]:
    """Builds a tiny MAR over vectors in eval mode, class-conditional, with random weights everywhere."""

    def make(
        grid: tuple[int, int, int] = (1, 4, 4), channels: int = 3, classes: int = 3, seed: int = 0, **head: Any
    ) -> Model:
        config = ModelConfig(
            grid=grid,
            channels=channels,
            backbone=plugin_config("visgen.backbones", "mar", layers=2, heads=2, width=32, buffer=3),
            condition=plugin_config("visgen.conditions", "label", classes=classes),
            head=plugin_config("visgen.heads", "diffusion", **{"layers": 2, "width": 24, **head}),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Model(config).eval()
            for name, parameter in model.named_parameters():
                weight = parameter.ndim == 1 and "norm" in name and name.endswith("weight")
                torch.nn.init.normal_(parameter, mean=float(weight), std=0.2)
        return model.requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def make_causal() -> Callable[..., Model]:
    """Builds a tiny causal model over vectors in eval mode, class-conditional, with random weights everywhere."""

    def make(
        grid: tuple[int, int, int] = (1, 4, 4), channels: int = 3, seed: int = 0, order: str = "raster", **head: Any
    ) -> Model:
        small = {"layers": 2, "heads": 4, "width": 32, "mlp_multiple_of": 16, "continuous": True, "order": order}
        config = ModelConfig(
            grid=grid,
            channels=channels,
            backbone=plugin_config("visgen.backbones", "ar", **small),
            condition=plugin_config("visgen.conditions", "label", classes=3),
            head=plugin_config("visgen.heads", "diffusion", **{"layers": 2, "width": 24, **head}),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Model(config).eval()
            for name, parameter in model.named_parameters():
                torch.nn.init.normal_(parameter, float(parameter.ndim == 1 and "norm" in name), 0.2)
        return model.requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def make_student() -> Callable[..., Model]:
    """Builds a tiny one-step student in eval mode, class-conditional, with random weights everywhere."""

    def make(
        grid: tuple[int, int, int] = (1, 4, 4),
        vocab: int = 16,
        classes: int = 3,
        seed: int = 0,
        control: str | None = None,
        **backbone: Any,
    ) -> Model:
        small = {"layers": 2, "heads": 4, "width": 32, "mlp_multiple_of": 16, "channels": 3}
        config = ModelConfig(
            grid=grid,
            vocab=vocab,
            backbone=plugin_config("visgen.backbones", "one_step", **{**small, **backbone}),
            condition=plugin_config("visgen.conditions", "label", classes=classes, dropout=0.0),
            control=None if control is None else small_config("controls", control),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Model(config).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.25)
            torch.nn.init.normal_(model.head.output.weight, std=0.5)
        return model.requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def teacher_dir(make_model: Callable[..., Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a teacher of students: 4 x 4 tokens of 16 codes of 3 channels, images of 8 px, three classes."""
    run = tmp_path_factory.mktemp("runs") / "teacher"
    config = small_config("tokenizers", "conv_vq", image_size=8, codes=16, channels=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = build(config).eval()
    model = make_model(grid=tokenizer.grid, vocab=16)
    folder = run / run_files.step_name(1)
    folder.mkdir(parents=True)
    facts = {"classes": json.dumps(["disc", "square", "triangle"]), "tokenizer": checkpoint.tokenizer_hash(tokenizer)}
    checkpoint.save_module(folder / run_files.WEIGHTS, model, model.config, extra_metadata=facts)
    (folder / run_files.META).write_text("{}")
    checkpoint.save_module(run / run_files.TOKENIZER, tokenizer, config)
    return run


@pytest.fixture(scope="session")
def make_run(make_model: Callable[..., Model]) -> Callable[[Path, Sequence[str]], Path]:
    """Writes a run directory as training leaves it: 16 px, 8 x 8 tokens of 16 codes, three classes, steps 5 and 10."""

    def make(run: Path, classes: Sequence[str]) -> Path:
        tokenizer_config = small_config("tokenizers", "conv_vq")
        torch.manual_seed(0)
        tokenizer = build(tokenizer_config).eval()
        for step in (5, 10):
            folder = run / run_files.step_name(step)
            folder.mkdir(parents=True)
            model = make_model(grid=tokenizer.grid, vocab=tokenizer.vocab, seed=step)
            facts = {"step": step, "classes": json.dumps(classes)}
            checkpoint.save_module(folder / run_files.WEIGHTS, model, model.config, extra_metadata=facts)
            (folder / run_files.META).write_text(json.dumps({"step": step}))
        checkpoint.save_module(run / run_files.TOKENIZER, tokenizer, tokenizer_config)
        return run

    return make


@pytest.fixture(scope="session")
def checkpoint_dir(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of three named classes; see `make_run`."""
    return make_run(tmp_path_factory.mktemp("runs") / "tiny", ["Ankle boot", "bag", "Coat"])


@pytest.fixture(scope="session")
def shapes_dir(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, with the class names of the synthetic data, on which it is scored."""
    return make_run(tmp_path_factory.mktemp("runs") / "tiny", list(SHAPES)[:3])


@pytest.fixture(scope="session")
def text_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random T5 encoder of width 16 with a tokenizer of a few words."""
    import tokenizers
    import transformers

    path = tmp_path_factory.mktemp("t5")
    words = {w: i for i, w in enumerate(["<pad>", "</s>", "<unk>", "a", "red", "bird", "on", "the", "sea"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.T5Config(vocab_size=9, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
        transformers.T5EncoderModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def text_checkpoint_dir(
    make_model: Callable[..., Model], text_encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run directory like `checkpoint_dir`, of a model that reads 6 slots of `text_encoder`'s, uncleaned."""
    run = tmp_path_factory.mktemp("runs") / "text"
    tokenizer_config = small_config("tokenizers", "conv_vq")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = build(tokenizer_config).eval()
    folder = run / run_files.step_name(3)
    folder.mkdir(parents=True)
    asked = {"kind": "text", "tokens": 6, "channels": 16, "encoder": str(text_encoder), "clean": False}
    model = make_model(grid=tokenizer.grid, vocab=tokenizer.vocab, condition=asked)
    checkpoint.save_module(folder / run_files.WEIGHTS, model, model.config, extra_metadata={"step": 3})
    (folder / run_files.META).write_text(json.dumps({"step": 3}))
    checkpoint.save_module(run / run_files.TOKENIZER, tokenizer, tokenizer_config)
    return run


@pytest.fixture(scope="session")
def make_control_run(make_model: Callable[..., Model]) -> Callable[..., Path]:
    """Writes a run directory like `checkpoint_dir`, of a model with control; `beside` is another kind that it knows."""

    def make(run: Path, kind: str | None = "canny", beside: str | None = None, **settings: Any) -> Path:
        tokenizer_config = small_config("tokenizers", "conv_vq")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            tokenizer = build(tokenizer_config).eval()
        model = make_model(grid=tokenizer.grid, vocab=tokenizer.vocab, layers=3, control=kind, **settings)
        if beside is not None:
            control = dataclasses.replace(model.config.control, beside=small_config("controls", beside))
            model.config = dataclasses.replace(model.config, control=control)
        folder = run / run_files.step_name(1)
        folder.mkdir(parents=True)
        facts = {"step": 1, "classes": json.dumps(list(SHAPES)[:3])}
        checkpoint.save_module(folder / run_files.WEIGHTS, model, model.config, extra_metadata=facts)
        (folder / run_files.META).write_text(json.dumps({"step": 1}))
        checkpoint.save_module(run / run_files.TOKENIZER, tokenizer, tokenizer_config)
        return run

    return make


# ------------------------------------------------------------------------------------- contracts of plugin packages

VISGEN = Path(__file__).parents[1] / "visgen"
SMALL = {  # fields by name, so that a new plugin is small without an edit here; a contract test may add its own
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "width": 32,
    "mlp_multiple_of": 16,
    "classes": 3,
    "image_size": 16,
    "multipliers": (1, 2),
    "res_blocks": 1,
    "z_channels": 8,
    "norm_groups": 4,
    "codes": 16,
    "n": 12,
    "n_held_out": 7,
    "patch": 4,
    "side": 4,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with an argument `kind`, in a module with a PACKAGE, run for every file of visgen/PACKAGE."""
    package = getattr(metafunc.module, "PACKAGE", None)
    if package and "kind" in metafunc.fixturenames:
        files = sorted((VISGEN / package).glob("*.py"))
        metafunc.parametrize("kind", [f.stem for f in files if not f.name.startswith("_")])


def small_config(package: str, kind: str, **values: Any) -> Any:
    """`visgen.package.kind.Config` at toy size; nested plugins and configs shrink too."""
    return _shrunk(plugin_config(f"visgen.{package}", kind), values)


def _shrunk(config: Any, values: dict[str, Any]) -> Any:
    changed = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        shrinks = field.name in SMALL and not isinstance(value, str)  # `classes: category` is no number
        if field.name in values or shrinks:
            changed[field.name] = values.get(field.name, SMALL.get(field.name))
        elif dataclasses.is_dataclass(value):
            changed[field.name] = _shrunk(value, values)
    return dataclasses.replace(config, **changed)


@pytest.fixture(scope="session")
def small() -> Callable[..., Any]:
    return small_config


@pytest.fixture(scope="session")
def check_form() -> Callable[[str, str], None]:
    """What every plugin file is, whatever its package."""

    def check(package: str, kind: str) -> None:
        module = importlib.import_module(f"visgen.{package}.{kind}")
        assert module.__doc__ and module.__doc__.strip(), "the module has a docstring"
        config = module.Config
        assert config.__module__ == module.__name__, "Config is defined in the file itself"
        assert dataclasses.is_dataclass(config) and config.__dataclass_params__.frozen, "Config is frozen"
        default = config()  # every field has a default
        assert hash(default) is not None and default == config()
        assert loads(config, values=dump(default)) == default, "Config survives YAML"
        generated = str(config.__doc__).startswith(f"{config.__name__}(")
        lines = [line for c in config.__mro__[:-1] for line in inspect.getsource(c).splitlines()]
        assert not generated or any('"""' in line or "#" in line for line in lines), "Config says what its fields mean"
        contract = importlib.import_module(f"visgen.{package}")
        bases = tuple(v for v in vars(contract).values() if inspect.isabstract(v) and v.__module__ == contract.__name__)
        found = [
            v
            for v in vars(module).values()
            if isinstance(v, type) and v.__module__ == module.__name__ and issubclass(v, bases)
        ]
        assert len(found) == 1, f"one implementation of {[b.__name__ for b in bases]}, found {found}"
        assert not inspect.isabstract(found[0]), f"left abstract: {found[0].__abstractmethods__}"
        assert found[0].__doc__ and found[0].__doc__ != bases[0].__doc__, "the class has a docstring of its own"

    return check
