"""Unit tests of cgroup scopes, on folders that stand in for mounted hierarchies."""

import pytest

from envscaler_airflow.backends.local.cgroups import (
    CgroupScope,
    Hierarchy,
    Limits,
    build_scope,
    hierarchies,
)

LIMITS = Limits(memory_bytes=64 << 20, vcpus=1.5)


@pytest.fixture
def system(tmp_path):
    """Prepare mounted hierarchies: kind and options by name; our own group is /worker everywhere."""

    def mount(**mounts):
        proc = tmp_path / "proc"
        proc.mkdir()
        lines, own = [], []
        for name, (kind, options) in mounts.items():
            folder = tmp_path / name
            (folder / "worker").mkdir(parents=True)
            lines.append(f"{kind} {folder} {kind} {options} 0 0")
            controllers = "" if kind == "cgroup2" else options.replace("rw,", "")
            own.append(f"1:{controllers}:/worker")
        (proc / "mounts").write_text("\n".join(["tmpfs /tmp tmpfs rw 0 0", *lines]) + "\n")
        (proc / "cgroup").write_text("\n".join(own) + "\n")
        return proc

    return mount


def test_version_1_and_a_bare_version_2_share_the_work(system, tmp_path):
    """Limits by memory and cpu, the kill of the whole scope by the unified one."""
    proc = system(
        memory=("cgroup", "rw,memory"),
        cpu=("cgroup", "rw,cpu,cpuacct"),
        pids=("cgroup", "rw,pids"),
        unified=("cgroup2", "rw"),
    )
    part = tmp_path / "memory" / "envscaler" / "one" / "training"
    part.mkdir(parents=True)
    (part / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    unified = tmp_path / "unified" / "envscaler" / "one"
    unified.mkdir(parents=True)
    (unified / "cgroup.kill").touch()

    scope = build_scope("one", LIMITS, proc=proc)

    assert scope.limits == {"memory": "cgroup1", "cpu": "cgroup1"}
    assert scope.groups == tuple(
        str(tmp_path / n / "envscaler" / "one") for n in ("memory", "cpu", "unified")
    )
    assert scope.unified == str(unified)
    assert (part / "memory.limit_in_bytes").read_text() == str(64 << 20)
    quota = tmp_path / "cpu" / "envscaler" / "one" / "training" / "cpu.cfs_quota_us"
    assert quota.read_text() == "150000"
    assert scope.oom_kills() == 2
    assert not (tmp_path / "pids" / "envscaler").exists()


def test_version_2_hands_its_controllers_down(system, tmp_path):
    """From the root to the node's group, then limits in the leaf."""
    proc = system(unified=("cgroup2", "rw"))
    root = tmp_path / "unified"
    (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    part = root / "envscaler" / "one" / "training"
    part.mkdir(parents=True)
    (part / "memory.swap.max").write_text("max")
    (part / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n")

    scope = build_scope("one", LIMITS, proc=proc)

    assert scope.limits == {"memory": "cgroup2", "cpu": "cgroup2"}
    assert (part / "memory.max").read_text() == str(64 << 20)
    assert (part / "memory.swap.max").read_text() == "0"
    assert (part / "cpu.max").read_text() == "150000 100000"
    assert (root / "envscaler" / "one" / "cgroup.subtree_control").read_text() == "+memory"
    assert scope.oom_kills() == 1


def test_without_rights_at_the_root_it_lies_below_our_own_group(system, tmp_path):
    """A container that owns a subtree."""
    proc = system(memory=("cgroup", "rw,memory"))
    (tmp_path / "memory" / "envscaler").touch()  # no folder can be created there

    scope = build_scope("one", LIMITS, proc=proc)

    assert scope.groups == (str(tmp_path / "memory" / "worker" / "envscaler" / "one"),)


def test_without_rights_anywhere_there_is_none_and_it_is_said(system, tmp_path):
    """Never an error: the node starts with rlimits."""
    proc = system(memory=("cgroup", "rw,memory"))
    (tmp_path / "memory" / "envscaler").touch()
    (tmp_path / "memory" / "worker" / "envscaler").touch()

    scope = build_scope("one", LIMITS, proc=proc)

    assert (scope.groups, scope.limits) == ((), {})
    assert "no group in" in scope.notes[0]
    said = scope.limits_said({"memory_bytes": 64 << 20, "vcpus": 1.5})
    assert said.startswith("memory 67108864 bytes by rlimit, 1.5 CPUs by affinity; no group in")


def test_a_system_without_cgroups_has_no_cgroup_scope(tmp_path):
    """No /proc means neither a cgroup scope nor an error."""
    scope = build_scope("one", LIMITS, proc=tmp_path / "absent")

    assert scope.groups == ()
    assert scope.pids() == set()
    assert scope.oom_kills() is None
    scope.kill()
    scope.remove()


def test_processes_are_found_in_every_room_and_below(tmp_path):
    """A command that creates groups of its own stays in the scope."""
    for part, pids in (("main", "1\n2\n"), ("training", "3\n"), ("training/own", "4\n")):
        (tmp_path / "one" / part).mkdir(parents=True)
        (tmp_path / "one" / part / "cgroup.procs").write_text(pids)
    scope = CgroupScope(groups=(str(tmp_path / "one"),))

    assert scope.pids() == {1, 2, 3, 4}
    assert scope.pids("training") == {3, 4}


def test_a_cage_survives_json():
    """node.json has it, so that any process can end what is left."""
    scope = CgroupScope(("/g",), "/g", "/g/training", {"memory": "cgroup2"}, ("note",))

    assert CgroupScope.from_dict(scope.to_dict()) == scope
    assert CgroupScope.from_dict({}) == CgroupScope()


def test_our_own_group_is_that_of_each_hierarchy(tmp_path):
    """Version 1 by controller name, version 2 by the line without one."""
    mounts = f"a {tmp_path}/m cgroup rw,memory 0 0\nb {tmp_path}/c cgroup rw,cpu,cpuacct 0 0\n"
    own = "9:name=systemd:/s\n4:memory:/job\n3:cpu,cpuacct:/box\n0::/two\n"

    found = hierarchies(mounts + f"c {tmp_path}/u cgroup2 rw 0 0\n", own)

    assert found == [
        Hierarchy(tmp_path / "m", frozenset({"memory"}), False, "/job"),
        Hierarchy(tmp_path / "c", frozenset({"cpu"}), False, "/box"),
        Hierarchy(tmp_path / "u", frozenset(), True, "/two"),
    ]
