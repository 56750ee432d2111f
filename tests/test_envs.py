"""The rules of the variables: what is accepted, which name wins, what is warned about, where the cache is."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from vllm_neuron import envs
from vllm_neuron.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of ours is set, and no warning has been given yet."""
    for variable in envs.VARIABLES:
        for name in (variable.name, *variable.old_names):
            monkeypatch.delenv(name, raising=False)
    envs._warn_once.cache_clear()


@pytest.mark.parametrize("text", ["1", "true", "YES", "On", " 1 "])
def test_true(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", text)
    assert envs.CPU_MODE.get() is True


@pytest.mark.parametrize("text", ["0", "False", "no", "OFF"])
def test_false(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", text)
    assert envs.CPU_MODE.get() is False


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("VLLM_NEURON_CPU_MODE", "maybe", "0, false, no, off"),
        ("TORCH_CACHING_PRECOMPILE", "2", "1, true, yes, on"),
        ("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "0", "a whole number, 1 or more"),
        ("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "2.5", "a whole number, 1 or more"),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "nan", "seconds"),
        ("NEURON_LIBTORCH_COMPILATION_TIMEOUT", "-1", "seconds"),
        ("NEURON_LOGICAL_NC_CONFIG", "3", "1 or 2"),
        ("VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION", "1.5", "from 0 to 1"),
        ("VLLM_NEURON_MIN_KV_BUDGET_GIB", "inf", "GiB"),
        ("VLLM_NEURON_LOG_LEVEL", "LOUD", "DEBUG, INFO"),
    ],
)
def test_bad_value_is_named_at_start(monkeypatch: pytest.MonkeyPatch, name: str, text: str, accepted: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        envs.check_environment()
    message = str(caught.value)
    assert f"{name}='{text}'" in message
    assert accepted in message
    assert "\n" not in message


def test_bad_value_under_an_old_name_is_named_as_the_user_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_COMPILATION_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match=r"^VLLM_NEURON_COMPILATION_TIMEOUT='soon'"):
        envs.COMPILATION_TIMEOUT.get()


@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_is_unset(monkeypatch: pytest.MonkeyPatch, empty: str) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_COMPILE", empty)
    monkeypatch.setenv("NEURON_LIBTORCH_REMOTE_CACHE", empty)
    monkeypatch.setenv("VLLM_NEURON_REMOTE_CACHE", "/shared")
    assert envs.CPU_COMPILE.get() is False
    assert not envs.CPU_COMPILE.is_set()
    assert envs.REMOTE_CACHE.get() == "/shared"


def test_values_are_read_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert envs.COMPILE_WORKERS.get() == 8
    monkeypatch.setenv("NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS", "3")
    assert envs.COMPILE_WORKERS.get() == 3


def test_documented_defaults() -> None:
    expected = {
        "VLLM_NEURON_BACKEND": None,
        "VLLM_NEURON_CPU_COMPILE": False,
        "VLLM_NEURON_CPU_MODE": False,
        "NEURON_PLATFORM_TARGET_OVERRIDE": None,
        "NEURON_LIBTORCH_REMOTE_CACHE": None,
        "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": False,
        "NEURON_LIBTORCH_COMPILATION_TIMEOUT": 600,
        "NEURON_LIBTORCH_PARALLEL_COMPILE_WORKERS": 8,
        "VLLM_NEURON_PARALLEL_TRACE_WORKERS": 8,
        "VLLM_NEURON_DISABLE_PARALLEL_TRACE": False,
        "NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND": False,
        "VLLM_NEURON_DISABLE_WARMUP_COMPILE": False,
        "NEURON_LIBTORCH_ASSERT_CACHE_HIT": False,
        "TORCH_CACHING_PRECOMPILE": False,
        "NEURON_COMPILED_ARTIFACTS": None,
        "NEURON_LOGICAL_NC_CONFIG": None,
        "VLLM_NEURON_BARRIER_TIMEOUT": 3600,
        "VLLM_NEURON_LOG_LEVEL": "INFO",
        "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": 0.30,
        "VLLM_NEURON_MIN_KV_BUDGET_GIB": 1.0,
    }
    assert {v.name: v.get() for v in envs.VARIABLES if v.name in expected} == expected


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("neuron_native", True), ("neuron", True), ("vllm_neuron", False), ("other", False), ("", False)],
)
def test_precompile_cache_follows_the_route(monkeypatch: pytest.MonkeyPatch, backend: str, expected: bool) -> None:
    monkeypatch.setenv("VLLM_NEURON_BACKEND", backend)
    assert envs.CACHING_PRECOMPILE.get() is expected
    monkeypatch.setenv("TORCH_CACHING_PRECOMPILE", "0")
    assert envs.CACHING_PRECOMPILE.get() is False


