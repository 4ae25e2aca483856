"""What all tests share."""

import os

import pytest
from hypothesis import HealthCheck, settings

# a busy machine is no failure, and CI looks at the same examples every time
settings.register_profile(
    "weft", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("weft")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the golden files anew instead of comparing")
