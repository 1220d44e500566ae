import pytest

import generate
from tests.generate.models import save_run


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("runs") / "rule")


@pytest.fixture(scope="session")
def rule(run_directory):
    return generate.load(str(run_directory))
