"""The counts of a test's guards."""

import pytest

from tests.counted import Counted


@pytest.fixture
def counted() -> Counted:
    return Counted()
