"""`hf-xattn train` in several processes, which write down the rows that each worker reads: LOG, then the command."""

import os
import sys
from pathlib import Path

from torch.utils.data import get_worker_info

from hf_xattn.commands.main import main
from hf_xattn.training.bad_rows import RowReader, resolved


def write_down(log, read=RowReader.__call__):
    def call(self, places):
        worker = get_worker_info()
        name = f"{os.environ.get('RANK', 0)}-{'main' if worker is None else worker.id}"
        with open(Path(log) / name, "a") as file:
            for place in places:
                file.write(f"{resolved(place)[1]}\n")
        return read(self, places)

    RowReader.__call__ = call


if __name__ == "__main__":
    write_down(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
