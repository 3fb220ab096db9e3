"""What a new user meets: short trials, class names that change, precision, micro-batches, lines at 80 columns."""

import copy
import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from test_tokenizer_of_a_run import MODEL, TOKENIZER
from test_tokenizer_of_a_run import train as train_small
from toy import metrics, train

from visgen import config as configs
from visgen import launch, run_files
from visgen.checkpoint import classes_of, load_model, read_metadata
from visgen.config import UserError
from visgen.nn.discriminator import LeCam
from visgen.objectives._tokens import check_cache, check_names
from visgen.quantizers import vq
from visgen.tokenizers.conv_kl import Normaliser
from visgen.train import log as logs
from visgen.train import main as program
from visgen.train.log import Log, Meter, fitting
from visgen.train.remote import LogConfig
from visgen.train.state import LoopConfig


@pytest.fixture
def model_run(tmp_path):
    train_small(tmp_path / "vq", TOKENIZER)
    flags = ("--objective.tokenizer", str(tmp_path / "vq"), "--loop.save-every", "1")
    return train_small(tmp_path / "ar", MODEL, *flags), flags


@pytest.mark.parametrize(
    ("classes", "named"),
    [(["circle", "zebra", "c", "d"], "'zebra'"), (None, None)],
)
def test_a_run_does_not_go_on_with_other_classes(model_run, monkeypatch, classes, named):
    from visgen.data import synthetic

    run, flags = model_run
    real = synthetic.Synthetic.__init__

    def renamed(self, *given):
        real(self, *given)
        self.classes = list(reversed(self.classes)) if classes is None else classes

    monkeypatch.setattr(synthetic.Synthetic, "__init__", renamed)
    before = sorted(p.name for p in run.iterdir())
    with pytest.raises(UserError, match=named or "in another order"):
        train_small(run, MODEL, *flags)
    assert sorted(p.name for p in run.iterdir()) == before


def test_a_tokenizer_goes_on_whatever_the_classes_are_called(tmp_path, monkeypatch):
    from visgen.data import synthetic

    run, real = train_small(tmp_path / "vq", TOKENIZER), synthetic.Synthetic.__init__

    def renamed(self, *given):
        real(self, *given)
        self.classes = list(reversed(self.classes))

    monkeypatch.setattr(synthetic.Synthetic, "__init__", renamed)
    before = run_files.find_steps(run)
    assert run_files.find_steps(train_small(run, TOKENIZER)) == before and before


def test_what_a_control_or_a_student_learns_from_has_the_same_classes(model_run, monkeypatch):
    run, _ = model_run
    model = load_model(run)
    data = SimpleNamespace(classes=["circle", "zebra", "c", "d"])
    with pytest.raises(UserError, match="zebra"):
        check_names(model, data, run, "objective.init")
    data.classes = classes_of(read_metadata(run / "step_0000001" / "model.safetensors"), run)
    check_names(model, data, run, "objective.init")


def test_a_cache_of_other_classes_than_its_source(model_run, tmp_path):
    model = load_model(model_run[0])
    names = ["a", "b", "c", "d"]
    source = SimpleNamespace(classes=names)
    cache = SimpleNamespace(
        grid=model.grid, vocab=model.config.vocab, classes=names, folder="cache", source=lambda: source
    )
    check_cache(model, cache)
    source.classes = ["b", "a", "c", "d"]
    with pytest.raises(UserError, match="in another order"):
        check_cache(model, cache)

    def gone():
        raise UserError("it is not here")

    cache.source = gone
    check_cache(model, cache)


def test_a_codebook_that_would_never_be_used_is_refused(tmp_path):
    flags = ("--objective.tokenizer.quantizer.init-after", "12", "--loop.steps", "12")
    with pytest.raises(UserError, match=r"loop.steps 12.*--objective.tokenizer.quantizer.init_after 1"):
        train_small(tmp_path / "vq", TOKENIZER, *flags)
    assert not (tmp_path / "vq").exists()


def test_own_folder_as_a_short_trial():
    """Each refusal names the flag that makes it fit."""
    flags = ["--loop.steps", "40", "--optim.warmup", "4", "--objective.tokenizer.quantizer.init_after", "4"]
    config = configs.load(program.TrainConfig, ["configs/tokenizer/own_folder.yaml", *flags])
    config.loop.check(program.rehearse(config.objective))
    config.optim.check(config.loop.steps)
    with pytest.raises(UserError, match=r"--optim.warmup 4"):
        configs.load(program.TrainConfig, ["configs/tokenizer/own_folder.yaml"]).optim.check(40)


def test_an_unfinished_tokenizer_is_said(model_run, tmp_path, capsys):
    _, flags = model_run
    assert "is at step" not in capsys.readouterr().err
    text = (tmp_path / "vq" / "config.yaml").read_text()
    (tmp_path / "vq" / "config.yaml").write_text(text.replace("  steps: 1\n", "  steps: 240\n"))
    train_small(tmp_path / "other", MODEL, *flags)
    assert "is at step 1 of 240" in capsys.readouterr().err


def test_no_usage_is_logged_while_the_table_is_bypassed(tmp_path):
    flags = ("--objective.tokenizer.quantizer.init-after", "2", "--loop.steps", "4", "--loop.log-every", "1")
    found = metrics(train_small(tmp_path / "vq", TOKENIZER, *flags))
    assert ["tokenizer/perplexity" in line for line in found] == [False, False, True, True]
    assert ["tokenizer/usage" in line for line in found] == [False, False, True, True]


