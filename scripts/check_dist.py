"""Compare the wheel in dist/ with git: it must hold every tracked file of the package, byte for byte, and no other.

`make dist` builds the source archive, the wheel out of the source archive, and runs this script.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"


def tracked() -> dict[str, Path]:
    """The package's files by their names in the wheel."""
    listed = subprocess.run(["git", "ls-files", "src/hasslefree"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / line for line in listed.stdout.splitlines()]
    return {file.relative_to(SOURCE).as_posix(): file for file in files}


def differences(wheel: Path) -> list[str]:
    """One line for each file that the wheel lacks, that git does not track, or that differs."""
    expected = tracked()
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("hasslefree/")}
        missing = [f"missing: {name}" for name in sorted(expected.keys() - held)]
        extra = [f"not in git: {name}" for name in sorted(held - expected.keys())]
        both = sorted(expected.keys() & held)
        other = [f"differs: {name}" for name in both if archive.read(name) != expected[name].read_bytes()]
    return missing + extra + other


if __name__ == "__main__":
    wheels = list((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"dist/ holds {len(wheels)} wheels, and one is expected; run make dist")
    if found := differences(wheels[0]):
        sys.exit("\n".join([f"{wheels[0].name} is not what git holds:", *found]))
    print(f"{wheels[0].name} holds all {len(tracked())} files of the package.")
