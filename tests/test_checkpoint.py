"""Weight files and run directories: what is written loads again, what does not fit is refused in one line."""

import dataclasses
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from visgen import checkpoint, config, run_files
from visgen.config import UserError
from visgen.model import Model, ModelConfig


def make_tokenizer(seed=0, **values):
    torch.manual_seed(seed)
    quantizer = config.plugin_config("visgen.quantizers", "fsq", levels=(3, 5))
    tiny = {"image_size": 8, "width": 8, "multipliers": (1, 1), "res_blocks": 1, "z_channels": 8, "norm_groups": 4}
    return config.build(config.plugin_config("visgen.tokenizers", "conv_vq", quantizer=quantizer, **tiny, **values))


def make_model():
    torch.manual_seed(1)
    backbone = config.plugin_config("visgen.backbones", "ar", width=16, layers=1, heads=2)
    return Model(ModelConfig(grid=(1, 4, 4), vocab=15, backbone=backbone))


@pytest.fixture
def runs(tmp_path):
    """A tokenizer run with two steps, and a model run that keeps the tokenizer beside it."""
    tokenizer, model = make_tokenizer(), make_model()
    for step in (1, 2):
        write(tmp_path / "tok" / run_files.step_name(step), make_tokenizer(seed=2 - step))
        write(tmp_path / "ar" / run_files.step_name(step), model)
    checkpoint.save_module(tmp_path / "ar" / "tokenizer.safetensors", tokenizer, tokenizer.config)
    return tmp_path


def write(step, module):
    step.mkdir(parents=True)
    checkpoint.save_module(step / "model.safetensors", module, module.config, extra_metadata={"step": 3})
    (step / "meta.json").write_text("{}")


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def refused(call, *words):
    with pytest.raises(UserError) as found:
        call()
    text = str(found.value)
    assert all(w in text for w in words) and "\n" not in text, text


def test_round_trip_of_a_tokenizer(runs):
    tokenizer = make_tokenizer()
    pixels = torch.rand(2, 1, 3, 8, 8) * 2 - 1
    for path in (runs / "tok", runs / "tok" / "step_0000002", runs / "tok" / "step_0000002" / "model.safetensors"):
        loaded = checkpoint.load_tokenizer(path)
        assert equal(loaded, tokenizer) and not loaded.training and loaded.config == tokenizer.config
        assert torch.equal(loaded.encode(pixels), tokenizer.eval().encode(pixels))
    assert not equal(checkpoint.load_tokenizer(run_files.find_step(runs / "tok", 1)), tokenizer)
    assert checkpoint.read_metadata(runs / "tok/step_0000001/model.safetensors")["step"] == "3"


def test_round_trip_of_a_model(runs):
    model = make_model()
    for path in (runs / "ar", str(runs / "ar" / "step_0000001")):
        loaded = checkpoint.load_model(path)
        assert equal(loaded, model) and loaded.config == model.config and not loaded.training


def test_a_model_run_knows_its_tokenizer(runs):
    for path in (runs / "ar", runs / "ar" / "step_0000002", runs / "ar" / "tokenizer.safetensors"):
        assert equal(checkpoint.load_tokenizer(path), make_tokenizer())


