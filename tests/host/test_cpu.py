"""The host's processor, cores and memory, against other people's answers and other hosts' files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from vllm_neuron.errors import IncompatibleHostError
from vllm_neuron.host import cgroup, cpu

# Lines of /proc/cpuinfo, shortened to what matters.
NEHALEM = "fpu cx8 cmov mmx fxsr sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
HASWELL = f"{NEHALEM} fma movbe xsave avx f16c abm bmi1 avx2 bmi2"
SKYLAKE_SERVER = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
GRAVITON3 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm asimddp sve i8mm bf16"


def cpuinfo(flags: str, field: str = "flags") -> str:
    return f"processor\t: 0\nmodel name\t: x\n{field}\t\t: {flags}\nbogomips\t: 1\n\n"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (NEHALEM, "x86-64-v2"),
        (HASWELL, "x86-64-v3"),
        (HASWELL.replace(" abm", ""), "x86-64-v2"),
        (HASWELL.replace(" movbe", ""), "x86-64-v2"),
        (SKYLAKE_SERVER, "x86-64-v4"),
        (SKYLAKE_SERVER.replace(" avx512cd", ""), "x86-64-v3"),
        (NEHALEM.replace(" pni", ""), "x86-64"),
    ],
)
def test_psabi_level(flags: str, level: str) -> None:
    assert cpu.psabi_level(cpu.parse_features(cpuinfo(flags), "x86_64")) == level


def test_arm_features() -> None:
    features = cpu.parse_features(cpuinfo(GRAVITON3, "Features"), "aarch64")
    assert features >= {"neon", "fp-armv8", "lse", "dotprod", "bf16", "i8mm", "sve", "fullfp16", "rdm", "crc"}
    assert cpu.psabi_level(features) == "aarch64"


def test_a_feature_counts_only_if_every_core_has_it() -> None:
    assert cpu.psabi_level(cpu.parse_features(cpuinfo(SKYLAKE_SERVER) + cpuinfo(HASWELL), "x86_64")) == "x86-64-v3"


def test_host_features_are_those_that_iree_finds() -> None:
    """IREE's own tool asks the processor; we ask the kernel."""
    import iree.runtime

    tool = Path(iree.runtime.__file__).parents[1] / "_runtime_libs" / "iree-cpuinfo"
    lines = subprocess.run([tool], capture_output=True, text=True, check=True).stdout.split("\n")
    known = dict(line.split() for line in lines if line.strip())
    assert len(known) > 20
    assert {name for name, has in known.items() if has == "1"} == cpu.host_features() & set(known)


def test_check_features_names_what_lacks() -> None:
    cpu.check_features(())
    cpu.check_features(cpu.host_features())
    with pytest.raises(IncompatibleHostError, match=r"does not have: amx-fp99, avx1024 .*Compile for target cpu:"):
        cpu.check_features([*cpu.host_features(), "avx1024", "amx-fp99"])


def test_usable_cores_follow_affinity() -> None:
    code = (
        "import os; from vllm_neuron.host.cpu import usable_cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(usable_cores())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
    assert 1 <= cpu.usable_cores() <= len(os.sched_getaffinity(0))


def test_available_memory_is_no_more_than_the_machine_has() -> None:
    assert 0 < cpu.available_memory_bytes() <= psutil.virtual_memory().total


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_no_control_group(tmp_path: Path) -> None:
    assert cgroup.cpu_quota(tmp_path) is None
    assert cgroup.available_memory(tmp_path) is None


def test_version_2_takes_the_tightest_level(tmp_path: Path) -> None:
    root = host(tmp_path, {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/pod/memory.max": "1000000\n",
        "sys/fs/cgroup/pod/memory.current": "900000\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 100000\ninactive_file 300000\n",
        "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/container/memory.max": "max\n",
        "sys/fs/cgroup/pod/container/memory.current": "800000\n",
    })  # fmt: skip
    assert cgroup.cpu_quota(root) == 1.5
    assert cgroup.available_memory(root) == 400000


def test_version_1(tmp_path: Path) -> None:
    root = host(tmp_path, {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n3:devices:/\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "5000\n",
        "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "4000\n",
        "sys/fs/cgroup/memory/docker/abc/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000\n",
    })  # fmt: skip
    assert cgroup.cpu_quota(root) == 3.0
    assert cgroup.available_memory(root) == 1500


def test_container_that_sees_its_group_as_the_mount(tmp_path: Path) -> None:
    root = host(tmp_path, {
        "proc/self/cgroup": "0::/kubepods/burstable/pod1\n",
        "sys/fs/cgroup/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/memory.max": "1000\n",
        "sys/fs/cgroup/memory.current": "1200\n",
    })  # fmt: skip
    assert cgroup.cpu_quota(root) == 4.0
    assert cgroup.available_memory(root) == 0
