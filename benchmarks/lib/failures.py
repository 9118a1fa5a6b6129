"""A pytest plugin for ``gpu_tests.py``: what a failed test says is printed when the test has failed, not when all have ended,
each line after `MARK`: of a run that is cut short it is known too."""

import pytest

MARK = "! "


class _Failures:
    def __init__(self, terminal):
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)  # after the line with the test's name
    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.terminal.ensure_newline()
            said = [f"{report.nodeid}, {report.when}", report.longreprtext]
            said += [f"{name}:\n{text}" for name, text in report.sections]
            for line in "\n".join(said).splitlines():
                self.terminal.write_line(MARK + line)


@pytest.hookimpl(trylast=True)  # what prints is there by then
def pytest_configure(config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:  # in processes of pytest-xdist there is none
        config.pluginmanager.register(_Failures(terminal))
        terminal.summary_failures = terminal.summary_errors = lambda: None  # they have been told