def quantizer(**more):
    torch.manual_seed(0)
    return vq.VQ(vq.Config(codes=16, channels=4, **more)).train()


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_micro_batches_leave_the_codebooks_statistics(parts):
    """Steps are counted, not forwards, and the codes of all micro-batches enter at once."""
    one, many = quantizer(decay=0.9), quantizer(decay=0.9)
    for step in range(3):
        vectors = torch.randn(4, 32, 4, generator=torch.Generator().manual_seed(step))
        one(vectors)
        for i, piece in enumerate(vectors.chunk(parts)):
            many.micro_batch = (i, parts)
            found = many(piece)
        assert ("usage" in found.metrics) and int(many.steps) == step + 1
    for name in ("share", "idle", "steps"):
        assert torch.allclose(getattr(one, name).double(), getattr(many, name).double())


def test_micro_batches_draw_the_table_once():
    made = quantizer(init_after=1, restart_below=0.1)
    tables = []
    for _ in range(3):
        for i in range(2):
            made.micro_batch = (i, 2)
            made(torch.randn(2, 32, 4))
            tables.append(made.table.detach().clone())
    same = [torch.equal(a, b) for a, b in zip(tables[::2], tables[1::2], strict=True)]
    assert same == [True] * 3 and not torch.equal(tables[1], tables[2])


@pytest.mark.parametrize("kind", ["lecam", "latents"])
def test_micro_batches_leave_moving_means(kind):
    made = LeCam(0.9).train() if kind == "lecam" else Normaliser(3, 0.9)
    one, many = made, copy.deepcopy(made)
    for step in range(3):
        values = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        for net, parts in ((one, 1), (many, 4)):
            for i, piece in enumerate(values.chunk(parts)):
                net.micro_batch = (i, parts)
                net(piece, piece + 1) if kind == "lecam" else net.observe(piece)
    for name, value in one.state_dict().items():
        assert torch.allclose(value, many.state_dict()[name], atol=1e-6), name


def test_the_loop_tells_modules_which_micro_batch_comes(tmp_path):
    flags = ("--loop.steps", "2", "--loop.accumulation", "2")
    step = run_files.find_steps(train_small(tmp_path / "vq", TOKENIZER, *flags))[-1]
    from safetensors.torch import load_file

    (steps,) = [v for k, v in load_file(step / "model.safetensors").items() if k.endswith("quantizer.steps")]
    assert int(steps) == 2


@pytest.mark.parametrize(("fast", "found"), [(True, "bf16"), (False, "fp32")])
def test_precision_is_what_the_machine_computes_in_and_stays(tmp_path, monkeypatch, fast, found):
    monkeypatch.setattr("visgen.train.state.has_bf16", lambda device: fast)
    run = train(tmp_path / "run", "--loop.precision", "auto", "--loop.steps", "2")
    assert configs.read_yaml(run / "config.yaml")["loop"]["precision"] == found
    monkeypatch.setattr("visgen.train.state.has_bf16", lambda device: not fast)  # another machine
    train(run, "--loop.precision", "auto", "--loop.steps", "2")
    assert configs.read_yaml(run / "config.yaml")["loop"]["precision"] == found
    assert LoopConfig().resolved().precision != found


@pytest.mark.parametrize(("flags", "fast"), [("fpu avx512_bf16", True), ("fpu avx512f", False), ("asimd bf16", True)])
def test_a_cpu_says_whether_it_has_bf16(monkeypatch, flags, fast):
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : {flags}")
    assert launch.has_bf16(torch.device("cpu")) is fast


def test_the_bar_at_80_columns_has_step_and_time(tmp_path, monkeypatch):
    seen = io.StringIO()
    console = Console(file=seen, force_terminal=True, width=80)
    monkeypatch.setattr(logs, "console", lambda: console)
    out = Log(LogConfig(wandb=False), tmp_path, {}, True, 0, 100_000)
    values = {"model/nats_per_token": 3.0, "images_per_s": 1234.5, "data_wait": 0.1, "tokens_per_s": 1e6, "mfu": 0.4}
    out.advance()
    out.metrics(1, values, "model/nats_per_token")
    out.tell()
    out.bar.refresh()
    out.close()
    last = [line for line in seen.getvalue().splitlines() if "/100000" in line][-1]
    assert "1/100000" in last and ":" in last and "nats_per_token 3.0000" in last and "1234.5 images/s" in last


def test_the_least_important_parts_go_first():
    assert fitting(["loss 1", "2 images/s", "data 3"], 20) == "loss 1  2 images/s"
    assert fitting(["a long loss"], 3) == "a long loss"


def test_lines_without_a_terminal_and_the_end(tmp_path, capsys):
    train(tmp_path / "run", "--loop.steps", "3", "--loop.eval-every", "1", "--loop.keep-best", "error")
    said = capsys.readouterr().err
    assert "step 1/3" in said and " left" in said
    run = tmp_path / "run"
    for words in ("done: 3 steps", f"{run}/step_0000003", "best held-out error", f"{run}/previews", "next: "):
        assert words in said


def test_a_value_that_was_never_finite_is_left_out():
    class Alone:
        device = "cpu"

        def gather(self, values):
            return values

    meter = Meter()
    for name, value in (("a/usage", math.nan), ("a/loss", math.nan), ("a/psnr", 2.0)):
        meter.add(name, torch.tensor(value))
    means = meter.read(Alone())[0]
    assert means.keys() == {"a/loss", "a/psnr"} and math.isnan(means["a/loss"])
