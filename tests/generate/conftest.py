import json

import pytest

import generate
from tests.generate.models import RULE, trained
from train import checkpoint


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory):
    """The files of a finished run that generation reads."""
    directory = tmp_path_factory.mktemp("runs") / "rule"
    with checkpoint.open_directory(directory / "checkpoints") as manager:
        checkpoint.save(manager, 200, trained(), {})
    about = {"config": RULE.to_dict(), "data": {"tokenizer": {"name": "bytes"}}}
    (directory / "config.json").write_text(json.dumps(about))
    return directory


@pytest.fixture(scope="session")
def rule(run_directory):
    return generate.load(str(run_directory))
