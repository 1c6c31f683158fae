"""A pod on one machine: several processes, each with its own CPU devices, joined over loopback.

    python -m largebatch.pod --hosts 4 --devices 8 -- python train.py --config configs/eurosat.py
    python -m largebatch.pod --elastic --hosts 4 --min_hosts 1 --devices 2 -- python train.py --workdir runs/a
    python -m largebatch.pod --availability trace.csv --hosts 4 --devices 2 -- python train.py --workdir runs/a

Shows the output of host 0. When a process fails, all others are ended, the last lines of its output are shown, and
its exit code becomes that of the pod. SIGTERM and SIGINT are passed on: the first tells the hosts to save and stop,
the second to leave at once. Nothing is left running, however the pod ends.

With --elastic the command starts again on the hosts that are left, and on more when a dead one is back. With
--availability hosts come and go as a file says that counts devices over time.
"""

import argparse
import sys

from largebatch.optim import traces
from largebatch.pod.availability import Availability, ReturningHosts, TracedHosts
from largebatch.pod.elastic import ElasticOptions, Supervisor
from largebatch.pod.processes import Hosts, Signals
from largebatch.pod.watch import watch
from largebatch.util import UserError, address_argument, printable

# Flags with their defaults and help texts.
ELASTIC_FLAGS = {
    "min_hosts": (1, "wait while there are fewer"),
    "retries": (5, "failures in a row that are borne"),
    "healthy_sec": (60.0, "seconds after which a start ends the row"),
    "return_sec": (60.0, "seconds until a dead host is back; inf for never"),
}
TRACE_FLAGS = {
    "trace_devices_per_host": (1, "of the trace's devices, those that make a host"),
    "trace_seconds_per_unit": (1.0, "seconds for a unit of the trace's time"),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; wrong usage ends the program with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m largebatch.pod",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, required=True, help="number of processes; with --elastic the most")
    parser.add_argument("--devices", type=int, required=True, help="CPU devices of each process")
    parser.add_argument("--elastic", action="store_true", help="start again on the hosts that are left")
    for flag, (default, text) in ELASTIC_FLAGS.items():
        parser.add_argument(f"--{flag}", type=type(default), help=f"elastic: {text} (default {default})")
    parser.add_argument(
        "--availability", type=address_argument, metavar="CSV", help="elastic, as a trace of devices says"
    )
    for flag, (default, text) in TRACE_FLAGS.items():
        parser.add_argument(f"--{flag}", type=type(default), help=f"availability: {text} (default {default})")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command to run on every host")
    given = parser.parse_args(arguments)
    if given.command[:1] == ["--"]:
        given.command = given.command[1:]
    if given.availability and given.return_sec is not None:
        parser.error("--return_sec: given; allowed: without --availability, whose file says when hosts are there")
    _refuse_unused(parser, given, ELASTIC_FLAGS, "--elastic or --availability", given.elastic or given.availability)
    _refuse_unused(parser, given, TRACE_FLAGS, "--availability", given.availability)
    if given.hosts < 1 or given.devices < 1 or not given.command:
        parser.error("--hosts and --devices must be at least 1, and a command must follow --")
    if not 1 <= given.min_hosts <= given.hosts:
        parser.error(f"--min_hosts: {given.min_hosts}; allowed: 1 to --hosts {given.hosts}")
    if given.retries < 0 or given.trace_devices_per_host < 1:
        parser.error("--retries must be at least 0, and --trace_devices_per_host at least 1")
    if not min(given.healthy_sec, given.return_sec) >= 0 or not 0 < given.trace_seconds_per_unit < float("inf"):
        parser.error("--healthy_sec and --return_sec must be at least 0, and --trace_seconds_per_unit above 0")
    return given


def _refuse_unused(parser, given: argparse.Namespace, flags: dict, wanted: str, is_there: object) -> None:
    """Set flags that were not given to their defaults, and refuse those that would do nothing."""
    for flag, (default, _) in flags.items():
        if getattr(given, flag) is None:
            setattr(given, flag, default)
        elif not is_there:
            parser.error(f"--{flag}: given; allowed: with {wanted}")


def make_availability(given: argparse.Namespace) -> Availability:
    """Create the availability of hosts that the flags describe.

    Raises:
      UserError: the trace cannot be read, or has more hosts than allowed.
    """
    if given.availability is None:
        return ReturningHosts(given.hosts, given.return_sec)
    return TracedHosts.scaled(
        traces.read_availability(given.availability, "--availability"),
        per_host=given.trace_devices_per_host,
        seconds_per_unit=given.trace_seconds_per_unit,
        max_hosts=given.hosts,
    )


def run_once(command: list[str], num_hosts: int, devices_per_host: int) -> int:
    """Run the command once, and end all hosts when one fails; return the exit code of the pod."""
    signals = Signals()
    with Hosts(command, num_hosts, devices_per_host) as hosts:
        return watch(hosts, signals).code


def main() -> int:
    """Run the pod; return the exit code."""
    given = parse()
    try:
        if not (given.elastic or given.availability):
            return run_once(given.command, given.hosts, given.devices)
        options = ElasticOptions(given.command, given.devices, given.min_hosts, given.retries, given.healthy_sec)
        return Supervisor(options, make_availability(given), Signals()).run()
    except FileNotFoundError as error:
        print(f"python -m largebatch.pod: error: cannot run {error.filename!r}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"python -m largebatch.pod: error: {printable(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
