"""Fixtures shared by all tests."""
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Shapes are drawn anew each run; a failure prints the draw. No deadline: two slow cores are a supported machine.
settings.register_profile("alignkit", deadline=None, print_blob=True,
                          max_examples=int(os.environ.get("ALIGNKIT_TEST_EXAMPLES", "20")),
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("alignkit")

# The op tests run on this device; the engines' tests choose theirs.
DEVICE = os.environ.get("ALIGNKIT_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)


@pytest.fixture(scope="session")
def ranks():
    """Four processes joined by gloo."""
    from alignkit.testing import Ranks
    with Ranks(4) as r:
        r.run(4, str)  # they have started: from here on a test may say how long a call may take
        yield r
