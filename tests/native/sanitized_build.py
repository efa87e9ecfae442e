"""Compile an extension of this project with AddressSanitizer and UndefinedBehaviorSanitizer.

`python tests/native/sanitized_build.py engine-native|transfer-native [pytest arguments]` compiles
the package aside with both, and runs its tests on that build. The first finding ends the process
with its place.
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

ROOT = Path(__file__).parents[2]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
#: Warnings of sanitized code are no errors: instrumentation hides from GCC what is initialised.
REPLACED = {"-O3": "-O1", "-O2": "-O1", "-Werror": "-w"}
#: Tests of each package's extension.
TESTS = {
    "engine-native": ("tests/engine/native",),
    "transfer-native": (
        "tests/transfer/backends/test_tcp_native.py",
        "tests/transfer/backends/test_shm_native_copy.py",
        "tests/transfer/backends/test_tcp_encryption.py",
        "tests/fuzz/test_transfer_frames.py",
        "tests/fuzz/test_transfer_extension.py",
    ),
}


def main() -> int:
    """Build, and run pytest; return its exit status."""
    if len(sys.argv) < 2 or sys.argv[1] not in TESTS:
        print(f"usage: {sys.argv[0]} {'|'.join(TESTS)} [pytest arguments]", file=sys.stderr)
        return 2
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        build(ROOT / "libs" / name, Path(folder))
        # libstdc++ too, as libasan looks up its functions before any other library is loaded.
        preload = [
            subprocess.check_output(["g++", f"-print-file-name={library}"], text=True).strip()
            for library in ("libasan.so", "libstdc++.so.6")
        ]
        environment = os.environ | {
            "LD_PRELOAD": " ".join(preload),
            # The interpreter itself leaks; its own allocator would hide what reads beyond.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": folder,
            "HALFMOON_SANITIZED": folder,
        }
        options = sys.argv[2:] or ["-q", "-x"]
        if all(each.startswith("-") for each in options):
            options = [*TESTS[name], *options]
        return subprocess.call(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
            cwd=ROOT,
            env=environment,
        )


def build(source: Path, folder: Path) -> None:
    """Compile the extension of a package's source into a copy of the package."""
    described = tomllib.loads((source / "pyproject.toml").read_text())
    (module,) = described["tool"]["setuptools"]["ext-modules"]
    (name,) = described["tool"]["setuptools"]["packages"]
    package = folder / name
    shutil.copytree(source / name, package, ignore=shutil.ignore_patterns("*.so", "__py*"))
    flags = [REPLACED.get(flag, flag) for flag in module["extra-compile-args"]]
    include = f"-I{sysconfig.get_paths()['include']}"

    def compile_source(file: str) -> Path:
        made = folder / f"{Path(file).stem}.o"
        compiler = "gcc" if file.endswith(".c") else "g++"
        arguments = [*flags, *SANITIZERS, "-g", "-fPIC", include, "-c", file, "-o", str(made)]
        subprocess.run([compiler, *arguments], cwd=source, check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_source, module["sources"]))
    target = package / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    linked = module.get("extra-link-args", [])
    command = ["g++", "-shared", "-pthread", *SANITIZERS, *map(str, objects), "-o", str(target)]
    subprocess.run([*command, *linked], check=True)


if __name__ == "__main__":
    sys.exit(main())
