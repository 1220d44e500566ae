"""Claims about settings of earlier versions: a run that they describe resumes, and an old flag names the new one."""

import json
import re
from pathlib import Path

import pytest

import config
import main
import migrations
from config import Config, preset
from errors import UserError

# The config.json of `tiny`, written when there were 104 settings.
OLD = Path(__file__).parent / "fixtures/config_104_settings.json"


def old(**changed) -> dict:
    """The settings of the old file, some of them changed by their old dotted names."""
    values = json.loads(OLD.read_text())
    for name, value in changed.items():
        group, _, setting = name.partition(".")
        assert setting in values[group], name
        values[group][setting] = value
    return values


def test_settings_of_the_version_with_104_are_those_of_today():
    """Catches a run whose config.json names a setting that is gone, and so cannot resume or be sampled."""
    assert len(migrations.flatten(old())) == 104
    assert Config.from_dict(old()) == preset("tiny")
    assert config.first_difference(old(), preset("tiny").to_dict()) is None
    assert migrations.dropped(old()) == []


DROPPED = {  # a setting that is gone, a value it had -> what is said of it
    "run.join_timeout_s": (70, "processes have 5 times --run.peer_timeout_s to join"),
    "run.hang_timeout_s": (0, "a step has 30 times --run.peer_timeout_s to finish"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_value_that_is_dropped_is_reported(name, tmp_path, capsys):
    """Catches a run that resumes in another way than it was started, and prints nothing; and one that cannot resume."""
    value, instead = DROPPED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(old(**{name: value})))
    assert main.parse(["--config", str(file)]) == preset("tiny")
    assert capsys.readouterr().out == f"note: {name}={value!r}, of an earlier version, is dropped: {instead}\n"


@pytest.mark.parametrize("name", migrations.GONE_SETTINGS)
def test_an_old_flag_names_what_replaces_it(name):
    """Catches a flag of an earlier version that is only called unknown."""
    instead = migrations.GONE_SETTINGS[name][1]
    for flag in ([f"--{name}", "1"], [f"--{name.replace('_', '-')}=1"]):
        with pytest.raises(UserError, match=re.escape(f" is gone: {instead}")):
            main.parse(["tiny", *flag])
    with pytest.raises(UserError, match=re.escape(f"the setting {name} is gone: {instead}")):
        preset("tiny", **{name: 1})
