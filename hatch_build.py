"""Builds the compiled module, ``ctxguard/_support/_compiled``, for a wheel or in place.

``python hatch_build.py`` builds it in place, as an editable install does. Compilers are tried in
turn: ``$CC``, cc, gcc, clang, and the one that the package ziglang brings. Where none can build it,
the install succeeds without it, and ctxguard computes with numpy.

``CTXGUARD_WHEEL_TARGET`` names a platform of zig's to build a wheel for, on any machine; a wheel
that cannot be built then fails. See ``TARGETS``.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path(__file__).parent / "ctxguard" / "_support" / "_compiled"
NAME = "_kernels.abi3.so"
COMPILER = "ziglang>=0.15"

# The same results with every compiler and on every processor: no instructions of this processor
# alone, no sums in another order, no fused multiplication and addition.
FLAGS = [
    "-O3", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-Wall", "-g0",
]  # fmt: skip

# Platforms of zig and the tags of their wheels. glibc 2.17 and macOS 11 are the oldest that the
# wheels of numpy have run on.
TARGETS = {
    "x86_64-linux-gnu.2.17": "manylinux_2_17_x86_64.manylinux2014_x86_64",
    "aarch64-linux-gnu.2.17": "manylinux_2_17_aarch64.manylinux2014_aarch64",
    "x86_64-linux-musl": "musllinux_1_2_x86_64",
    "aarch64-linux-musl": "musllinux_1_2_aarch64",
    "aarch64-macos.11.0": "macosx_11_0_arm64",
    "x86_64-macos.11.0": "macosx_11_0_x86_64",
}


class BuildError(Exception):
    """No compiler could build the module; the message has the output of each."""


def sources_digest() -> str:
    """A digest of the sources, which the module carries to show what it was built from."""
    digest = hashlib.sha256()
    for file in sorted(FOLDER.glob("*.[ch]")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def compilers() -> list[list[str]]:
    """The commands that may compile C here, best first."""
    found = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else []
    found += [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    return found + _zig("-mcpu=baseline")


def _zig(*options: str) -> list[list[str]]:
    return [[sys.executable, "-m", "ziglang", "cc", *options]] if find_spec("ziglang") else []


def build(into: Path, target: str | None = None) -> None:
    """Build the module.

    Args:
        into: The file to write.
        target: A platform of `TARGETS`; None for this machine's.

    Raises:
        BuildError: no compiler was found, or each failed.
    """
    commands = compilers() if target is None else _zig("-target", target)
    for_mac = sys.platform == "darwin" if target is None else "macos" in target
    failures = []
    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        made = Path(folder) / NAME
        environment = {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder, **os.environ}
        for compiler in commands:
            command = [
                *compiler, *FLAGS, *(["-undefined", "dynamic_lookup"] if for_mac else []),
                f'-DSOURCES="{sources_digest()}"', "-o", str(made),
                *map(str, sorted(FOLDER.glob("*.c"))), "-lm",
            ]  # fmt: skip
            try:
                ran = subprocess.run(
                    command, capture_output=True, text=True, check=False, env=environment
                )
            except OSError as error:
                failures.append(f"{compiler[0]}: {error}")
                continue
            if ran.returncode == 0 and made.is_file():
                # Replaced, not written over: a process may have the former one loaded.
                made.replace(into)
                return
            failures.append(f"{shlex.join(compiler)}: {ran.stderr[-2000:]}")
    raise BuildError(
        "\n".join(failures) or "no C compiler (cc, gcc, clang, or pip install ziglang)"
    )


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the compiled module into a wheel, or beside its sources for an editable install."""

    def dependencies(self) -> list[str]:
        """A compiler as a package, where none is installed and one exists for this platform."""
        wanted = "CTXGUARD_WHEEL_TARGET" in os.environ or not compilers()
        known = platform.machine() in ("x86_64", "aarch64", "arm64")
        return [COMPILER] if wanted and known else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build; a failure is a warning unless the wheel is for a platform that was named."""
        target = os.environ.get("CTXGUARD_WHEEL_TARGET")
        editable = version == "editable"
        into = FOLDER / NAME if editable else Path(self.directory) / NAME
        into.parent.mkdir(parents=True, exist_ok=True)
        try:
            build(into, target)
        except BuildError as error:
            if target is not None:
                raise
            self.app.display_warning(f"ctxguard will compute with numpy, more slowly: {error}")
            return
        if not editable:
            tag = TARGETS[target] if target else sysconfig.get_platform()
            tag = tag.replace("-", "_")
            tag = tag if target else tag.replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{tag}"
            build_data["pure_python"] = False
            build_data["force_include"][str(into)] = f"ctxguard/_support/_compiled/{NAME}"

    def finalize(self, version: str, *_: object) -> None:
        """Remove the module that the wheel holds."""
        if version != "editable":
            (Path(self.directory) / NAME).unlink(missing_ok=True)


def main() -> None:
    """Build in place; say why where that fails."""
    try:
        build(FOLDER / NAME)
    except BuildError as error:
        (FOLDER / NAME).unlink(missing_ok=True)
        sys.stderr.write(f"ctxguard will compute with numpy, more slowly: {error}\n")


if __name__ == "__main__":
    main()
