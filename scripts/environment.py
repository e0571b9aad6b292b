"""Make or update ``.venv``, the project's own environment; run by ``make setup``.

A step whose work is done already costs nothing.  The steps are:

1. A virtual environment of the calling interpreter.
2. torch.  If the calling interpreter has a recent torch, ``.venv`` uses it and the interpreter's other packages: a ``.pth`` file
   names the interpreter's package folders.  This also works if the interpreter is itself in a virtual environment; the usual
   option for system packages would show the packages of its parent.  Otherwise this step installs torch: the default build if the
   machine has an NVIDIA GPU, else the CPU build.
3. The requirements in pyproject.toml: build requirements, dependencies, the extras ``server`` and ``dev``.  pip downloads
   only missing packages, so a machine that has all of them needs no network.  Without network, extras may be missing.
4. The project itself, editable.  The setuptools of step 3 builds it without an isolated build, so this step downloads nothing.
5. The kernels of this processor, compiled into the user's cache.  Without this step the first command compiles them.

The file uses the syntax of Python 3.8, so that an older interpreter than we need gets a message, not a syntax error.
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
    """Run the steps; the file ``.ready`` is written last and shows make that all steps succeeded."""
    require_python()
    if READY.exists():
        READY.unlink()
    make_venv()
    provide_torch()
    install_requirements()
    say("installing deepinfer itself, editable")
    if not pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT)):
        stop("the project could not be installed; pip's message above says why")
    say("compiling the kernels of this processor")
    subprocess.call([str(VENV_PYTHON), "-c", "from deepinfer.ops import cpu; cpu.is_available()"], cwd=str(ROOT))
    READY.touch()
    say(f"ready: {VENV_PYTHON.relative_to(ROOT)}")


def require_python() -> None:
    """Stop with a message if this interpreter is too old or cannot make virtual environments."""
    if sys.version_info[:2] < LEAST_PYTHON:
        wanted = ".".join(map(str, LEAST_PYTHON))
        stop(f"Python {wanted} or newer is needed, {sys.executable} is {version_of_python()}; run make PYTHON=/path/to/python3")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        stop("this Python cannot make virtual environments; on Debian, install the package python3-venv")


def make_venv() -> None:
    """Create the environment, unless a working environment with the same Python version exists."""
    probe = "import sys; sys.stdout.write('.'.join(map(str, sys.version_info[:3])))"
    if VENV_PYTHON.exists() and output_of(str(VENV_PYTHON), "-c", probe) == version_of_python():
        return
    say(f"making .venv with Python {version_of_python()}")
    if subprocess.call([sys.executable, "-m", "venv", "--clear", str(VENV)]):
        stop("the virtual environment could not be made; the message above says why")
    # Python before 3.12 installs an old setuptools, which would hide a newer setuptools of the calling interpreter.
    output_of(str(VENV_PYTHON), "-m", "pip", "uninstall", "--yes", "setuptools")


def provide_torch() -> None:
    """Give ``.venv`` a recent torch: use the torch of the calling interpreter, or install one."""
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
    installed = output_of(str(VENV_PYTHON), "-c", "import importlib.metadata as m, sys; sys.stdout.write(m.version('torch'))")
    if installed.split("+")[0] == TORCH:
        return
    if output_of("nvidia-smi", "-L"):
        say(f"an NVIDIA GPU is present: installing torch {TORCH}")
        done = pip(f"torch=={TORCH}")
    else:
        say(f"no NVIDIA GPU is present: installing the CPU build of torch {TORCH}")
        done = pip(f"torch=={TORCH}+cpu", quiet=True)
        if not done:
            say("the CPU build is not available here: installing the default build, a larger download")
            done = pip(f"torch=={TORCH}")
    if not done:
        stop("torch could not be installed; pip's message above says why")


def install_requirements() -> None:
    """Install the requirements in pyproject.toml; extras may be missing afterwards, dependencies may not."""
    import tomllib  # exists since Python 3.11, which require_python has checked

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = project["build-system"]["requires"] + project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    say("installing the requirements in pyproject.toml")
    if pip(*needed, *extras["server"], *extras["dev"]):
        return
    if not pip("--no-index", *needed, quiet=True):
        stop("the dependencies could not be installed; pip's message above says why")
    say("some tools for development or images could not be installed: text works, but make check and some tests will not")


def pip(*arguments: str, quiet: bool = False) -> bool:
    """Run ``pip install`` in ``.venv``, show its important lines, and return whether it succeeded."""
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
    """The version of torch in the calling interpreter, or None."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(*command: str) -> str:
    """The output of a command; "" if it fails or does not exist."""
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def version_of_python() -> str:
    """The calling interpreter's version, as ``3.11.2``."""
    return sysconfig.get_python_version() + f".{sys.version_info[2]}"


def say(line: str) -> None:
    """Print one line and flush it, because stdout may be a pipe."""
    sys.stdout.write(f"setup: {line}\n")
    sys.stdout.flush()


def stop(reason: str) -> None:
    """Exit with a message."""
    sys.exit(f"setup: {reason}")


if __name__ == "__main__":
    main()
