"""Hosts that come, that do not, and what comes that is no host: threads that meet on this machine."""

import logging
import socket
import threading
import time

import pytest

from largebatch.hosts import rendezvous
from largebatch.hosts.clusters import Place
from largebatch.pod import free_port
from largebatch.util import UserError

NAME = socket.gethostname()


class Hosts:
    """Hosts of one rendezvous, each a thread."""

    def __init__(self, num_hosts: int, limit_sec: float = 30):
        self.address, self._num_hosts, self._limit_sec = f"127.0.0.1:{free_port()}", num_hosts, limit_sec
        self.port = int(self.address.split(":")[1])
        self.ended: list[tuple[int, str]] = []
        self._threads = []

    def come(self, *indices: int, num_hosts: int | None = None) -> None:
        for index in indices:
            place = Place(self.address, num_hosts or self._num_hosts, index)
            self._threads.append(threading.Thread(target=self._come, args=(place,)))
            self._threads[-1].start()

    def _come(self, place: Place) -> None:
        try:
            hosts = rendezvous.meet(place, self._limit_sec)
        except UserError as error:
            self.ended.append((place.host_index, str(error)))
        else:
            assert [here.name for here in hosts] == [NAME] * place.num_hosts
            self.ended.append((place.host_index, "joined"))

    def all_ended(self) -> list[tuple[int, str]]:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        return sorted(self.ended)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rendezvous, "RETRY_SEC", 0.02)
    monkeypatch.setattr(rendezvous, "NOTICE_SEC", 0.3)
    monkeypatch.setattr(rendezvous, "seen", lambda: "seen here: SLURM_JOB_ID=7")


def test_hosts_that_all_come_go_on():
    hosts = Hosts(3)
    for index in (2, 0, 1):
        hosts.come(index)
        time.sleep(0.1)
    assert hosts.all_ended() == [(0, "joined"), (1, "joined"), (2, "joined")]
    hosts.come(0, 1, 2)  # the port is free again
    assert [text for _, text in hosts.all_ended()] == ["joined"] * 6


def test_hosts_that_do_not_come_are_named_on_all_that_did(caplog):
    hosts = Hosts(5, limit_sec=1.5)
    with caplog.at_level(logging.WARNING):
        hosts.come(0, 2)
        ended = hosts.all_ended()
    missing = (
        f"hosts 1, 3, 4 of 5 did not come to {hosts.address} (there: 0 on {NAME}, 2 on {NAME}; "
        f"seen here: SLURM_JOB_ID=7); {rendezvous.ADVICE}"
    )
    text = f"devices.join_sec: after 1.5 s {missing}"
    assert ended == [(0, text), (2, text)]
    assert f"waiting: {missing}" in caplog.messages  # long before


def test_without_host_zero_the_others_name_it():
    hosts = Hosts(3, limit_sec=1)
    hosts.come(1)
    [(_, text)] = hosts.all_ended()
    assert text.startswith(f"devices.join_sec: after 1 s host 0 of 3 did not answer host 1 at {hosts.address} (")
    assert text.endswith(f"Connection refused; seen here: SLURM_JOB_ID=7); {rendezvous.ADVICE}")


@pytest.mark.parametrize(
    ("index", "num_hosts"), [(1, 3), (2, 4)], ids=["the same index", "another number of hosts"]
)
def test_hosts_that_contradict_each_other_are_told(index, num_hosts):
    hosts = Hosts(3)
    hosts.come(0, 1)
    time.sleep(0.3)
    hosts.come(index, num_hosts=num_hosts)
    ended = hosts.all_ended()
    assert [host for host, _ in ended] == sorted([0, 1, index])
    text = f"devices: {NAME} says that it is host {index} of {num_hosts} (there: 0 on {NAME}, 1 on {NAME}); allowed"
    assert all(told.startswith(text) for _, told in ended), ended


@pytest.mark.parametrize("noise", [b"[1]\n", b"\xff" * 300_000])
def test_what_is_no_host_is_left_aside(noise):
    hosts = Hosts(2)
    hosts.come(0)
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", hosts.port)) as stranger:
        try:
            stranger.sendall(noise)
        except OSError:
            pass  # it was cut off
        hosts.come(1)
        assert hosts.all_ended() == [(0, "joined"), (1, "joined")]


def test_a_port_that_is_taken_is_told():
    hosts = Hosts(2)
    with socket.create_server(("", hosts.port)):
        hosts.come(0)
        [(_, text)] = hosts.all_ended()
    assert text.startswith("devices.coordinator_address: host 0 cannot listen on port")
    assert "Address already in use" in text
