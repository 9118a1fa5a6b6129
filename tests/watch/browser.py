"""Headless Chromium, and an `alignkit watch` server for it; helpers of the tests and screenshots."""

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
    """Run Chromium with a fresh profile; return its stdout."""
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
    """Run `alignkit watch` on a free port in `folder`; yield (process, URL)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "alignkit.cli", "watch", str(directory), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        # Background jobs of a shell ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        output, deadline = b"", time.monotonic() + 300
        while b"\n" not in output:
            ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(process.stdout.fileno(), 4096) if ready else b""
            assert chunk, f"`alignkit watch` printed no address: {output.decode()}"
            output += chunk
        yield process, re.search(r"http://\S+/", output.decode())[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()