def test_parameters_are_cast_and_buffers_are_not(tmp_path):
    norm = torch.nn.BatchNorm1d(3)
    cfg = config.plugin_config("visgen.quantizers", "fsq")
    checkpoint.save_module(tmp_path / "a.safetensors", norm, cfg, torch.bfloat16)
    saved = load_file(tmp_path / "a.safetensors")
    assert saved["weight"].dtype == torch.bfloat16 and saved["running_var"].dtype == torch.float32
    assert norm.weight.dtype == torch.float32 and [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    tokenizer = make_tokenizer()
    checkpoint.save_module(tmp_path / "t.safetensors", tokenizer, tokenizer.config, torch.bfloat16)
    assert {p.dtype for p in checkpoint.load_tokenizer(tmp_path / "t.safetensors").parameters()} == {torch.float32}


def test_tied_parameters(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    checkpoint.save_module(tmp_path / "a.safetensors", model, config.plugin_config("visgen.quantizers", "fsq"))
    assert torch.equal(load_file(tmp_path / "a.safetensors")["b.weight"], model["a"].weight)


def test_equal_contents_are_equal_files(tmp_path):
    tokenizer, files = make_tokenizer(), []
    extra = {"é": "ü\n", **{f"key{i}": i for i in range(9)}}
    for i in range(3):
        checkpoint.save_module(tmp_path / f"{i}.safetensors", tokenizer, tokenizer.config, extra_metadata=extra)
        files.append((tmp_path / f"{i}.safetensors").read_bytes())
    assert files[0] == files[1] == files[2]
    assert checkpoint.read_metadata(tmp_path / "0.safetensors")["é"] == "ü\n"


def test_hash_of_weights_ignores_dropout_alone():
    def hashed(**values):
        torch.manual_seed(1)
        backbone = config.plugin_config("visgen.backbones", "ar", width=16, layers=1, heads=2, **values)
        dropped = values.get("token_dropout", 0.1)
        condition = config.plugin_config("visgen.conditions", "label", classes=3, dropout=dropped)
        model = Model(ModelConfig(grid=(1, 4, 4), vocab=15, backbone=backbone, condition=condition))
        return checkpoint.weights_hash(model)

    rates = {"token_dropout": 0.4, "residual_dropout": 0.3, "mlp_dropout": 0.2, "drop_path": 0.5}
    assert hashed() == hashed(**rates)
    assert hashed() != hashed(norm_eps=1e-4) and hashed() != hashed(rope_base=500.0), "what a law depends on is in it"


def test_hash_is_of_weights_and_config():
    one, other = make_tokenizer(), make_tokenizer(seed=1)
    assert (
        checkpoint.tokenizer_hash(one)
        == checkpoint.tokenizer_hash(make_tokenizer())
        != (checkpoint.tokenizer_hash(other))
    )
    with torch.no_grad():
        next(one.parameters()).view(-1)[0] += 1e-3
    assert checkpoint.tokenizer_hash(one) != checkpoint.tokenizer_hash(make_tokenizer())
    assert checkpoint.tokenizer_hash(make_tokenizer(dropout=0.1)) != checkpoint.tokenizer_hash(make_tokenizer())


def test_the_hash_outlives_a_new_field_of_the_config(monkeypatch):
    one, old = make_tokenizer(), checkpoint.tokenizer_hash(make_tokenizer())
    field = ("novelty", bool, dataclasses.field(default=False))
    grown = dataclasses.make_dataclass("Config", [field], bases=(type(one.config),), frozen=True)
    monkeypatch.setattr(grown, "__module__", type(one.config).__module__)
    values = {f.name: getattr(one.config, f.name) for f in dataclasses.fields(one.config)}
    one.config = grown(**values)
    assert checkpoint.tokenizer_hash(one) == old
    one.config = grown(**values, novelty=True)
    assert checkpoint.tokenizer_hash(one) != old


def test_wrong_kind_and_wrong_values(runs):
    refused(lambda: checkpoint.load_model(runs / "tok"), "holds a tokenizer (conv_vq), a model is needed")
    refused(
        lambda: checkpoint.load_tokenizer(runs / "ar" / "step_0000001" / "model.safetensors"),
        "holds a model (ar), a tokenizer is needed; pass the run directory of a tokenizer",
    )
    refused(lambda: checkpoint.load_tokenizer(runs / "tok", image_size=(16, 16)), "image_size is (8, 8), (16, 16) is")
    refused(lambda: checkpoint.load_tokenizer(runs / "tok", vocab=64), "vocab is 15, 64 is needed")
    assert checkpoint.load_tokenizer(runs / "tok", image_size=[8, 8], vocab=15).vocab == 15


def test_missing_directories_and_steps(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(lambda: checkpoint.load_tokenizer(tmp_path / "none"), "none does not exist", "run directory")
    refused(lambda: checkpoint.load_model(tmp_path / "none.safetensors"), "none.safetensors does not exist")
    refused(lambda: run_files.find_step(tmp_path / "empty"), "holds no complete checkpoint")
    for step in (7, -1, "last"):
        words = (f"holds no step {step}; it holds 1, 2: choose one of them, 'best' (", "or none for the newest")
        refused(lambda step=step: run_files.find_step(runs / "tok", step), *words)
    (tmp_path / "step_0000001").mkdir()
    (tmp_path / "step_0000001" / "model.safetensors").write_bytes(b"")
    assert run_files.find_step(tmp_path / "step_0000001") == tmp_path / "step_0000001"
    refused(lambda: run_files.find_step(tmp_path / "step_0000001", 1), "is a step itself; pass its run directory")
    refused(lambda: run_files.find_step(tmp_path / "step_0000001" / "model.safetensors"), "is a file; pass a run")
    refused(lambda: run_files.find_step(runs / "tok", "best"), "knows no best step", "loop.keep_best")
    assert run_files.find_step(runs / "tok").name == "step_0000002"
    (runs / "tok" / "step_0000002" / "meta.json").write_text('{"best": {"step": 1}}')
    assert run_files.find_step(runs / "tok", "best").name == "step_0000001"
    assert run_files.find_step(runs / "tok" / "step_0000001").name == "step_0000001"


DAMAGES = [b'{"step": 8', b"[1]", b"3", b"null", b"\xff\xfe", b""]


@pytest.mark.parametrize("content", DAMAGES)
def test_damaged_facts_of_a_step_are_said(runs, content):
    step = runs / "ar" / "step_0000002"
    (step / "meta.json").write_bytes(content)
    words = (f"{step}/meta.json is damaged (", "; copy the step again or use the earlier step_0000001")
    for which in (None, 2, "best"):
        refused(lambda which=which: run_files.find_step(runs / "ar", which), *words)
    refused(lambda: run_files.find_step(step), *words)
    refused(lambda: checkpoint.load_model(runs / "ar"), *words)
    assert run_files.find_step(runs / "ar", 1).name == "step_0000001"


@pytest.mark.parametrize("best", [3, "x", {}, {"step": "1"}, []])
def test_a_damaged_best_is_said(runs, best):
    (runs / "ar" / "step_0000002" / "meta.json").write_text(json.dumps({"best": best}))
    for which in ("best", None):
        words = ("meta.json is damaged (its 'best' is ", "copy the step")
        refused(lambda which=which: run_files.find_step(runs / "ar", which), *words)


def test_weights_without_facts_are_no_step_of_a_run_but_stand_alone(runs):
    step = runs / "ar" / "step_0000002"
    (step / "meta.json").unlink()
    words = (f"{step}/meta.json is missing", "copy it again, or pass the directory", "step_0000002 itself")
    for which in (None, 2, "best"):
        refused(lambda which=which: run_files.find_step(runs / "ar", which), *words)
    assert run_files.find_step(step) == step and run_files.find_step(runs / "ar", 1).name == "step_0000001"
    assert [p.name for p in run_files.find_steps(runs / "ar")] == ["step_0000001"], "nothing is resumed from it"


def test_half_written_steps_do_not_count(runs):
    (runs / "tok" / "step_0000009").mkdir()
    (runs / "tok" / ".step_0000010.tmp").mkdir()
    (runs / "tok" / "step_x").mkdir()
    assert run_files.find_step(runs / "tok").name == "step_0000002"
    run_files.clean(runs / "tok")
    assert not (runs / "tok" / ".step_0000010.tmp").exists()


@pytest.mark.parametrize("size", [0, 4, 100, -50])
def test_truncated_files(runs, size):
    path = runs / "ar" / "step_0000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(lambda: checkpoint.load_model(runs / "ar"), "is truncated or not a safetensors", "earlier step_0000001")
    path = runs / "ar" / "step_0000001" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(lambda: checkpoint.load_model(path), "is truncated or not a safetensors file", "copy it again")


def test_older_steps(runs):
    steps = run_files.find_steps(runs / "ar")
    assert run_files.older_steps(steps[1]) == steps[:1] and run_files.older_steps(steps[0]) == []
    assert run_files.older_steps(runs / "ar" / "step_0000007") == []


def test_weights_that_do_not_fit_are_listed(runs):
    path = runs / "tok" / "step_0000002" / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    metadata = {**metadata, "format": "visgen/1"}  # as an older version wrote it, without a checksum
    del metadata["crc32"]
    tensors["extra"] = torch.zeros(1)
    tensors["to_code.weight"] = tensors["to_code.weight"][:1].clone()
    del tensors["to_code.bias"]
    save_file(tensors, path, metadata)
    refused(
        lambda: checkpoint.load_tokenizer(runs / "tok"),
        *(
            "1 missing (to_code.bias)",
            "1 unexpected (extra)",
            "1 of another shape (to_code.weight [1, 8, 1, 1] for",
        ),
    )


def test_foreign_files_and_foreign_configs(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(1)}, path, {"format": "pt"})
    refused(lambda: checkpoint.load_module(path), "was not written by visgen", "visgen.convert")

    def described(**values):
        save_file({"a": torch.zeros(1)}, path, {"format": "visgen/1", "config": json.dumps(values)})

    described(package="os", kind="path")
    refused(lambda: checkpoint.load_module(path), "package 'os' is not part of visgen")
    described(package="visgen.tokenizers", kind="conv_qv")
    refused(lambda: checkpoint.load_module(path), "unknown kind 'conv_qv', did you mean 'conv_vq'?")
    described(package="visgen.tokenizers", kind="conv_vq", sides=3)
    refused(lambda: checkpoint.load_module(path), str(path), "unknown key 'sides'")


def test_publish_and_keep_last(runs):
    run = runs / "tok"
    new = run_files.unfinished(run / run_files.step_name(3))
    new.mkdir()
    (new / "meta.json").write_text("{}")
    assert len(run_files.find_steps(run)) == 2
    run_files.publish(run / run_files.step_name(3))
    run_files.keep_last(run, 2)
    assert [p.name for p in run_files.find_steps(run)] == ["step_0000002", "step_0000003"]
    run_files.keep_last(run, 1, best=2)
    assert [p.name for p in run_files.find_steps(run)] == ["step_0000002", "step_0000003"]
    run_files.keep_last(run, 0)
    assert len(list(run.iterdir())) == 2


def test_what_is_missing_is_said(tmp_path):
    step = tmp_path / "run" / run_files.step_name(3)
    step.mkdir(parents=True)
    (step / run_files.META).write_text("{}")
    refused(lambda: run_files.find_step(step), f"{step / run_files.WEIGHTS} is missing; copy the step again")
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_text("loop: {}")
    refused(lambda: run_files.find_step(begun), "has saved no step yet; train it first")


# ------------------------------------------------------------------------------------------- damage, and edits


def altered(path, change):
    """Writes a weight file again, as an older version did, after `change(tensors, metadata)`."""
    with safe_open(path, "pt") as file:
        metadata = {**file.metadata(), "format": "visgen/1"}
    del metadata["crc32"]
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def test_weights_that_are_not_finite_are_refused_by_every_reader(runs):
    def spoil(tensors, metadata):
        tensors[sorted(tensors)[0]].view(-1)[0] = float("nan")

    altered(runs / "ar" / "step_0000002" / "model.safetensors", spoil)
    altered(runs / "ar" / "tokenizer.safetensors", spoil)
    words = ("holds a value that is not finite", "copy it again")
    refused(lambda: checkpoint.load_model(runs / "ar"), "model.safetensors: tensor ", "step_0000001", *words)
    refused(lambda: checkpoint.load_tokenizer(runs / "ar"), "tokenizer.safetensors: tensor ", *words)


def test_weights_of_an_older_version_are_compared_with_the_facts_of_their_step(runs):
    step = runs / "ar" / "step_0000002"
    altered(step / "model.safetensors", lambda tensors, metadata: None)
    run_files.write_meta(step, {"step": 2, "crc32": run_files.checksums(step)})
    checkpoint.load_model(runs / "ar")
    data = bytearray((step / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (step / "model.safetensors").write_bytes(data)
    for path in (runs / "ar", step, step / "model.safetensors"):
        refused(lambda path=path: checkpoint.load_model(path), "model.safetensors is damaged (checksum", "step_0000001")


@pytest.mark.parametrize(
    "config", ["", "{", "[]", "3", "null", "{}", "[" * 100_000, '{"package": 3}', '{"package": []}']
)
def test_a_config_that_is_none_is_one_line(runs, config):
    altered(runs / "ar" / "step_0000002" / "model.safetensors", lambda _, metadata: metadata.update(config=config))
    refused(lambda: checkpoint.load_model(runs / "ar"), "step_0000002/model.safetensors: its config ", "copy it again")


@pytest.mark.parametrize(
    "change",
    [
        {"package": "os", "kind": "path"},
        {"package": "visgen.train", "kind": "main"},
        {"package": "visgen.convert", "kind": "check"},
        {"package": "visgen.tokenizers", "kind": "../x"},
        {"package": "visgen.tokenizers", "kind": None},
        {"package": "visgen.tokenizers", "kind": "_conv"},
        {"package": "visgen.model", "backbone": 3},
        {"package": "visgen.model", "backbone": {"kind": ["ar"]}},
        {"package": "visgen.model", "grid": [1, "x", 2]},
        {"package": "visgen.model", "grid": None},
        {"package": "visgen.model", "grid": [1, 1 << 20, 1 << 20]},
        {"package": "visgen.model", "vocab": -1},
        {"package": "visgen.model", "vocab": 1e300},
    ],
)
def test_configs_that_name_no_module_are_one_line(runs, change):
    path = runs / "ar" / "step_0000002" / "model.safetensors"
    altered(path, lambda _, metadata: metadata.update(config=json.dumps({**json.loads(metadata["config"]), **change})))
    refused(lambda: checkpoint.load_module(path), str(path))


def test_sizes_are_compared_before_memory_is_taken(runs, monkeypatch):
    path = runs / "ar" / "step_0000002" / "model.safetensors"
    altered(path, lambda _, facts: facts.update(config=facts["config"].replace('"vocab": 15', '"vocab": 16777216')))
    built = []
    real = checkpoint.Model.__init__

    def spy(self, config):
        built.append(torch.empty(0).device.type)
        real(self, config)

    monkeypatch.setattr(checkpoint.Model, "__init__", spy)
    refused(lambda: checkpoint.load_model(runs / "ar"), "its tensors do not fit its config", "[16777216, 16]")
    assert built == ["meta"]


@pytest.mark.parametrize("classes", ["", "{", "3", '"ant"', "[1, 2]", "{}", "null", "[" * 100_000])
def test_classes_that_are_no_names_are_one_line(runs, classes):
    path = runs / "ar" / "step_0000002" / "model.safetensors"
    altered(path, lambda _, metadata: metadata.update(classes=classes))
    refused(lambda: checkpoint.load_model(runs / "ar"), "its classes are ", "not a list of names")


@pytest.mark.parametrize("step", ["x", "-3", "8.0", "", "null", "True"])
def test_a_step_that_is_no_number_is_one_line(runs, step):
    path = runs / "ar" / "step_0000002" / "model.safetensors"
    altered(path, lambda _, metadata: metadata.update(step=step))
    refused(lambda: checkpoint.load_model(runs / "ar"), f"its step is '{step}', not a number")


def test_parts_without_a_base_and_in_a_circle_are_one_line(runs):
    path = runs / "ar" / "step_0000002" / "model.safetensors"
    altered(path, lambda _, metadata: metadata.update(part="control"))
    refused(lambda: checkpoint.load_model(runs / "ar"), "holds the part 'control' and names no base")
    altered_again = {"base": "abc", "base_path": str(runs / "ar")}
    with safe_open(path, "pt") as file:
        metadata = {**file.metadata(), **altered_again}
    save_file(load_file(path), path, metadata)
    refused(lambda: checkpoint.load_model(runs / "ar"), "is this part itself", "--base")
    refused(lambda: checkpoint.load_model(runs / "ar", base=runs / "ar"), "is this part itself", "--base")
    other = runs / "other" / "step_0000001"
    other.mkdir(parents=True)
    (other / "meta.json").write_text("{}")
    save_file(load_file(path), other / "model.safetensors", {**metadata, "base_path": str(runs / "ar")})
    save_file(load_file(path), path, {**metadata, "base_path": str(runs / "other")})
    refused(lambda: checkpoint.load_model(runs / "ar"), "is this part itself", "--base")


@pytest.mark.parametrize("step", [9, 12, None, -3, "2", 2.0, True, [], {}])
def test_a_step_that_is_not_its_directory_is_refused(runs, step):
    folder = runs / "ar" / "step_0000002"
    for write in (run_files.write_meta, lambda folder, facts: (folder / "meta.json").write_text(json.dumps(facts))):
        write(folder, {"step": step})
        refused(lambda: run_files.read_meta(folder), f"its step is {step!r}, its directory is step_0000002")
        refused(lambda: checkpoint.load_model(runs / "ar"), "meta.json is damaged", "step_0000001")


def test_facts_that_were_edited_are_refused(runs):
    folder = runs / "ar" / "step_0000002"
    run_files.write_meta(folder, {"step": 2, "samples": 80})
    assert run_files.read_meta(folder) == {"step": 2, "samples": 80}
    (folder / "meta.json").write_text((folder / "meta.json").read_text().replace("80", "81"))
    refused(lambda: run_files.find_step(runs / "ar"), "meta.json is damaged (its checksum differs")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples", "80"),
        ("samples", -1),
        ("data_samples", 8.0),
        ("data_samples", None),
        ("processes", True),
        ("objective", 3),
        ("crc32", [1]),
        ("crc32", {"state/model.safetensors": "1"}),
        ("best", {"step": 1, "value": "x"}),
        ("best", {"step": 1, "value": float("nan")}),
        ("best", {"step": 1, "since": -1}),
        ("best", {"step": 1, "metric": 3}),
        ("best", {"step": True}),
    ],
)
def test_facts_of_other_types_are_refused(runs, name, value):
    folder = runs / "ar" / "step_0000002"
    run_files.write_meta(folder, {"step": 2, name: value})
    refused(lambda: run_files.read_meta(folder), "meta.json is damaged (its ", name)


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_the_umask_decides_the_permissions_of_weights(tmp_path, mask):
    before, tokenizer = os.umask(mask), make_tokenizer()
    try:
        checkpoint.save_module(tmp_path / "t.safetensors", tokenizer, tokenizer.config)
    finally:
        os.umask(before)
    assert (tmp_path / "t.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
