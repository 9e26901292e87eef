"""Where the files of this checkout are. A test file may lie in any folder below `tests`."""

from pathlib import Path


HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
EXAMPLES = ROOT / "examples"
