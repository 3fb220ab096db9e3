"""The loop: exact resume, accumulation, checkpoints that survive, and one-line errors."""

import json
import math
import resource
import shutil
from itertools import pairwise

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from toy import HERE, metrics, train

from visgen import checkpoint, run_files
from visgen.config import UserError, build, plugin_config
from visgen.data import Samples
from visgen.nn.keyed import normal
from visgen.train import loop as loops
from visgen.train import main as program
from visgen.train import seeds
from visgen.train.order import Order
from visgen.train.state import keep_tokenizer

ROOT = HERE.parents[1]
NOISY = ("--objective.dropout", "0.3", "--objective.noise", "0.1")


class Killed(BaseException):
    pass


def state_of(step_dir):
    """Every file of a step that a resumed run must reproduce, loaded."""
    out = {"ema": load_file(step_dir / "model.safetensors")}
    for path in sorted((step_dir / "state").iterdir()):
        if path.suffix == ".safetensors":
            out[path.name] = load_file(path)
        elif not path.name.startswith("random_states"):
            out[path.name] = torch.load(path, weights_only=False)
    return out


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def kill_at(monkeypatch, step):
    real = loops.train_step

    def dying(state, batches, at):
        if at == step:
            raise Killed
        real(state, batches, at)

    monkeypatch.setattr(loops, "train_step", dying)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of both nets with dropout and noise."""
    from toy import plugins

    with plugins():
        return train(tmp_path_factory.mktemp("whole") / "run", *NOISY)


@pytest.mark.parametrize("killed_at", [3, 5])
def test_resume_equals_the_uninterrupted_run_bit_for_bit(whole, tmp_path, monkeypatch, killed_at):
    with monkeypatch.context() as patch:
        kill_at(patch, killed_at)
        with pytest.raises(Killed):
            train(tmp_path / "run", *NOISY)
    assert len(metrics(tmp_path / "run")) == killed_at  # the lines after the checkpoint are written again
    torch.manual_seed(99)
    run = train(tmp_path / "run", *NOISY)
    assert metrics(run) == metrics(whole) and len(metrics(run)) == 6
    for step in (4, 6):
        expected, found = (state_of(r / run_files.step_name(step)) for r in (whole, run))
        assert expected.keys() == found.keys() and len(expected) == 7  # EMA, 2 nets, 2 optimisers, EMA, objective
        assert same(expected, found)


def test_the_noise_matters_and_the_seed_rules(whole, tmp_path):
    other = train(tmp_path / "a", *NOISY, "--loop.seed", "1", "--loop.steps", "2")
    assert metrics(other)[0]["model/loss"] != metrics(whole)[0]["model/loss"]
    quiet = train(tmp_path / "b", "--loop.steps", "2")
    assert metrics(quiet)[1]["model/loss"] != metrics(whole)[1]["model/loss"]


def test_previews_do_not_change_the_training(whole, tmp_path):
    run = train(tmp_path / "run", *NOISY, "--loop.preview-every", "1")
    assert len(list((run / "previews").iterdir())) == 6
    assert metrics(run) == metrics(whole)


def test_a_preview_that_fails_loses_nothing(tmp_path, monkeypatch, capsys):
    def fail(*given):
        raise UserError("sampler.frames 3 are not whole blocks")

    monkeypatch.setattr(loops, "_preview", fail)
    run = train(tmp_path / "run", "--loop.preview-every", "2", "--loop.save-every", "2")
    assert len(run_files.find_steps(run)) == 3 and "not whole blocks" in capsys.readouterr().err
    assert any("objective.preview.sampler.frames".startswith(f"{name}.") for name in program.NEUTRAL)


def test_the_loop_equals_plain_torch(tmp_path):
    """The slow twin: one process, no accelerate, every turn written out."""
    run = train(tmp_path / "run", "--optim.warmup", "2", "--optim.schedule", "cosine", "--loop.clip", "0.1")
    seeds.seed_process(0, seeds.BUILD)
    data = build(plugin_config("visgen.data", "toy"), "train")
    objective = build(plugin_config("visgen.objectives", "toy"))
    net, critic, average = objective.nets["model"], objective.nets["critic"], None
    optimizers = {}
    for name, module in objective.nets.items():
        parameters = list(module.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizers[name] = torch.optim.AdamW(groups, betas=(0.5, 0.9) if name == "critic" else (0.9, 0.95))
    for step in range(6):
        samples = [Samples(data, 0)[key] for key in Order(40, 8, 0).step(step)]
        real = torch.stack([torch.as_tensor(s["pixels"]) for s in samples]).flatten(1).float() / 127.5 - 1
        factor = (step + 1) / 2 if step < 2 else (1 + math.cos(math.pi * (step - 2) / 4)) / 2
        fake = None
        for name in ["model", "critic"] if step >= 2 else ["model"]:
            optimizer = optimizers[name]
            for group in optimizer.param_groups:
                group["lr"] = 1e-4 * factor * (0.5 if name == "critic" else 1)
            if name == "model":
                loss, logs = net(real, 0.0, critic.model if step >= 2 else None)
                fake = logs["made"]
            else:
                loss, _ = critic(real, fake)
            grads = torch.autograd.grad(loss, [*objective.nets[name].parameters()])
            norm = torch.stack([g.norm() for g in grads]).norm()
            for p, g in zip(objective.nets[name].parameters(), grads, strict=True):
                p.grad = g * min(1.0, 0.1 / (norm + 1e-6))
            optimizer.step()
        now = [p.detach().clone() for p in net.model.parameters()]
        decay = min(0.9999, (1 + step) / (10 + step))
        average = now if step == 0 else [decay * a + (1 - decay) * n for a, n in zip(average, now, strict=True)]
    for file, module in (("model", net), ("model_1", critic)):
        saved = load_file(run / "step_0000006" / "state" / f"{file}.safetensors")
        assert all(torch.allclose(saved[n], p, atol=1e-7) for n, p in module.named_parameters())
    saved = load_file(run / "step_0000006" / "model.safetensors")
    for (name, _), mean in zip(net.model.named_parameters(), average, strict=True):
        assert torch.allclose(saved[name], mean, atol=1e-7)


def test_every_turn_of_a_step_draws_noise_of_its_own(tmp_path, monkeypatch):
    from visgen.objectives.toy import Toy

    seen, real = [], Toy.loss

    def loss(self, name, nets, batch, step, rng):
        seen.append(normal((8,), rng, torch.device("cpu")))
        if name == "critic":
            self.kept.append(self.kept[-1])  # two turns read what the autoencoder made
        return real(self, name, nets, batch, step, rng)

    monkeypatch.setattr(Toy, "turns", lambda self, step: ["model", "critic", "critic"])
    monkeypatch.setattr(Toy, "loss", loss)
    train(tmp_path / "run", "--loop.steps", "2")
    assert len(seen) == 6 and torch.stack(seen).unique().numel() == 48


def test_previews_are_made_by_the_average(tmp_path, monkeypatch):
    from visgen.objectives.toy import Toy

    seen, real = [], Toy.preview

    def preview(self, model, batch, seed):
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return real(self, model, batch, seed)

    monkeypatch.setattr(Toy, "preview", preview)
    run = train(tmp_path / "run", "--loop.preview-every", "4")
    for step, previewed in zip((4, 6), seen, strict=True):
        saved = state_of(run / run_files.step_name(step))
        assert same(previewed, saved["ema"])
        assert not torch.equal(previewed["encode.weight"], saved["model.safetensors"]["model.encode.weight"])


def test_the_critic_moves_only_in_its_turns(whole):
    critics = [load_file(p / "state" / "model_1.safetensors") for p in run_files.find_steps(whole)]
    assert not same(critics[1], critics[2]) and "critic/loss" not in metrics(whole)[1]
    assert {"critic/loss", "critic/moving", "critic/grad_norm"} <= metrics(whole)[2].keys()
    assert metrics(whole)[2]["critic/lr"] == pytest.approx(0.5e-4)


def test_accumulation_changes_nothing_but_memory(tmp_path):
    one = train(tmp_path / "one")
    two = train(tmp_path / "two", "--loop.accumulation", "2")
    for a, b in zip(metrics(one, "critic/moving"), metrics(two, "critic/moving"), strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    a, b = (load_file(r / "step_0000006" / "model.safetensors") for r in (one, two))
    assert all(torch.allclose(a[n], b[n], atol=1e-6) for n in a if n != "calls")


def test_run_directory(whole, tmp_path):
    assert {p.name for p in whole.iterdir()} == {
        *(".lock", "config.yaml", "metrics.jsonl", "previews"),
        *(f"step_000000{i}" for i in (2, 4, 6)),
    }
    assert {p.name for p in (whole / "step_0000006").iterdir()} == {"model.safetensors", "meta.json", "state"}
    meta = json.loads((whole / "step_0000006" / "meta.json").read_text())
    assert (meta["step"], meta["samples"], meta["objective"]) == (6, 48, "toy")
    described = checkpoint.read_metadata(whole / "step_0000006" / "model.safetensors")
    assert json.loads(described["config"])["kind"] == "toy" and json.loads(described["classes"]) == ["a", "b"]
    with Image.open(whole / "previews" / "step_0000006.png") as image:
        assert image.size == (32 * (4 * 6 + 2),) * 2, "4 pixels are shown as 128"
    assert metrics(whole)[-1]["epoch"] == pytest.approx(48 / 40)
    config = program.configs.load(program.TrainConfig, [str(whole / "config.yaml")])
    assert config.loop.out == str(whole) and config.objective.dropout == 0.3
    assert yaml.safe_load((whole / "config.yaml").read_text()) == program.configs.dump(config)


def test_average_and_its_precision(tmp_path):
    run = train(tmp_path / "run", "--ema.decay", "0", "--ema.save-dtype", "bf16")
    saved = load_file(run / "step_0000006" / "model.safetensors")
    raw = load_file(run / "step_0000006" / "state" / "model.safetensors")
    assert saved["encode.weight"].dtype == torch.bfloat16 and saved["calls"].item() == 6
    assert torch.equal(saved["encode.weight"], raw["model.encode.weight"].bfloat16())


def test_a_kill_before_the_rename_leaves_the_old_checkpoint(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        real = run_files.publish

        def dying(final):
            if final.name == "step_0000004":
                raise Killed
            real(final)

        patch.setattr(run_files, "publish", dying)
        with pytest.raises(Killed):
            train(tmp_path / "run", *NOISY)
    run = tmp_path / "run"
    assert [p.name for p in run_files.find_steps(run)] == ["step_0000002"]
    assert (run / ".step_0000004.tmp" / "model.safetensors").exists()
    (run / ".step_0000099.tmp").mkdir()  # of an earlier kill
    train(run, *NOISY)
    assert not list(run.glob(".step_*"))
    assert same(state_of(whole / "step_0000006"), state_of(run / "step_0000006"))


def test_only_the_newest_checkpoints_stay(tmp_path):
    run = train(tmp_path / "run", "--loop.save-every", "1", "--loop.keep-last", "2")
    assert [p.name for p in run_files.find_steps(run)] == ["step_0000005", "step_0000006"]


@pytest.mark.parametrize("log_every", ["1", "5"])
def test_losses_that_are_not_finite_stop_the_run(tmp_path, log_every):
    flags = ("--objective.poison", "4", "--objective.poisoned", "9", "--loop.steps", "12", "--loop.most-skipped", "2")
    with pytest.raises(UserError) as found:
        train(tmp_path / "run", *flags, "--loop.log-every", log_every)
    said = str(found.value)
    assert said.startswith("model: the loss is not finite at step 7, nor were ") and "\n" not in said
    kept = run_files.find_steps(tmp_path / "run")
    assert f"(loop.most_skipped 2); the last checkpoint is {kept[-1]}; " in said
    assert kept[-1].name == "step_0000006"  # whose last two steps were skipped
    weights = [load_file(p / "state" / "model.safetensors") for p in kept]
    assert all(torch.isfinite(v).all() for w in weights for v in w.values())
    assert same(*({k: v for k, v in w.items() if "calls" not in k} for w in weights[1:]))


@pytest.mark.parametrize("accumulation", ["1", "2"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, capsys, accumulation):
    flags = ("--loop.accumulation", accumulation, "--loop.save-every", "1", "--objective.gan-start", "9")
    poisoned = train(tmp_path / "a", "--objective.poison", "2", "--objective.poisoned", "2", *flags)
    said = capsys.readouterr().err
    assert "warning: model: the loss is not finite at step 3; 1 steps until step 3 were skipped" in said
    found = metrics(poisoned)
    assert [line.get("model/skipped") for line in found] == [None, None, 1, 1, None, None]
    assert found[2]["model/loss"] is None and math.isfinite(found[4]["model/loss"])
    states = [load_file(p / "state" / "model.safetensors") for p in run_files.find_steps(poisoned)]
    weights = [state["model.encode.weight"] for state in states]
    moved = [not torch.equal(a, b) for a, b in pairwise(weights)]
    assert moved == [True, False, False, True, True]
    moments = torch.load(poisoned / "step_0000006" / "state" / "optimizer.bin", weights_only=True)["state"]
    assert {int(m["step"]) for m in moments.values()} == {4}


def test_a_fused_optimiser_skips_as_the_host_does(tmp_path, monkeypatch):
    """What a GPU does, on the CPU."""
    flags = ("--objective.poison", "2", "--objective.poisoned", "2")
    plain = train(tmp_path / "a", *flags)
    real = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *given, **named: real(*given, **{**named, "fused": True}))
    fused = train(tmp_path / "b", *flags)
    for a, b in zip(metrics(plain), metrics(fused), strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    a, b = (torch.load(r / "step_0000006" / "state" / "optimizer.bin", weights_only=True) for r in (plain, fused))
    assert {int(m["step"]) for m in a["state"].values()} == {int(m["step"]) for m in b["state"].values()} == {4}


def test_bf16_on_the_cpu_and_silence_about_the_run(tmp_path, capsys):
    run = train(tmp_path / "run", "--loop.precision", "bf16", "--loop.steps", "3", "--data.no-held-out")
    assert math.isfinite(metrics(run)[-1]["model/loss"])
    said = capsys.readouterr()
    assert said.out == ""
    for words in ("what trains", "adamw lr 5e-05", "toy, 40 samples, 2 classes", "0.60 epochs", "training samples"):
        assert words in said.err


def test_unreadable_samples_are_counted_at_the_end(tmp_path, monkeypatch, capsys):
    train(tmp_path / "whole", "--loop.steps", "1")
    assert "could not be read" not in capsys.readouterr().err
    monkeypatch.setattr("visgen.data.Data.skipped", 3)
    train(tmp_path / "damaged", "--loop.steps", "1")
    assert "3 of 40 samples could not be read" in capsys.readouterr().err.splitlines()[-1]


def test_starting_from_another_run(whole, tmp_path):
    run = train(tmp_path / "run", *NOISY, "--loop.steps", "8", "--loop.resume", str(whole))
    assert [line["step"] for line in metrics(run)] == [7, 8]


def test_a_finished_run_stays_as_it_is(whole, capsys):
    before = metrics(whole)
    train(whole, *NOISY)
    assert metrics(whole) == before and "all 6 steps are done" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["truncated", "empty", "gone"])
@pytest.mark.parametrize("steps", ["6", "4"])
def test_a_damaged_export_is_written_again_from_the_state(whole, tmp_path, capsys, damage, steps):
    run = shutil.copytree(whole, tmp_path / "run")
    if steps == "4":  # goes on from there
        shutil.rmtree(run / "step_0000006")
    export = run / f"step_000000{steps}" / "model.safetensors"
    before = export.read_bytes()
    if damage == "gone":
        export.unlink()
    else:
        export.write_bytes(before[:-100] if damage == "truncated" else b"")
    train(run, *NOISY)
    said = capsys.readouterr().err
    assert f"{export} was damaged or missing: written again from the state of its step" in said
    assert export.read_bytes() == before and metrics(run) == metrics(whole)
    train(run, *NOISY)
    assert "written again" not in capsys.readouterr().err


def test_a_damaged_export_of_another_run_is_left_alone(whole, tmp_path, capsys):
    other = shutil.copytree(whole, tmp_path / "other")
    (other / "step_0000006" / "model.safetensors").write_bytes(b"")
    train(tmp_path / "run", *NOISY, "--loop.steps", "8", "--loop.resume", str(other))
    assert "written again" not in capsys.readouterr().err
    assert (other / "step_0000006" / "model.safetensors").read_bytes() == b""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--optim.lr", "1"), "another config: optim.lr (0.0001 there, 1.0 now)"),
        (("--objective.noise", "0.2"), "objective.noise (0.1 there, 0.2 now)"),
        (("--loop.resume", "never"), "holds checkpoints already"),
        (("--loop.batch", "7", "--loop.accumulation", "2", "--loop.resume", "auto"), "loop.batch"),
    ],
)
def test_another_config_in_the_same_directory(whole, flags, words):
    with pytest.raises(UserError) as found:
        train(whole, *NOISY, *flags)
    assert words in str(found.value) and "\n" not in str(found.value)


def test_what_does_not_matter_may_change(whole):
    before = metrics(whole), state_of(whole / "step_0000006")
    run = train(whole, *NOISY, "--loop.workers", "1", "--loop.save-every", "3", "--log.project", "other")
    assert metrics(run) == before[0] and same(state_of(run / "step_0000006"), before[1])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--loop.batch", "50"), "the data has 40 samples, fewer than loop.batch (50)"),
        (("--loop.accumulation", "3"), "multiple of processes x loop.accumulation = 1 x 3"),
        (("--loop.save-every", "0"), "loop.save_every is 0; it must be at least 1"),
        (("--optim.warmup", "6"), "optim.warmup is 6"),
        (("--loop.resume", "nowhere"), "checkpoint nowhere does not exist"),
        (("--data.bad", "3"), "image 3.png cannot be read"),
    ],
)
def test_errors_before_long_work(tmp_path, flags, words):
    with pytest.raises(UserError) as found:
        train(tmp_path / "run", *flags)
    assert words in str(found.value) and "\n" not in str(found.value)
    if "image 3" not in words:  # which is read when training has begun
        assert not (tmp_path / "run").exists(), "a refused run leaves nothing behind"


def test_a_run_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"loop\.out .*run cannot be written: Not a directory; choose another"):
        train(tmp_path / "file" / "run")


def test_a_damaged_state(whole, tmp_path):
    step = shutil.copytree(whole / "step_0000006", tmp_path / "step_0000006")
    weights = step / "state" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="does not fit this config or is damaged"):
        train(tmp_path / "run", *NOISY, "--loop.steps", "8", "--loop.resume", str(step))


def damaged(whole, tmp_path, name, keep):
    """A copy of the finished run at its last but one step, of which file `name` has lost its end."""
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run / "step_0000006")
    path = run / "step_0000004" / name
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    return run


NEEDED = (
    "meta.json state/model.safetensors state/model_1.safetensors state/optimizer.bin state/custom_checkpoint_0.pkl "
    "state/custom_checkpoint_1.pkl"
)


@pytest.mark.parametrize("keep", [0, 0.5, 0.9])
@pytest.mark.parametrize("name", NEEDED.split())
def test_a_truncated_newest_step_falls_back_to_the_one_before(whole, tmp_path, capsys, name, keep):
    run = damaged(whole, tmp_path, name, keep)
    assert metrics(train(run, *NOISY)) == metrics(whole)
    said = capsys.readouterr().err
    assert f"warning: {run / 'step_0000004'} does not fit this config or is damaged (" in said
    assert "; going on from step_0000002, the damaged one is kept as damaged_*" in said
    assert (run / "damaged_step_0000004").is_dir()
    assert same(state_of(whole / "step_0000006"), state_of(run / "step_0000006"))


def test_zeros_in_a_state_that_can_be_read_are_found(whole, tmp_path, capsys):
    run = damaged(whole, tmp_path, "meta.json", 1)
    path = run / "step_0000004" / "state" / "model.safetensors"
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size - 64)
        file.write(bytes(64))
    assert metrics(train(run, *NOISY)) == metrics(whole)
    assert "state/model.safetensors has other bytes than were written" in capsys.readouterr().err


@pytest.mark.parametrize("step", [5, 2, None, "4"])
def test_facts_that_name_another_step_are_not_believed(whole, tmp_path, capsys, step):
    run = damaged(whole, tmp_path, "meta.json", 1)
    path = run / "step_0000004" / "meta.json"
    facts = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("format", "checksum")}
    path.write_text(json.dumps({**facts, "step": step}))
    assert metrics(train(run, *NOISY)) == metrics(whole)
    assert f"its step is {step!r}" in " ".join(capsys.readouterr().err.split())
    assert same(state_of(whole / "step_0000006"), state_of(run / "step_0000006"))


def test_a_state_that_is_not_finite_is_not_resumed(whole, tmp_path, capsys):
    run = damaged(whole, tmp_path, "meta.json", 1)
    path = run / "step_0000004" / "state" / "optimizer.bin"
    state = torch.load(path, weights_only=True)
    state["state"][0]["exp_avg"].view(-1)[0] = float("nan")
    torch.save(state, path)
    run_files.write_meta(path.parents[1], {"step": 4})
    assert metrics(train(run, *NOISY)) == metrics(whole)
    assert "exp_avg holds a value that is not finite" in " ".join(capsys.readouterr().err.split())


def test_data_of_another_size_are_named(whole, tmp_path, capsys):
    run = damaged(whole, tmp_path, "meta.json", 1)
    step = run / "step_0000004"
    facts = run_files.read_meta(step)
    run_files.write_meta(step, {**facts, "data_samples": 99})
    train(run, *NOISY)
    said = " ".join(capsys.readouterr().err.split())
    assert f"warning: the data had 99 samples at step 4, now {facts['data_samples']}" in said


def test_an_export_of_other_bytes_is_written_again(whole, tmp_path, capsys):
    run = shutil.copytree(whole, tmp_path / "run")
    path = sorted(run.glob("step_*"))[-1] / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-64] + bytes(64))
    train(run, *NOISY)
    assert path.read_bytes() == good and "written again" in capsys.readouterr().err


def test_metrics_that_are_no_text_end_there(whole, tmp_path):
    run = damaged(whole, tmp_path, "meta.json", 1)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b"\x94\xff{}\n")
    assert metrics(train(run, *NOISY)) == metrics(whole)


def test_a_newest_step_without_its_state_falls_back_too(whole, tmp_path, capsys):
    run = damaged(whole, tmp_path, "meta.json", 1)
    shutil.rmtree(run / "step_0000004" / "state")
    assert metrics(train(run, *NOISY)) == metrics(whole) and "warning: " in capsys.readouterr().err


def test_a_full_disk_keeps_the_old_checkpoint(whole, tmp_path, monkeypatch):
    """A limit on the size of files stands for the disk: some of a step's files are written, then one cannot be."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, 3)
        with pytest.raises(Killed):
            train(run, *NOISY)
    size = (run / "step_0000002" / "state" / "optimizer.bin").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, before[1]))
    try:
        with pytest.raises(UserError) as found:
            train(run, *NOISY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = str(found.value)
    assert f"{run / 'step_0000004'} cannot be written; the last checkpoint is {run / 'step_0000002'}; make room" in said
    assert "\n" not in said and not list(run.glob(".step_*"))
    assert metrics(train(run, *NOISY)) == metrics(whole)


def test_a_truncated_only_step(whole, tmp_path):
    run = damaged(whole, tmp_path, "meta.json", 0.5)
    shutil.rmtree(run / "step_0000002")
    with pytest.raises(UserError, match="remove step_0000004 to start anew, for there is no other"):
        train(run, *NOISY)


def test_a_run_without_its_config(whole, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "config.yaml").unlink()
    with pytest.raises(UserError) as found:
        train(run, *NOISY)
    said = str(found.value)
    assert f"run directory {run} holds checkpoints but no config.yaml" in said and f"--loop.resume {run}" in said
    (run / "config.yaml").write_text("")
    with pytest.raises(UserError, match=r"config\.yaml is empty; put it back"):
        train(run, *NOISY)


@pytest.mark.parametrize("flags", [[], ["--dry-run"], ["--loop.steps", "3"]])
def test_without_a_config_one_line_says_how_to_call(flags, capsys):
    with pytest.raises(SystemExit) as found:
        program.main(flags)
    said = capsys.readouterr().err
    assert found.value.code == 2 and said.count("\n") == 1
    assert said.startswith("error: train.py needs a config, as in `python train.py configs/debug/vq.yaml")
    assert (ROOT / "configs" / "debug" / "vq.yaml").is_file()


def test_help_needs_no_config(capsys):
    with pytest.raises(SystemExit) as found:
        program.main(["--help"])
    assert found.value.code == 0 and "--loop.steps" in capsys.readouterr().out


def test_dry_run_prints_one_line_of_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program.main(["--objective.kind", "toy", "--data.kind", "toy", "--dry-run"])
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and json.loads(said) == {"model": 48 * 8 + 8 + 8 * 48 + 48, "critic": 48 * 8 + 8 + 9}
    assert not list(tmp_path.iterdir())


def test_the_run_is_named_after_the_yaml(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("objective: toy\ndata: toy\n")
    config = program.configs.load(program.TrainConfig, [str(tmp_path / "mine.yaml")])
    assert program.with_run(config, [str(tmp_path / "mine.yaml"), "--x", "y"]).loop.out == "runs/mine"
    assert program.with_run(config, ["--x", "y"]).loop.out == "runs/toy"


def test_errors_are_one_line_and_exit_2(capsys):
    with pytest.raises(SystemExit) as found:
        program.main(["--loop.stepz", "3"])
    assert found.value.code == 2
    assert capsys.readouterr().err.startswith("error: unknown option '--loop.stepz', did you mean")


def test_a_frozen_tokenizer_is_kept_beside_the_run(tmp_path):
    quantizer = plugin_config("visgen.quantizers", "fsq")
    values = {"image_size": 8, "width": 8, "multipliers": (1, 1), "res_blocks": 1, "z_channels": 8, "norm_groups": 4}
    tokenizer = build(plugin_config("visgen.tokenizers", "conv_vq", quantizer=quantizer, **values))
    objective = build(plugin_config("visgen.objectives", "toy"))
    objective.frozen["tokenizer"] = tokenizer
    run, step = tmp_path / "run", tmp_path / "run" / "step_0000002"
    step.mkdir(parents=True)

    def kept():
        return checkpoint.tokenizer_hash(checkpoint.load_tokenizer(run))

    data = build(plugin_config("visgen.data", "toy"), "train")
    first = checkpoint.tokenizer_hash(tokenizer)
    assert keep_tokenizer(objective, data, run, None) == first == kept()
    assert keep_tokenizer(objective, data, run, step) == first
    with torch.no_grad():
        next(tokenizer.parameters()).add_(1)
    with pytest.raises(UserError, match=f"{first[:12]}.*is not the tokenizer of this config"):
        keep_tokenizer(objective, data, run, step)
    assert kept() == first
    keep_tokenizer(objective, data, run, None)  # what a failed start left is replaced
    assert kept() == checkpoint.tokenizer_hash(tokenizer) != first
    objective.frozen.clear()
    assert keep_tokenizer(objective, data, run, None) == ""
    data.tokenizer_hash = "abc"  # of cached codes
    assert keep_tokenizer(objective, data, run, None) == "abc"


def test_cached_codes_of_another_tokenizer_do_not_continue_a_run(tmp_path):
    objective, data = (
        build(plugin_config("visgen.objectives", "toy")),
        build(plugin_config("visgen.data", "toy"), "train"),
    )
    model = objective.exported()
    step = tmp_path / "old" / "step_0000002"
    step.mkdir(parents=True)
    checkpoint.save_module(step / "model.safetensors", model, model.config, extra_metadata={"tokenizer": "abc"})
    data.tokenizer_hash = "abc"
    assert keep_tokenizer(objective, data, tmp_path / "new", step) == "abc"
    data.tokenizer_hash = "def"
    with pytest.raises(UserError, match=r"trained on tokenizer abc, which is not the tokenizer of this config \(def\)"):
        keep_tokenizer(objective, data, tmp_path / "new", step)
