"""Web server of `alignkit watch`: fixed routes, no parameters, GET only; listens on loopback unless --host is given.

`state` reads the monitor's files, and `plot` draws. The policy in `HEADERS` forbids inline scripts and styles, so the
templates use only watch.js and watch.css.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import ipaddress
import json
import socket
import threading
from pathlib import Path

from ..errors import InputError, UnsupportedError
from ..runtime.machine import installed
from . import plot
from .state import Watched

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# matplotlib's SVG contains an inline style sheet; the policy allows nothing else.
_SVG_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_NEEDED = ("starlette", "uvicorn", "jinja2", "matplotlib")


def require_libraries() -> None:
    """Raise UnsupportedError if a required library is not installed."""
    missing = [name for name in _NEEDED if not installed(name)]
    if missing:
        raise UnsupportedError(
            f"alignkit watch: missing packages: {', '.join(missing)}. Run pip install 'alignkit[watch]'."
        )


def app(directory: Path, hosts: list[str]):
    """Return the ASGI application.

    hosts: accepted Host headers, ``["*"]`` for all; a restricted list protects against DNS rebinding.
    """
    import jinja2
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import Response
    from starlette.routing import Route

    watched = Watched(directory)
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("alignkit.watch", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(number=_number, value=_value, bytes=_bytes, clock=_clock)
    page, live = templates.get_template("page.html.j2"), templates.get_template("live.html.j2")
    folder = Path(__file__).parent
    script, style = (folder / "watch.js").read_text(), (folder / "watch.css").read_text()
    plotted: dict[str, bytes] = {}  # the latest plot, keyed by its version
    drawing = threading.Lock()

    def answer(text: str | bytes, kind: str, **headers: str) -> Response:
        return Response(text, media_type=kind, headers={**HEADERS, **headers})

    def version(data: dict) -> str:
        return hashlib.sha256(json.dumps(data["curves"]).encode()).hexdigest()[:16]

    def fragment(data: dict) -> str:
        return live.render(data=data, version=version(data))

    # Synchronous handlers: Starlette runs them in a thread pool.
    def show_page(_request) -> Response:
        from markupsafe import Markup  # a dependency of jinja2; the fragment is already escaped

        return answer(page.render(directory=str(directory), live=Markup(fragment(watched.refresh()))), "text/html")

    def show_live(_request) -> Response:
        return answer(fragment(watched.refresh()), "text/html")

    def show_data(_request) -> Response:
        return answer(json.dumps(watched.refresh(), allow_nan=False), "application/json")

    def show_plot(_request) -> Response:
        data = watched.refresh()
        with drawing:
            key = version(data)
            if key not in plotted:
                plotted.clear()
                plotted[key] = plot.svg(data["curves"])
            return answer(plotted[key], "image/svg+xml", **{"content-security-policy": _SVG_POLICY})

    def show_script(_request) -> Response:
        return answer(script, "text/javascript")

    def show_style(_request) -> Response:
        return answer(style, "text/css")

    application = Starlette(
        routes=[
            Route(path, function)
            for path, function in (
                ("/", show_page),
                ("/live", show_live),
                ("/data.json", show_data),
                ("/drift.svg", show_plot),
                ("/watch.js", show_script),
                ("/watch.css", show_style),
            )
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
    )
    application.router.redirect_slashes = False
    return application


def serve(directory: Path, host: str, port: int, started) -> None:
    """Serve until interrupted; call `started` with the URL once the server accepts connections.

    Raises InputError if the directory, host or port cannot be used, and UnsupportedError if a library is missing.
    """
    require_libraries()
    import uvicorn

    application = app(directory, _allowed_hosts(host))
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as e:
        if isinstance(e, OSError) and e.errno == errno.EADDRINUSE:
            raise InputError(
                f"--port: must be free on {host}, got {port}, which is in use. Pass another port, or 0 for a free port."
            ) from None
        raise InputError(f"--host, --port: cannot listen on {host}, port {port}: {e}") from None
    with listening:
        netloc = f"[{host}]" if family == socket.AF_INET6 else host
        address = f"http://{netloc}:{listening.getsockname()[1]}/"

        class Server(uvicorn.Server):
            async def startup(self, sockets=None) -> None:
                await super().startup(sockets)
                started(address)  # from here on uvicorn handles signals and shuts down gracefully

        Server(
            uvicorn.Config(
                application,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=32,
                timeout_keep_alive=10,
                ws="none",
                lifespan="off",
            )
        ).run(sockets=[listening])


def _allowed_hosts(host: str) -> list[str]:
    """Return the Host headers that a server on `host` accepts."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return ["localhost", "127.0.0.1", "[::1]", "::1", host] if loopback else ["*"]


def _number(x) -> str:
    return "" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)


def _value(x: float | None) -> str:
    """Return x with 9 significant digits, which identify an fp32 value."""
    return "not finite" if x is None else f"{x:.9g}"


def _bytes(x: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if x < 1024:
            return f"{x:.4g} {unit}"
        x /= 1024
    return f"{x:.4g} GiB"


def _clock(x: float | None) -> str:
    if x is None or not 0 <= x < 2**37:  # beyond the year 6000 it is not a timestamp
        return ""
    return datetime.datetime.fromtimestamp(x, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
