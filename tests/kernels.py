"""Runs tests with the arithmetic of a plainer processor.

``python -m tests.kernels COMMAND …`` runs a command with every library told to use only the
instructions that each processor of this architecture has, and with embedders in float32 where this
processor would have them compute in bfloat16. Sums are then added up in another order, and a test
that holds for the rounding of one processor only fails. Without a command it prints what the
libraries compute with.
"""

import os
import platform
import subprocess
import sys

NO_BFLOAT16 = "CTXGUARD_TEST_NO_BFLOAT16"
"""Set for tests that take this processor for one without bfloat16; read in ``conftest.py``."""

PLAIN = {
    "OPENBLAS_CORETYPE": {"x86_64": "Nehalem", "aarch64": "ARMV8"}.get(platform.machine(), ""),
    "FAISS_SIMD_LEVEL": "NONE",
    "ATEN_CPU_CAPABILITY": "default",
    NO_BFLOAT16: "1",
}


def in_force() -> dict[str, set[str]]:
    """What the libraries compute with in this process, by the environment variable that says so."""
    import faiss
    import scipy.linalg  # noqa: F401  its OpenBLAS shows only once it is loaded
    import torch
    from threadpoolctl import threadpool_info

    libraries = [library for library in threadpool_info() if library["internal_api"] == "openblas"]
    return {
        "OPENBLAS_CORETYPE": {library["architecture"] for library in libraries},
        "FAISS_SIMD_LEVEL": {faiss.SIMDConfig.get_level_name()},
        "ATEN_CPU_CAPABILITY": {torch.backends.cpu.get_cpu_capability().lower()},
    }


def numpy_features() -> str:
    """The instructions beyond the plainest that numpy uses here, as it takes them to switch off."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name])


def show() -> bool:
    """Print what the libraries compute with; whether that is what the environment asks for."""
    obeyed = True
    for variable, found in in_force().items():
        wanted = os.environ.get(variable)
        obeyed &= wanted is None or {name.lower() for name in found} == {wanted.lower()}
        print(f"{variable}={wanted or ''}: {', '.join(sorted(found))}", flush=True)  # noqa: T201
    return obeyed


def main(command: list[str]) -> int:
    """The command's exit status; 1 where a library does not compute as it was told to."""
    if not command:
        return 0 if show() else 1
    environment = {**os.environ, **PLAIN, "NPY_DISABLE_CPU_FEATURES": numpy_features()}
    for each in ([sys.executable, "-m", "tests.kernels"], command):
        status = subprocess.run(each, env=environment, check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
