"""Builds the native kernels at install time, so that nothing is compiled when lohan runs.

The library is plain C++ behind a C interface, loaded with ctypes: it includes no Python or torch headers, so one build
serves every Python and every torch. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import shutil

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

LIBRARY = "lohan.native.libkernels"

# The bits of an update may not depend on the processor or the compiler: no contraction to FMA and no fast-math. errno and
# trap flags, which no kernel reads, would keep sqrt and conditional loops from being vectorised.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wextra"]


class BuildKernels(build_ext):
    """Compiles the kernels as a plain shared object, under a name without a Python version in it."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        compiler = self.compiler.compiler_so_cxx[0]
        if shutil.which(compiler) is None:
            raise CompileError(
                f"lohan's kernels need a C++17 compiler and {compiler!r} is not installed. "
                "Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or name yours in CXX."
            )
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            LIBRARY,
            ["lohan/native/kernels.cpp"],
            depends=["lohan/native/xxh3.h"],
            language="c++",
            extra_compile_args=FLAGS,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
