"""The page's server: fixed addresses, no parameters, GET only, on the loopback interface unless asked."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import socket
import threading
from pathlib import Path

from ..check.machine import installed
from ..errors import InputError, UnsupportedError
from . import plot
from .state import Watched

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# matplotlib's SVG holds a style sheet of its own; nothing else may be in it.
_SVG_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_NEEDED = ("starlette", "uvicorn", "jinja2", "matplotlib")


def require_libraries() -> None:
    """Raises UnsupportedError if what the page needs is not installed."""
    missing = [name for name in _NEEDED if not installed(name)]
    if missing:
        raise UnsupportedError(f"alignkit watch needs {' and '.join(missing)}: pip install 'alignkit[watch]'")


def app(directory: Path, hosts: list[str]):
    """The ASGI application. hosts: the names under which it may be addressed, so that no page of another site can
    read it by a name of its own that leads here; ``["*"]`` for all."""
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
    here = Path(__file__).parent
    script, style = (here / "watch.js").read_text(), (here / "watch.css").read_text()
    plotted: dict[str, bytes] = {}  # the last plot alone, by what it is of
    drawing = threading.Lock()

    def answer(text: str | bytes, kind: str, **headers: str) -> Response:
        return Response(text, media_type=kind, headers={**HEADERS, **headers})

    def version(data: dict) -> str:
        return hashlib.sha256(json.dumps(data["curves"]).encode()).hexdigest()[:16]

    def fragment(data: dict) -> str:
        return live.render(data=data, version=version(data))

    # Plain functions: starlette runs them on threads.
    def show_page(_request) -> Response:
        from markupsafe import Markup  # jinja2's; the fragment was escaped when it was made

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
    """Serves until it is interrupted. started: is called with the address when it listens.

    Raises InputError for a directory, host or port that cannot be had, and UnsupportedError without the libraries.
    """
    require_libraries()
    import uvicorn

    application = app(directory, _names(host))
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as e:
        raise InputError(f"--host, --port: cannot listen on {host}, port {port}: {e}") from None
    with listening:
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        address = f"http://{shown}:{listening.getsockname()[1]}/"

        class Server(uvicorn.Server):
            async def startup(self, sockets=None) -> None:
                await super().startup(sockets)
                started(address)  # not before: from here on a signal is uvicorn's, and ends it in order

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


def _names(host: str) -> list[str]:
    """Under which names a server on `host` may be addressed."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return ["localhost", "127.0.0.1", "[::1]", "::1", host] if loopback else ["*"]


def _number(x) -> str:
    return "" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)


def _value(x: float | None) -> str:
    """As many digits as tell one fp32 from the next."""
    return "not finite" if x is None else f"{x:.9g}"


def _bytes(x: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if x < 1024:
            return f"{x:.4g} {unit}"
        x /= 1024
    return f"{x:.4g} GiB"


def _clock(x: float | None) -> str:
    if x is None or not 0 <= x < 2**37:  # after the year 6000 it is no time
        return ""
    return datetime.datetime.fromtimestamp(x, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
