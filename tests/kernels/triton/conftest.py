"""Tests of Triton kernels run in the repaired interpreter, with every access checked; nothing to import or ask for."""

import triton
import triton_interpreter

if triton.knobs.runtime.interpret:
    triton_interpreter.install()
