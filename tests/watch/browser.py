"""Debian's chromium without a window, and a server for it."""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


def chromium(*args: str, url: str, timeout: float = 300) -> str:
    """What it prints. Its profile is a new one each time."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", *args, url],
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def watch(directory: Path, *options: str, folder: str | None = None):
    """`alignkit watch` on a free port, run in `folder`: yields (its process, its address)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "alignkit.cli", "watch", str(directory), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        # A shell's background jobs ignore it, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        said, deadline = b"", time.monotonic() + 300
        while b"\n" not in said:
            ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
            piece = os.read(process.stdout.fileno(), 4096) if ready else b""
            assert piece, f"it did not listen: {said.decode()}"
            said += piece
        yield process, re.search(r"http://\S+/", said.decode())[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()