def test_old_name_works_and_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_NEURON_ASSERT_CACHE_HIT", "1")
    assert envs.ASSERT_CACHE_HIT.get() is True
    assert envs.ASSERT_CACHE_HIT.is_set()
    assert envs.strict()
    (message,) = caplog.messages
    assert "VLLM_NEURON_ASSERT_CACHE_HIT is an old name of NEURON_LIBTORCH_ASSERT_CACHE_HIT" in message


def test_new_name_wins(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_NEURON_REMOTE_CACHE", "/old")
    monkeypatch.setenv("NEURON_LIBTORCH_REMOTE_CACHE", "/new")
    assert envs.REMOTE_CACHE.get() == "/new"
    (message,) = caplog.messages
    assert "NEURON_LIBTORCH_REMOTE_CACHE is set too, and wins" in message


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("VLLM_NEURON_CPU_COMPIL", "VLLM_NEURON_CPU_COMPILE"),
        ("VLLM_NEURON_DISABLE_WARMUP", "VLLM_NEURON_DISABLE_WARMUP_COMPILE"),
        ("NEURON_LIBTORCH_REMOTE_CASH", "NEURON_LIBTORCH_REMOTE_CACHE"),
    ],
)
def test_misspelt_name_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str, right: str
) -> None:
    monkeypatch.setenv(wrong, "1")
    envs.check_environment()
    envs.check_environment()
    (message,) = caplog.messages
    assert message.startswith(f"{wrong} is not a known variable")
    assert f"Did you mean {right}?" in message


def test_known_and_foreign_names_are_not_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_NEURON_NO_SUCH_THING", "")
    envs.check_environment()
    assert not caplog.messages


@pytest.mark.parametrize(
    "settings",
    [
        {"VLLM_NEURON_CPU_COMPILE": "1", "VLLM_NEURON_CPU_MODE": "1"},
        {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1"},
        {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND": "1"},
        {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1", "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1"},
        {"NEURON_LIBTORCH_ASSERT_CACHE_HIT": "1", "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "1"},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_contradictions_name_both_variables(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "cpu")
    for name, text in settings.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        envs.check_environment()
    assert all(name in str(caught.value) for name in settings)


def test_cpu_compile_needs_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_COMPILE", "1")
    with pytest.raises(ConfigError, match="NEURON_PLATFORM_TARGET_OVERRIDE"):
        envs.check_environment()
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "cpu")
    envs.check_environment()


def test_cpu_compile_may_be_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NEURON_CPU_COMPILE", "1")
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "cpu")
    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
    envs.check_environment()
    assert envs.strict()


def test_remotes_are_urls_or_absolute_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_LIBTORCH_REMOTE_CACHE", "s3://bucket/prefix, shared,~/mine,,/x")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert envs.REMOTE_CACHE.get() == f"s3://bucket/prefix,{tmp_path}/shared,{tmp_path}/home/mine,,/x"


Mounts = Callable[[str], None]


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mounts:
    """Has psutil read its table of mounts from a file of ours: one mount a line, as in /proc/self/mounts."""

    def write(table: str) -> None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "mounts").write_text(table)
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))

    return write


def test_local_tier_follows_the_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert envs.get_neuron_compile_cache_dir() == f"{tmp_path}/neuron/compile_cache"
    assert not (tmp_path / "neuron").exists()


def test_relative_cache_root_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "cache")
    assert envs.get_neuron_compile_cache_dir() == f"{tmp_path}/cache/neuron/compile_cache"


