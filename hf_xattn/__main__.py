"""`python -m hf_xattn` is the command `hf-xattn`, for launchers of modules: `accelerate launch -m hf_xattn train`."""

import sys

from .commands.main import main


if __name__ == "__main__":
    sys.exit(main())
