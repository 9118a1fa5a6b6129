"""A pytest plugin for ``gpu_tests.py``: print the report of a failed test at once, each line after `MARK`.

The failures of an interrupted run are then known too. ``gpu_tests.py`` parses the lines by `MARK`.
"""

import pytest

MARK = "! "


class _Failures:
    def __init__(self, terminal):
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)  # after the line with the test's name
    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.terminal.ensure_newline()
            lines = [f"{report.nodeid}, {report.when}", report.longreprtext]
            lines += [f"{name}:\n{text}" for name, text in report.sections]
            for line in "\n".join(lines).splitlines():
                self.terminal.write_line(MARK + line)


@pytest.hookimpl(trylast=True)  # after the terminal reporter is registered
def pytest_configure(config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:  # pytest-xdist workers have none
        config.pluginmanager.register(_Failures(terminal))
        terminal.summary_failures = terminal.summary_errors = lambda: None  # already printed
