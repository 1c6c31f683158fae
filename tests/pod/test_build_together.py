"""Hosts that build a cache: those that share a folder share the work, and an error on one is one on all."""

import json
import sys

from conftest import ROOT, run_script
from test_build import content_of
from test_pod import pod_command


def test_two_hosts_share_the_work_where_they_share_a_folder(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "pod" / "shared_build.py"), str(tmp_path)]
    result = run_script(*pod_command(command, 2, 1), env={"PYTHONPATH": str(ROOT)})
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
    assert [len(host["one needs it"]) for host in hosts] == [0, 200]
    assert not (tmp_path / "own-0" / "y-0").exists()
    assert (tmp_path / "own-1" / "y-0" / "manifest.json").exists()
    assert not (tmp_path / "shared" / "z-0").exists()
