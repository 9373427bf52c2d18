"""Steps of other sizes do not have kernels compiled anew, or everybody would wait in the middle of serving."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ATTENTION_TILES = 2  # narrow and wide


def test_a_kernel_is_compiled_once_whatever_the_sizes_of_a_step() -> None:
    script = Path(__file__).with_name("aot_variants.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    variants = json.loads(done.stdout.splitlines()[-1])
    assert variants.pop("paged_attention_kernel") == ATTENTION_TILES
    assert variants.pop("attention_reduction_kernel") <= ATTENTION_TILES
    assert variants == dict.fromkeys(variants, 1)
    assert len(variants) == 6
