"""Make or update ``.venv``, the project's own environment; run by ``make setup``.

Steps, each of which costs nothing when its work is done already:

1. A virtual environment of the calling interpreter.
2. torch.  If the calling interpreter has a recent one, ``.venv`` uses that and the packages beside it: a ``.pth`` file names
   the interpreter's package folders, which works too where the interpreter is itself a virtual environment (the usual
   switch for system packages would show those of its parent).  Otherwise the default build where an NVIDIA GPU answers,
   else the CPU build.
3. What pyproject.toml asks for: build requirements, dependencies and the extra ``dev``.  pip asks the network
   only for what is missing, so a machine that has everything needs none.  Without network, missing extras are forgiven.
4. The project itself, editable, built by the setuptools that step 3 saw to: no isolated build, hence no further download.

Written for any Python 3.8, so that an older one than we need gets a sentence rather than a syntax error.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
READY = VENV / ".ready"
LEAST_PYTHON = (3, 11)
LEAST_TORCH = (2, 11)
TORCH = "2.13.0"


def main() -> None:
    """Run the steps; the file ``.ready`` is written last and tells make that all went well."""
    require_python()
    if READY.exists():
        READY.unlink()
    make_venv()
    provide_torch()
    install_requirements()
    say("installing deepinfer itself, editable")
    if not pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT)):
        stop("the project could not be installed; pip's message above says why")
    READY.touch()
    say(f"ready: {VENV_PYTHON.relative_to(ROOT)}")


def require_python() -> None:
    """Stop with a sentence if this interpreter is too old or cannot make virtual environments."""
    if sys.version_info[:2] < LEAST_PYTHON:
        wanted = ".".join(map(str, LEAST_PYTHON))
        stop(f"Python {wanted} or newer is needed, {sys.executable} is {version_of_python()}; run make PYTHON=/path/to/python3")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        stop("this Python cannot make virtual environments; on Debian, install the package python3-venv")


def make_venv() -> None:
    """Create the environment unless a working one of the same Python version is there."""
    probe = "import sys; sys.stdout.write('.'.join(map(str, sys.version_info[:3])))"
    if VENV_PYTHON.exists() and output_of(str(VENV_PYTHON), "-c", probe) == version_of_python():
        return
    say(f"making .venv with Python {version_of_python()}")
    if subprocess.call([sys.executable, "-m", "venv", "--clear", str(VENV)]):
        stop("the virtual environment could not be made; the message above says why")
    # Python before 3.12 puts an old setuptools there, which would hide a newer one of the calling interpreter.
    output_of(str(VENV_PYTHON), "-m", "pip", "uninstall", "--yes", "setuptools")


def provide_torch() -> None:
    """Let ``.venv`` see a recent torch: the calling interpreter's, or one that is installed now."""
    site = Path(output_of(str(VENV_PYTHON), "-c", "import sysconfig, sys; sys.stdout.write(sysconfig.get_path('purelib'))"))
    link = site / "packages_of_calling_interpreter.pth"
    if link.exists():
        link.unlink()
    found = installed_torch()
    if found and tuple(map(int, re.findall(r"\d+", found)[:2])) >= LEAST_TORCH:
        say(f"using torch {found} of {sys.executable}")
        folders = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
        link.write_text("\n".join(folders) + "\n", encoding="utf-8")
        return
    there = output_of(str(VENV_PYTHON), "-c", "import importlib.metadata as m, sys; sys.stdout.write(m.version('torch'))")
    if there.split("+")[0] == TORCH:
        return
    if output_of("nvidia-smi", "-L"):
        say(f"an NVIDIA GPU is present: installing torch {TORCH}")
        done = pip(f"torch=={TORCH}")
    else:
        say(f"no NVIDIA GPU is present: installing the CPU build of torch {TORCH}")
        done = pip(f"torch=={TORCH}+cpu", quiet=True)
        if not done:
            say("the CPU build is not on offer here: installing the default build, a larger download")
            done = pip(f"torch=={TORCH}")
    if not done:
        stop("torch could not be installed; pip's message above says why")


def install_requirements() -> None:
    """Install what pyproject.toml asks for; the extras may be missing in the end, the dependencies may not."""
    import tomllib  # known since Python 3.11, which require_python has seen to

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = project["build-system"]["requires"] + project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    say("installing what pyproject.toml asks for")
    if pip(*needed, *extras["dev"]):
        return
    if not pip("--no-index", *needed, quiet=True):
        stop("the dependencies could not be installed; pip's message above says why")
    say("some tools for development or images could not be installed: text works, but make check and some tests will not")


def pip(*arguments: str, quiet: bool = False) -> bool:
    """Run ``pip install`` in ``.venv``, show its telling lines, and return whether it went well."""
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    process = subprocess.Popen(
        [str(VENV_PYTHON), "-m", "pip", "install", "--retries", "2", "--progress-bar", "off", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        env={**os.environ, **settings},
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        word, _, rest = line.strip().partition(" ")
        if word == "Downloading":
            say(f"  downloading {rest}")
        elif word == "Installing" and "," in rest:
            say(f"  unpacking {rest.count(',') + 1} packages")
    return process.wait() == 0


def installed_torch() -> str | None:
    """The version of torch in the calling interpreter, if it has one."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(*command: str) -> str:
    """What a command prints; "" if it fails or does not exist."""
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def version_of_python() -> str:
    """The calling interpreter's version, as ``3.11.2``."""
    return sysconfig.get_python_version() + f".{sys.version_info[2]}"


def say(line: str) -> None:
    """Print one line at once, also into a pipe."""
    sys.stdout.write(f"setup: {line}\n")
    sys.stdout.flush()


def stop(reason: str) -> None:
    """End with a sentence."""
    sys.exit(f"setup: {reason}")


if __name__ == "__main__":
    main()
