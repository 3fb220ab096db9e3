import dataclasses
import json
import math

import pytest
import torch

from visgen.config import UserError
from visgen.metrics import report as module
from visgen.metrics.protocol import EvalProtocol, Score
from visgen.metrics.report import Report, diagnose, environment, paired, table

PROTOCOL = EvalProtocol(extractor="fd_debug", reference="synthetic", n=500, groups=4)


def _report(value=2.0, protocol=PROTOCOL, **other):
    left = tuple(value + d for d in (0.1, -0.1, 0.05, -0.05))
    scores = {
        "fd": Score(value, se=0.1234567, floor=0.5, bias_corrected=1.8, n=500, terms={"mean": 0.1}, leave_out=left),
        "perplexity": Score(math.nan, n=500, note="no tokens"),
    }
    return Report(protocol, scores, sampling={"cfg": 2.0, "plan": "abc"}, command="eval/fid.py --n 500", **other)


def test_written_files(tmp_path):
    report = _report(model={"ckpt": "runs/x/step_0000100", "loss": math.nan}, speed={"img_per_s": 12.5})
    assert report.write(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    text = (tmp_path / "a/b/report.json").read_text()
    data = json.loads(text)
    assert text == json.dumps(data, sort_keys=True, indent=2) + "\n" and "NaN" not in text
    assert data["protocol"]["hash"] == PROTOCOL.hash and data["metrics"]["fd"]["se"] == 0.1234567
    assert data["metrics"]["perplexity"]["value"] is None and data["metrics"]["perplexity"]["reason"] == "value is nan"
    assert data["model"] == {"ckpt": "runs/x/step_0000100", "loss": None, "reason": "loss is nan"}
    assert {"git_sha", "torch", "gpu", "python"} <= set(data["env"])
    page = (tmp_path / "a/b/report.md").read_text()
    assert "| fd | 2 ± 0.12 | 1.8 | 0.5 | 500 |" in page and PROTOCOL.hash in page
    assert "eval/fid.py --n 500" in page and "> **Warning:** perplexity: is nan" in page


def test_loading_returns_what_was_written(tmp_path):
    first = _report()
    first.write(tmp_path)
    back = Report.load(tmp_path)
    assert back.protocol == first.protocol and back.scores["fd"] == first.scores["fd"]
    assert back.to_dict()["created_utc"] == first.created_utc and math.isnan(back.scores["perplexity"].value)
    data = json.loads((tmp_path / "report.json").read_text())
    data["protocol"]["n"] = 50_000
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="its protocol was edited"):
        Report.load(tmp_path / "report.json")
    with pytest.raises(UserError, match="does not exist"):
        Report.load(tmp_path / "none")


def test_warnings_do_not_multiply_when_rewritten(tmp_path):
    _report(warnings=["by hand"]).write(tmp_path)
    Report.load(tmp_path).write(tmp_path)
    warnings = Report.load(tmp_path).to_dict()["warnings"]
    assert len(warnings) == len(set(warnings)) and "by hand" in warnings


def test_remarks_stand_under_the_table_and_survive(tmp_path):
    _report(remarks=["**PASS**", "| a |\n|---|"]).write(tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert page.index("| fd |") < page.index("\n\n**PASS**\n\n| a |\n|---|\n\n") < page.index("Protocol")
    assert Report.load(tmp_path).remarks == ["**PASS**", "| a |\n|---|"]
    data = json.loads((tmp_path / "report.json").read_text())
    del data["remarks"]  # a file from before there were any
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert Report.load(tmp_path).remarks == []


def test_table_refuses_different_protocols():
    rows = {"real": _report(1.7), "ours": _report(9.25)}
    text = table(rows, ["fd"])
    assert "| ours | 9.25 ± 0.12 |" in text and PROTOCOL.hash in text
    other = dataclasses.replace(PROTOCOL, n=600)
    with pytest.raises(UserError, match=r"'real' .*'ours' .*they differ in n \(500 and 600\)"):
        table({**rows, "ours": _report(9.25, other)}, ["fd"])
    with pytest.raises(UserError, match="report 'real' has no 'kid'; it has fd, perplexity"):
        table(rows, ["kid"])


def test_paired_needs_one_plan():
    a, b = _report(2.0), _report(2.5)
    assert paired(b, a, "fd").difference == pytest.approx(0.5)
    b.sampling = {"plan": "other"}
    with pytest.raises(UserError, match="one sample plan, got abc and other"):
        paired(a, b, "fd")
    with pytest.raises(UserError, match="cannot be compared"):
        paired(a, _report(protocol=dataclasses.replace(PROTOCOL, groups=5)), "fd")


def test_random_weights_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"fd_efflite0!random has random weights"):
        _report(protocol=dataclasses.replace(PROTOCOL, extractor="fd_efflite0!random")).write(tmp_path)


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file/sub .*choose another --out"):
        _report().write(tmp_path / "file" / "sub")


def test_diagnoses():
    scores = {
        "fd": Score(10.0, se=0.1, floor=1.0, terms={"mean": 5.0, "rank_ok": 0.0}),
        "near": Score(1.1, se=0.1, floor=1.0),
    }
    checks = {"clipped_fraction": 0.2, "unique_images": 90, "images": 100}
    found = " | ".join(diagnose(scores, checks))
    for words in ("50% of it is the mean term", "near: within 2 SE", "missing clamp", "10 of 100 images"):
        assert words in found
    assert "singular" in found
    assert diagnose({"fd": Score(10.0, se=0.1, floor=1.0, terms={"mean": 1.0, "rank_ok": 1.0})}, {}) == []


def test_environment_outside_a_checkout(monkeypatch):
    assert environment()["torch"] == torch.__version__
    monkeypatch.setattr(module, "_git", lambda *words: None)
    assert environment()["git_sha"] == "unknown"


def test_flat_keys_for_a_tracker():
    flat = _report().flat()
    key = f"eval/{PROTOCOL.id}/fd"
    assert flat[key] == 2.0 and flat[f"{key}_se"] == 0.1234567 and flat[f"{key}_bias_corrected"] == 1.8
