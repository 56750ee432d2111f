"""Production in an environment without compilers (`make slim`): read-only root, and a user with no home and no name."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.jobs.test_warm_start import PROMPT, REPOSITORY, SERVE, Site
from tests.support.reference import greedy

SLIM = REPOSITORY / ".venv-slim" / "bin" / "python"
NAMELESS = 54321

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SLIM.exists(), reason="there is no .venv-slim/: run `make slim`"),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root"),
]


@pytest.fixture
def site() -> Iterator[Site]:
    """Beside the repository's caches, because /tmp is covered in the server's view."""
    folder = REPOSITORY / ".cache" / "slim-test"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield Site(folder)
    shutil.rmtree(folder)


def test_a_nameless_user_on_a_read_only_root_serves_strictly_from_the_remote_tier(site: Site) -> None:
    variables = {
        "PATH": "/usr/bin:/bin",
        "VLLM_CACHE_ROOT": "/no/such/folder",
        "NEURON_LIBTORCH_REMOTE_CACHE": site.remote,
        "VLLM_NEURON_BACKEND": "neuron_native",
        "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    settings = shlex.join(f"{name}={value}" for name, value in variables.items())
    # To read a private home folder that Python may lie in is all that is left of root's powers.
    user = f"setpriv --reuid {NAMELESS} --regid {NAMELESS} --clear-groups --inh-caps=-all,+dac_read_search"
    command = f"{user} --ambient-caps=+dac_read_search env -i {settings} {shlex.join([str(SLIM), '-c', SERVE])}"
    view = (
        "mount -t tmpfs -o mode=1777 tmpfs /tmp && mount -o remount,bind,ro / && cd / && "
        f"{command} {shlex.quote(str(site.model))}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", view],
        text=True,
        capture_output=True,
        timeout=500,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    assert "3 of 3 graphs need no capture (0 from the local tier, 3 from the remote tier)" in output
    assert f"TOKENS {greedy(site.model, PROMPT, 8)}" in output
