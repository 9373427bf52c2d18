"""The parts of the check are programs whose modules import each other by their bare names; their tests do the same."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "bench")]