def test_default_cache_root_is_that_of_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounts: Mounts) -> None:
    mounts("/dev/root / ext4 rw 0 0\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert envs.get_neuron_compile_cache_dir() == f"{tmp_path}/.cache/vllm/neuron/compile_cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert envs.get_neuron_compile_cache_dir() == f"{tmp_path}/xdg/vllm/neuron/compile_cache"


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre"])
def test_network_home_falls_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounts: Mounts, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    mounts(f"/dev/root / ext4 rw 0 0\nserver:/home {tmp_path} {kind} rw 0 0\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    expected = f"/tmp/vllm_neuron_wdir_{getpass.getuser()}/neuron/compile_cache"
    assert envs.get_neuron_compile_cache_dir() == expected
    (message,) = caplog.messages
    assert kind in message
    assert str(Path(expected).parent) in message
    assert "VLLM_CACHE_ROOT" in message


def test_named_cache_root_on_a_network_file_system_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounts: Mounts, caplog: pytest.LogCaptureFixture
) -> None:
    mounts(f"/dev/root / ext4 rw 0 0\nserver:/home {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert envs.get_neuron_compile_cache_dir() == f"{tmp_path}/neuron/compile_cache"
    assert not caplog.messages


def test_innermost_and_latest_mount_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounts: Mounts) -> None:
    home = tmp_path / "home"
    mounts(f"server:/ / nfs rw 0 0\nserver:/x {home} nfs rw 0 0\n/dev/sdb {home} xfs rw 0 0\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert envs.get_neuron_compile_cache_dir().startswith(str(home))


def test_older_name_of_the_local_tier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(tmp_path / "artifacts"))
    assert envs.get_neuron_compile_cache_dir() == str(tmp_path / "artifacts")
    assert "NEURON_COMPILED_ARTIFACTS is deprecated" in caplog.text
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    assert envs.get_neuron_compile_cache_dir() == f"{tmp_path}/root/neuron/compile_cache"
    assert "NEURON_COMPILED_ARTIFACTS is ignored" in caplog.text


def test_import_is_light_and_default_agrees_with_vllm(tmp_path: Path) -> None:
    """The values that vLLM itself finds are the independent ones."""
    script = (
        "import os, sys, vllm_neuron.envs as ours\n"
        "assert not {'torch', 'vllm', 'psutil'} & set(sys.modules), 'heavy import'\n"
        "from vllm import envs as theirs\n"
        "for name in (None, 'XDG_CACHE_HOME', 'VLLM_CACHE_ROOT'):\n"
        "    if name: os.environ[name] = os.path.join(os.environ['HOME'], name)\n"
        "    assert ours.CACHE_ROOT.get() == theirs.VLLM_CACHE_ROOT, (name, theirs.VLLM_CACHE_ROOT)\n"
    )
    environment = {name: text for name, text in os.environ.items() if name != "XDG_CACHE_HOME"}
    environment["HOME"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs a user without a name")
def test_a_user_with_no_home_and_no_name_has_a_cache_folder(tmp_path: Path) -> None:
    """As a container's arbitrary user id has it, where nothing sets HOME; a `~` of such a user is a clear error."""
    program = (
        "from vllm_neuron import envs\n"
        "print(envs.get_neuron_compile_cache_dir(), envs._user())\n"
        "import os; os.environ['VLLM_CACHE_ROOT'] = '~/cache'\n"
        "envs.check_environment()\n"
    )
    # Root's right to read is kept: Python may lie in a private home folder.
    nameless = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "--inh-caps=-all,+dac_read_search",
                "--ambient-caps=+dac_read_search"]  # fmt: skip
    variables = {"PYTHONPATH": str(Path(envs.__file__).parents[1])}
    done = subprocess.run([*nameless, sys.executable, "-c", program], env=variables, cwd="/", text=True,
                          capture_output=True)  # fmt: skip
    assert done.stdout == "/.cache/vllm/neuron/compile_cache 54321\n"
    assert done.stderr.splitlines()[-1] == (
        "vllm_neuron.errors.ConfigError: VLLM_CACHE_ROOT='~/cache' is not valid; accepted: a folder. Correct it, or "
        "unset it."
    )
