"""Tests of Triton kernels run in the repaired interpreter, with every access checked; or compiled, on a GPU.

There is nothing to import or to ask for; `tests/conftest.py` says which of the two it is.
"""

import torch
import triton
import triton_interpreter
import triton_on_device

if triton.knobs.runtime.interpret:
    triton_interpreter.install()
else:
    triton_on_device.install(torch.device("cuda"))
