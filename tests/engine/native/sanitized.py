"""Run the tests of the engine's kernels with AddressSanitizer and UndefinedBehaviorSanitizer.

`python tests/engine/native/sanitized.py [pytest arguments]` compiles libs/engine-native aside with
both, and runs tests/engine/native on that build. The first finding ends the process with its place.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "libs/engine-native"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
#: Warnings of sanitized code are no errors: instrumentation hides from GCC what is initialised.
REPLACED = {"-O3": "-O1", "-Werror": "-w"}


def main() -> int:
    """Build, and run pytest; return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        preload = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True)
        environment = os.environ | {
            "LD_PRELOAD": preload.strip(),
            # The interpreter itself leaks; its own allocator would hide what reads beyond.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": folder,
            "HALFMOON_SANITIZED": folder,
        }
        arguments = sys.argv[1:] or ["tests/engine/native", "-q", "-x"]
        return subprocess.call(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=ROOT,
            env=environment,
        )


def build(folder: Path) -> None:
    """Compile the extension into a copy of its package."""
    described = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
    (module,) = described["tool"]["setuptools"]["ext-modules"]
    package = folder / "halfmoon_engine_native"
    shutil.copytree(
        PACKAGE / "halfmoon_engine_native", package, ignore=shutil.ignore_patterns("*.so", "__py*")
    )
    flags = [REPLACED.get(flag, flag) for flag in module["extra-compile-args"]]
    include = f"-I{sysconfig.get_paths()['include']}"

    def compile_source(source: str) -> Path:
        made = folder / f"{Path(source).stem}.o"
        command = [
            "g++",
            *flags,
            *SANITIZERS,
            "-g",
            "-fPIC",
            include,
            "-c",
            source,
            "-o",
            str(made),
        ]
        subprocess.run(command, cwd=PACKAGE, check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_source, module["sources"]))
    target = package / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = ["g++", "-shared", "-pthread", *SANITIZERS, *map(str, objects), "-o", str(target)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
