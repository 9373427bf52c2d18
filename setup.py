"""Builds the CPU kernels with the machine's C++ compiler; everything else is in pyproject.toml.

Each file of kernels is compiled once per instruction set. Without a compiler the package installs all the same, and
the server runs on torch's kernels (`optional`).
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/cpu/csrc")
OBJECTS = Path("build/kernels")  # kept: pip's own place for them is new each time, and installs as editable come twice
COMMON = [SOURCES / "library.cpp", SOURCES / "team.cpp"]
FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += ["-Wall", "-Wno-psabi"]

AVX2 = ["-mavx2", "-mfma", "-mf16c", "-DOCTAVO_AVX2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-DOCTAVO_AVX512"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vbmi", "-DOCTAVO_AVX512_BF16"]
AMX = [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-DOCTAVO_AMX"]
PORTABLE = {"portable": ["-DOCTAVO_PORTABLE"]}
X86 = {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": AVX512_BF16, "amx": AMX}
VARIANTS = PORTABLE | (X86 if platform.machine() in ("x86_64", "AMD64") else {})


class BuildKernels(build_ext):
    """Compiles what is older than its source or than any header, on all cores, and links one library."""

    def build_extension(self, ext: Extension) -> None:
        newest_header = max(path.stat().st_mtime for path in (Path(__file__), *SOURCES.glob("*.h")))
        jobs = [(path, "common", []) for path in COMMON]
        kernels = [path for path in sorted(SOURCES.glob("*.cpp")) if path not in COMMON]
        jobs += [(path, isa, flags) for isa, flags in VARIANTS.items() for path in kernels]

        def compile_one(job: tuple[Path, str, list[str]]) -> str:
            source, isa, flags = job
            target = OBJECTS / isa
            built = target / source.with_suffix(".o")
            if not built.exists() or built.stat().st_mtime < max(source.stat().st_mtime, newest_header):
                name = [f"-DOCTAVO_ISA={isa}"]
                self.compiler.compile([str(source)], str(target), extra_postargs=[*FLAGS, *flags, *name])
            return str(built)

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, jobs))
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, str(path), extra_postargs=["-pthread"], target_lang="c++")


setup(
    ext_modules=[Extension("octavo.kernels.cpu._native", [str(path) for path in COMMON], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
