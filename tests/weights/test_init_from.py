"""A run that starts from another's parameters takes over only the settings that they need."""

import dataclasses

import main
from tests.test_training import ROOT
from weights import __main__ as weights_command, convert, init_from

FIXTURES = ROOT / "tests/weights/fixtures"


def test_only_settings_that_parameters_need_are_taken_over(tmp_path, monkeypatch):
    """Catches a preset's precision and balancing silently replaced by those of the other run, a flag that is replaced,
    a selection bias that the model has no place for, and an encoder without inputs."""
    for family in ("deepseek_v3", "mixtral"):
        assert weights_command.main(["from-hf", str(FIXTURES / family), "--out", str(tmp_path / family)]) == 0
    ours = main.parse(["laptop"]).model
    for family, rate in (("deepseek_v3", 0.001), ("mixtral", 0.0)):
        flags = ["laptop", "--init-from", str(tmp_path / family), "--model.dropout", "0.1"]
        got, theirs = main.parse(flags).model, convert.read_config(tmp_path / family)
        assert (got.dropout, got.balance_rate) == (0.1, rate)
        assert (got.precision, got.balance_loss) == (ours.precision, ours.balance_loss)
        assert theirs.precision != ours.precision or theirs.balance_loss != ours.balance_loss
        taken = {f.name for f in dataclasses.fields(got)} - set(init_from.KEPT_SETTINGS)
        assert {name: getattr(got, name) for name in taken} == {name: getattr(theirs, name) for name in taken}
    t5 = dataclasses.replace(theirs, attention="gqa", n_experts=0, dense_prefix=0, encoder_layers=3)
    monkeypatch.setattr(convert, "read_config", lambda source: t5)
    flags = ["laptop", "--init-from", "t5"]
    assert main.parse(flags).data.input_len == main.parse(["laptop"]).data.seq_len
    assert main.parse([*flags, "--data.input_len", "40"]).data.input_len == 40
    said = init_from.differing_settings(got, theirs)
    assert "balance_loss=0.01 (there 0.001), dropout=0.1 (there 0.0)" in said
