"""The image of deploy/Containerfile: what it says, how it runs under a stranger's user id, and, where podman is, the image itself."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from containers import DEPLOY, USER, Container, health_command, last, reasons_against, stages, variables
from waiting import wait_for

ROOT = Path(__file__).parents[2]
BODY = {"input": "A whimbrel is a wader."}
OPENSHIFT = f"{USER}:0"
ASK = """
import json, urllib.request
headers = {"Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/embeddings", b'{"input": "A whimbrel is a wader."}', headers)
print(len(json.load(urllib.request.urlopen(request))["data"][0]["embedding"]))
"""
"""A program that asks for a vector and prints its width."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def ignored() -> list[str]:
    """Return the paths that the context keeps."""
    return re.findall(r"^!(.+)$", (DEPLOY / "Containerfile.dockerignore").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_image_has_the_pinned_packages_and_all_its_files() -> None:
    build = "\n".join(each.text for each in stages()[1])
    assert "--require-hashes -r /src/requirements/serve.txt" in build
    assert "-r /src/requirements/torch.txt" in build
    copied = [word for each in stages()[1] if each.name == "COPY" for word in each.text.split()[:-1]]
    assert all((ROOT / path).exists() for path in [*ignored(), *copied])
    assert set(copied) <= set(ignored())


def test_the_image_asks_for_no_rights_and_no_name() -> None:
    """A numeric user, so that Kubernetes can see that it is not root, of the group that platforms give to user ids of their own."""
    assert last("USER") == "1000:0"
    assert last("ENTRYPOINT") == '["tini", "--", "whimbrel"]'
    assert {"HOME", "USER"} <= variables().keys()
    assert {value.split("/")[1] for value in variables().values() if value.startswith("/")} == {"tmp", "models"}


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    if reason := reasons_against():
        pytest.skip(reason)
    port = free_port()
    with Container(tmp_path_factory.mktemp("container"), port) as container:
        wait_for(lambda: container.process.poll() is not None or httpx2.get(f"{container.url}/health/ready").status_code == 200)
        assert container.process.poll() is None, container.log
        yield container


def test_a_user_without_a_line_in_passwd_and_a_root_that_cannot_be_written(container: Container) -> None:
    assert len(httpx2.post(f"{container.url}/v1/embeddings", json=BODY, timeout=30).json()["data"]) == 1
    assert container.run("id", "--user").stdout.strip() == str(USER)
    assert container.run("whoami").returncode != 0
    assert "Read-only" in container.run("touch", "/etc/x").stderr
    assert "Traceback" not in container.log


def test_the_libraries_ask_for_no_name(container: Container) -> None:
    """PyTorch's compiler and Triton choose folders by the user's name and home."""
    code = (
        "import getpass, os; print(getpass.getuser(), os.path.expanduser('~'));"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    )
    asked = container.run("python", "-c", code)
    assert asked.stdout.split() == ["whimbrel", "/tmp", "/tmp/inductor"], asked.stderr


def test_the_health_check_follows_the_server(container: Container) -> None:
    command = [word.replace("8000", str(container.port)) for word in health_command()]
    assert container.run(*command).returncode == 0
    other = [word.replace("8000", str(free_port())) for word in health_command()]
    assert container.run(*other).returncode != 0


def test_sigterm_to_process_1_ends_with_0_and_leaves_no_process(container: Container) -> None:
    statuses = container.run("sh", "-c", "cat /proc/[0-9]*/stat").stdout.splitlines()
    assert not [line for line in statuses if line.rpartition(")")[2].split()[0] == "Z"]
    assert container.stop(signal.SIGTERM) == 0, container.log


PODMAN = shutil.which("podman")
RUNTIME = ["--runtime=runc"] if shutil.which("runc") else []
BASE = os.environ.get("WHIMBREL_TEST_BASE", "")
BUILD = ("build", "--layers=false", "--format=docker", "--isolation=chroot", "--network=host")
SMALLEST = "localhost/whimbrel-smallest"
LIMITS = ("--ulimit=nofile=8192:8192", "--ulimit=nproc=8192:8192")


def podman(*arguments: str) -> str:
    done = subprocess.run([PODMAN or "podman", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout.strip()


def debian(folder: Path) -> str:
    """Make a base image from Debian's archive."""
    base, packages = "localhost/whimbrel-base", "--include=python3,python3-venv,ca-certificates"
    subprocess.run(["debootstrap", "--variant=minbase", packages, "bookworm", folder / "root"], check=True, capture_output=True)
    subprocess.run(["tar", "-C", folder / "root", "-cf", folder / "root.tar", "."], check=True)
    podman("import", str(folder / "root.tar"), base)
    return base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Find an image to build on, and try whether this machine builds and runs images at all."""
    if PODMAN is None or os.getuid() != 0 or (not BASE and shutil.which("debootstrap") is None):
        pytest.skip(
            "no podman, no debootstrap or no root: apt install podman runc debootstrap, or name a base in WHIMBREL_TEST_BASE"
        )
    try:
        base = BASE or debian(tmp_path_factory.mktemp("base"))
        smallest = tmp_path_factory.mktemp("smallest") / "Containerfile"
        smallest.write_text(f"FROM {base}\nRUN apt-get update\n")
        podman(*BUILD, f"--tag={SMALLEST}", f"--file={smallest}", str(smallest.parent))
        podman(*RUNTIME, "run", "--rm", "--network=none", "--read-only", *LIMITS, base, "true")
    except (AssertionError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine builds and runs no image: {error}")
    yield base
    podman("image", "rm", "--force", SMALLEST, *(() if BASE else (base,)))


@pytest.fixture(scope="module")
def image(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    wheels = os.environ.get("PIP_FIND_LINKS", "")  # a folder that this machine's pip looks into, so that of the image does too
    mounts = [f"--volume={path}:{path}:ro" for path in (wheels, "/etc/ssl/certs") if path and Path(path).is_dir()]
    pip = tmp_path_factory.mktemp("pip") / "pip.conf"
    pip.write_text(f"[global]\nfind-links = {wheels}\n" if wheels else "")
    podman(
        *BUILD, "--tag=localhost/whimbrel-test",
        *(f"--file={DEPLOY / 'Containerfile'}", f"--ignorefile={DEPLOY / 'Containerfile.dockerignore'}"),
        *(f"--build-arg=BASE={base}", "--build-arg=TORCH_INDEX=", *mounts, f"--volume={pip}:/etc/pip.conf:ro", str(ROOT)),
    )  # fmt: skip
    return "localhost/whimbrel-test"


@pytest.mark.timeout(1800)
def test_the_image_is_built_and_serves(image: str) -> None:
    """Read-only, without capabilities, as a user id of OpenShift's: health, an answer, and the end by SIGTERM."""
    name = podman(
        *(*RUNTIME, "run", "--detach", "--network=none", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"),
        *(f"--user={OPENSHIFT}", *LIMITS, image),
    )

    def inside(*command: str) -> str:
        return podman(*RUNTIME, "exec", name, *command)

    def healthy() -> bool:
        command = [str(PODMAN), *RUNTIME, "healthcheck", "run", name]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    try:
        assert wait_for(healthy), podman("logs", name)
        assert inside("python", "-c", ASK) == "384"
        assert "Read-only" in inside("sh", "-c", "touch /etc/x 2>&1 || true")
        assert not inside("sh", "-c", "grep -l '^State:.Z' /proc/[0-9]*/status || true")
        podman(*RUNTIME, "stop", "--time=30", name)
        assert podman("inspect", "--format={{.State.ExitCode}}", name) == "0"
    finally:
        podman(*RUNTIME, "rm", "--force", name)
        podman("image", "rm", "--force", image)
