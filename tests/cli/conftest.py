"""What the tests of the command line share."""

from collections.abc import Callable

import pytest

from polyfed.cli import main


@pytest.fixture
def polyfed_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str, str]]:
    """Calls the command; gives exit code, standard output and standard error."""

    def call(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(words)
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call
