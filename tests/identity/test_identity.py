"""`Identity`: its fields, and its import without the ops."""

import dataclasses
import subprocess
import sys

import pytest

from alignkit.errors import InputError
from alignkit.identity import Identity


def test_identities_are_equal_by_value_and_frozen():
    assert Identity("stock", "ab", 3) == Identity("stock", "ab", 3) != Identity("stock", "ab", 4)
    assert Identity("stock") == Identity("stock", None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Identity("stock").epoch = 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"contract": ""}, "contract: expected a string of 1 to 200"),
        ({"contract": "x" * 201}, "contract: expected a string of 1 to 200"),
        ({"contract": "a\nb"}, "contract: .*printable"),
        ({"contract": None}, "contract: .*, got None"),
        ({"weights": ""}, "weights: expected a digest of 1 to 64 hexadecimal"),
        ({"weights": "ABC"}, "weights: .*lower case or None, got 'ABC'"),
        ({"weights": "a" * 65}, "weights: "),
        ({"weights": "٣"}, "weights: "),
        ({"weights": 5}, "weights: .*, got 5"),
        ({"epoch": -1}, r"epoch: expected an int in \[0, 2\^63\) or None, got -1"),
        ({"epoch": True}, "epoch: .*, got True"),
        ({"epoch": 2**63}, "epoch: "),
        ({"epoch": 1.0}, "epoch: .*, got 1.0"),
    ],
)
def test_invalid_fields_are_rejected(change, message):
    with pytest.raises(InputError, match=f"^{message}"):
        Identity(**{"contract": "stock", **change})


def test_drift_imports_no_op():
    code = (
        "import sys, alignkit.drift, alignkit.identity\n"
        "assert 'alignkit.ops' not in sys.modules and 'alignkit.identity.weights' not in sys.modules\n"
        "from alignkit.identity import Fingerprint, of_checkpoint\n"
        "assert not hasattr(alignkit.identity, 'other')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
