"""Certificates of `alignkit prove`: a certificate that is damaged, partial, stale or of another machine is rejected."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignkit.errors import InputError, UnsupportedError
from alignkit.runtime import certificates
from alignkit.runtime.certificates import Certificate

KEY = {"device": "NVIDIA A100", "torch": "2.13.0", "alignkit": "ab12"}
CHECKS = {"golden": 138, "sweep linear": 40}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ALIGNKIT_CERTIFICATES", str(tmp_path / "shared"))
    return tmp_path / "shared"


def test_a_certificate_is_found_by_its_key():
    """The written certificate is accepted for all its checks and for any part of them."""
    written = Certificate("ops", KEY, CHECKS)
    file = written.write()
    assert file.parent.name == "shared" and not list(file.parent.glob("*.part"))
    for required in (CHECKS, ["golden"], []):
        found = certificates.require("ops", KEY, required)
        assert (dict(found.key), dict(found.checks), found.digest) == (KEY, CHECKS, written.digest) and found.made


def test_without_a_certificate_the_error_names_the_command(folder):
    with pytest.raises(UnsupportedError, match="ops: is not proved on this machine .*no certificate of ops") as e:
        certificates.require("ops", KEY, CHECKS, "alignkit prove --ops")
    assert "Run `alignkit prove --ops`" in str(e.value) and str(folder) in str(e.value)


@pytest.mark.parametrize("field", KEY)
def test_a_certificate_of_another_key_is_rejected_by_the_field(field):
    """A change of any field of the key, an added and a removed one too, makes a certificate stale."""
    Certificate("ops", KEY, CHECKS).write()
    without = {name: value for name, value in KEY.items() if name != field}
    for key in (KEY | {field: "other"}, without, KEY | {"driver": "580"}):
        reason = certificates.rejection("ops", key, CHECKS)
        assert reason and "is of another installation" in reason
        assert (field if key.get("driver") is None else "driver") in reason
    assert certificates.rejection("ops", KEY, CHECKS) is None


def test_a_foreign_certificate_in_the_place_of_ours_is_rejected():
    """A file that was renamed to this machine's file name does not pass, although it is intact."""
    theirs = Certificate("ops", KEY | {"device": "NVIDIA B200"}, CHECKS)
    theirs.write().rename(Certificate("ops", KEY, CHECKS).file)
    assert "device must be 'NVIDIA A100', got 'NVIDIA B200'" in certificates.rejection("ops", KEY, CHECKS)
    engine = Certificate("vllm", KEY, CHECKS)
    engine.write().rename(Certificate("ops", KEY, CHECKS).file)
    assert "is of vllm" in certificates.rejection("ops", KEY, CHECKS)


def test_a_partial_certificate_is_rejected_by_the_check():
    """A required check that is absent, or that compared nothing, is named."""
    Certificate("ops", KEY, CHECKS | {"fuzz": 0}).write()
    assert "lacks the check 'fuzz'" in certificates.rejection("ops", KEY, [*CHECKS, "fuzz"])
    assert "lacks the check 'races' and 1 more" in certificates.rejection("ops", KEY, ["golden", "races", "streams"])


@given(position=st.floats(0, 0.999), byte=st.integers(32, 126))
def test_an_edited_file_is_rejected(tmp_path_factory, position, byte):
    """Any changed byte is noticed, or leaves the meaning as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALIGNKIT_CERTIFICATES", str(tmp_path_factory.mktemp("certificates")))
        written = Certificate("ops", KEY, CHECKS, "2030-01-01")
        content = bytearray(written.write().read_bytes())
        content[int(position * len(content))] = byte
        written.file.write_bytes(bytes(content))
        try:
            found = certificates.read(written.file)
        except InputError:
            assert certificates.rejection("ops", KEY, CHECKS) is not None
        else:
            assert found == written


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"sha256": 1}', '{"sha256": "", "format": 1}'])
def test_a_file_that_is_no_certificate_is_rejected(folder, text):
    file = Certificate("ops", KEY, CHECKS).write()
    file.write_text(text)
    assert str(file) in certificates.rejection("ops", KEY, CHECKS)


def test_a_truncated_or_recounted_file_is_rejected():
    """Neither a file cut at its end nor one with an added check passes."""
    file = Certificate("ops", KEY, CHECKS).write()
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    assert "must be a certificate" in certificates.rejection("ops", KEY, CHECKS)
    file.write_text(json.dumps(json.loads(whole) | {"checks": CHECKS | {"races": 3}}))
    assert "was changed after `alignkit prove` wrote it" in certificates.rejection("ops", KEY, CHECKS)
    file.write_text(json.dumps(json.loads(whole) | {"format": 2}))
    assert "format must be 1, got 2" in certificates.rejection("ops", KEY, CHECKS)


def test_an_unwritable_folder_is_named(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ALIGNKIT_CERTIFICATES", str(tmp_path / "file"))
    with pytest.raises(InputError, match="ALIGNKIT_CERTIFICATES: must be a writable folder"):
        Certificate("ops", KEY, CHECKS).write()


def test_the_digest_of_files_depends_on_names_and_contents(tmp_path):
    """A changed byte, a moved file and a missing file give other digests; other files do not."""
    (tmp_path / "a.py").write_text("x = 1\n")

    def digest(*names):
        return certificates.files_digest(tmp_path, names)

    first = digest("a.py", "b.py")
    (tmp_path / "c.py").write_text("y = 1\n")
    assert digest("b.py", "a.py") == first
    (tmp_path / "b.py").write_text("")
    second = digest("a.py", "b.py")
    (tmp_path / "a.py").write_text("x = 2\n")
    assert len({first, second, digest("a.py", "b.py"), digest("a.py")}) == 4
