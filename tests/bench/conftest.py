"""The benchmark client is a script, so its modules import each other by their bare names; its tests do the same."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
