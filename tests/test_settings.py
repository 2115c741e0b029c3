"""Environment variables: what they mean, and that a bad value is refused."""

import logging
from pathlib import Path

import pytest

from codetta import settings
from codetta.errors import SettingsError


@pytest.mark.parametrize(
    "read, name",
    [
        (settings.disabled, "CODETTA_DISABLE"),
        (settings.verify_ir, "CODETTA_VERIFY_IR"),
        (settings.checked, "CODETTA_CHECK"),
    ],
)
@pytest.mark.parametrize("given, meaning", [("1", True), (" On ", True), ("0", False), ("", False), (None, False)])
def test_switches(monkeypatch, read, name, given, meaning):
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    assert read() is meaning


def test_log_level(monkeypatch):
    monkeypatch.delenv("CODETTA_LOG", raising=False)
    assert settings.log_level() == logging.WARNING
    monkeypatch.setenv("CODETTA_LOG", "debug")
    assert settings.log_level() == logging.DEBUG


@pytest.mark.parametrize(
    "given, xdg, path",
    [
        ("/a/b", "/x", "/a/b"),
        ("~/b", None, "{home}/b"),
        ("", "/x", "/x/codetta"),
        (None, None, "{home}/.cache/codetta"),
        (None, "relative", "{home}/.cache/codetta"),
    ],
)
def test_cache_dir(monkeypatch, given, xdg, path):
    for name, value in (("CODETTA_CACHE_DIR", given), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert settings.cache_dir() == Path(path.format(home=Path.home()))


@pytest.mark.parametrize(
    "read, name",
    [
        (settings.disabled, "CODETTA_DISABLE"),
        (settings.verify_ir, "CODETTA_VERIFY_IR"),
        (settings.log_level, "CODETTA_LOG"),
    ],
)
def test_a_bad_value_is_refused(monkeypatch, read, name):
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(SettingsError, match=f"{name}='maybe' means nothing\n  hint: use one of: "):
        read()
