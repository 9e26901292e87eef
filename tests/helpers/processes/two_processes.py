"""How processes that a test has started end together."""

import os
import time
from pathlib import Path


WORLD_SIZE = 2


def leave(rank, folder):
    """Ends a process when all are done, without freeing its group: gloo's thread then waits for Python, and Python for
    it.
    """
    Path(folder, f"done-{rank}").touch()
    end = time.monotonic() + 60
    while time.monotonic() < end and not all(Path(folder, f"done-{other}").exists() for other in range(WORLD_SIZE)):
        time.sleep(0.01)
    os._exit(0)
