"""Hosts that build a cache: those that share a folder share the work, and an error on one is one on all."""

import json
import os
import sys

import pytest
from conftest import ROOT, run_script
from test_build import content_of
from test_pod import pod_command, train_command
from test_resume import assert_same_run


def test_two_hosts_share_the_work_where_they_share_a_folder_and_wait_for_each_other(tmp_path):
    """Texts of any length arrive, and gathers of one shape compile once."""
    command = [sys.executable, str(ROOT / "tests" / "pod" / "shared_build.py"), str(tmp_path)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "data")))
    result = run_script(*pod_command(command, 2, 1), env={"PYTHONPATH": paths})
    assert result.returncode == 0, result.stderr
    hosts = [json.loads((tmp_path / f"{host}.json").read_text()) for host in range(2)]
    shared = [set(host["shared"]) for host in hosts]
    assert shared[0] | shared[1] == set(range(200))
    assert len(shared[0] & shared[1]) <= 1  # the first training image, which tells the size
    assert min(map(len, shared)) > 80
    for number, host in enumerate(hosts):
        assert host["own"] == list(range(200))
        assert content_of(tmp_path / f"own-{number}" / "x-0") == content_of(tmp_path / "shared" / "x-0")
        assert host["error"] == "77: damaged image"
        assert host["texts"] == [["host 0 é\0", 9], ["host 1 é\0", 9 + (8 << 20)]]
        assert host["compiled by 20 gathers"] == 0
    assert [len(host["one needs it"]) for host in hosts] == [0, 200]
    assert not (tmp_path / "own-0" / "y-0").exists()
    assert (tmp_path / "own-1" / "y-0" / "manifest.json").exists()
    assert not (tmp_path / "shared" / "z-0").exists()


@pytest.mark.full
def test_hosts_with_folders_of_their_own_each_build_a_whole_cache_and_train_alike(tmp_path):
    def train(name: str) -> list[int]:
        """Train in `tmp_path / name`; return how many images each host decoded, by tests/pod/train_at_home.py."""
        fields = {"augment.cache_dir": "~/cache", "model.stem": "whitened"}
        _, script, *flags = train_command(tmp_path, name, **fields | {"train.outer_steps": 1})
        at_home = [sys.executable, str(ROOT / "tests" / "pod" / "train_at_home.py"), f"{tmp_path}/home-{{host}}"]
        result = run_script(*pod_command([*at_home, script, *flags], 2, 1), env={"PYTHONPATH": str(ROOT)})
        assert result.returncode == 0, result.stderr + result.stdout
        return [json.loads((tmp_path / f"home-{host}/{host}.json").read_text()) for host in (0, 1)]

    assert train("first") == [100, 100]
    (damaged,) = (tmp_path / "home-1" / "cache").glob("*/images-00000.raw")
    damaged.write_bytes(bytes(damaged.stat().st_size // 2))  # of which this host reads some
    assert train("again") == [0, 100]
    assert_same_run(tmp_path / "first", tmp_path / "again")
