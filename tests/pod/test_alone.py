"""evaluate.py and export.py on one host of a pod, which the others do not join, and on all of them."""

import sys

import pytest
from conftest import ROOT, run_script
from machines import QUICKLY
from test_pod import pod_command, train_command

from largebatch.exports import files

# As the second of two hosts has them; the first never comes.
OF_A_POD = QUICKLY | {
    "LARGEBATCH_NUM_HOSTS": "2",
    "LARGEBATCH_HOST_INDEX": "1",
    "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1",
}


@pytest.mark.full
def test_one_host_of_a_pod_works_alone_and_of_all_one_writes(tmp_path):
    done = run_script(*train_command(tmp_path, "run", **{"train.outer_steps": 1})[1:], env=QUICKLY)
    assert done.returncode == 0, done.stderr
    run, cache = tmp_path / "run", f"--config.augment.cache_dir={tmp_path / 'cache'}"
    evaluate, export = [ROOT / "evaluate.py", run, cache], [ROOT / "export.py", run, "--out"]
    expected = run_script(*evaluate, "--out", tmp_path / "expected.csv", env=QUICKLY)
    done = run_script(*evaluate, "--alone", "--out", tmp_path / "alone.csv", env=OF_A_POD)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.stdout
    assert (tmp_path / "alone.csv").read_text() == (tmp_path / "expected.csv").read_text()

    done = run_script(*export, tmp_path / "alone", "--alone", env=OF_A_POD)
    assert done.returncode == 0, done.stderr
    each = f"{sys.executable} {' '.join(map(str, export))} {tmp_path / 'both'} >{tmp_path}/$LARGEBATCH_HOST_INDEX"
    done = run_script(*pod_command(["sh", "-c", each], 2, 1), env=QUICKLY)
    assert done.returncode == 0, done.stderr
    assert ["SHA-256" in (tmp_path / str(host)).read_text() for host in range(2)] == [True, False]
    for name in (files.ARRAYS, files.PROGRAM):
        assert (tmp_path / "both" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
