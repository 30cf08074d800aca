"""A lock of a folder ends with the process that has it, also if this process has forked others."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from polyfed.core.errors import RecipeError
from polyfed.experiment.running.lock import alone_in

WITH_A_CHILD = """
import os, sys, time
from pathlib import Path
from polyfed.experiment.running.lock import alone_in

with alone_in(Path(sys.argv[1]), "another process is writing this run", "Wait for it"):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


def taken(folder: Path) -> bool:
    try:
        with alone_in(folder, "another process is writing this run", "Wait for it"):
            return False
    except RecipeError:
        return True


def test_a_killed_process_releases_its_lock_although_its_worker_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITH_A_CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert taken(tmp_path), "the child has left the lock, and its parent still has it"
            parent.kill()
            parent.wait()
            os.kill(child, 0)  # raises ProcessLookupError if the child has ended
            assert not taken(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


LEAVES_THE_BLOCK = """
import os, sys
from pathlib import Path
from polyfed.experiment.running.lock import alone_in

with alone_in(Path(sys.argv[1]), "another process is writing this run", "Wait for it"):
    child = os.fork()
    other = -1 if child else os.open(os.devnull, os.O_RDONLY)  # the child reuses the number of the lock
if child == 0:
    os.fstat(other)  # raises OSError if the end of the block has closed it
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_that_leaves_the_block_closes_no_other_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVES_THE_BLOCK, str(tmp_path)], check=True)
    assert not taken(tmp_path)


def test_a_process_cannot_lock_a_folder_twice(tmp_path: Path) -> None:
    with alone_in(tmp_path, "another process is writing this run", "Wait for it"):
        assert taken(tmp_path)
    assert not taken(tmp_path)
