"""The plan on paper: its formulas by hand, and the table of docs/scaling.md as the program prints it."""

from pathlib import Path

import pytest

from visgen.config import UserError
from visgen.train import plan
from visgen.train.plan import PlanConfig

ROOT = Path(__file__).parents[2]


def test_formulas_by_hand():
    settings = PlanConfig(mfu=0.5, peak_tflops=100.0, node=4, link=400.0, network=50.0)
    assert plan.step_seconds(1e12, 64, 8, settings) == pytest.approx(64 / (8 * 50))
    assert plan.move_seconds(10**9, 4, settings) == pytest.approx(8e9 * 3 / 4 / 400e9)
    assert plan.move_seconds(10**9, 8, settings) == pytest.approx(8e9 * 7 / 8 / 200e9)


def test_a_row(monkeypatch):
    monkeypatch.chdir(ROOT)
    row = plan.table([Path("configs/imagenet256/ar_l.yaml")], PlanConfig()).splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["ar_l", "342.9", "509.0"] and cells[4] == f"{20 * 0.3429:.1f}"
    hours = 1501367 * 256 * 509.0e9 / (8 * 989e12 * 0.4) / 3600
    assert cells[6].startswith(f"{hours:,.0f}, ")


def test_the_document_has_what_the_program_prints(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "scaling.md").read_text()
    names = "ar_b ar_l ar_xl ar_xxl ar_3b mar_b mar_l mar_h acdit_b acdit_l acdit_xl acdit_h"
    plan.main([f"configs/imagenet256/{name}.yaml" for name in names.split()])
    assert capsys.readouterr().out.strip() in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the YAMLs"),
        (["configs/debug/vq.yaml"], "no formula"),
        (["configs/debug/next_token.yaml", "--mfu", "1.5"], "mfu"),
        (["configs/accelerate/gpu8.yaml"], "gpu8.yaml: .*compute_environment"),
    ],
)
def test_refusals(monkeypatch, words, said):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=said):
        plan.main(words)


def test_help_needs_no_yaml(capsys):
    with pytest.raises(SystemExit) as found:
        plan.main(["--help"])
    assert found.value.code == 0 and "--mfu" in capsys.readouterr().out
