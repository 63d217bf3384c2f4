"""Several hosts on one machine: network namespaces joined by links of a known rate, and Horovod's ranks on them.

For benchmarks and tests of what crosses a host's network card. Every host has one interface, `eth0`, to a switch, and
its own loopback, over which its ranks talk among themselves. Needs Linux and iproute2, and root or the right to make
user namespaces. Nothing is left behind: the namespaces are gone with the processes that hold them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

SUBNET = "10.77.0"
SWITCH = f"{SUBNET}.254"
INTERFACE = "eth0"
TOOLS = ("unshare", "nsenter", "hostname", "ip", "tc")


def _unshare() -> list[str]:
    """The command that makes namespaces, as root or in a user namespace; empty if there is none."""
    for command in (["unshare", "--net", "--uts"], ["unshare", "--map-root-user", "--net", "--uts"]):
        if subprocess.run([*command, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0:
            return command
    return []


def why_not() -> str | None:
    """Why hosts cannot be made here, or None if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (Debian: apt-get install util-linux iproute2)"
    if not _unshare():
        return (
            "network namespaces may not be made here: run as root (in a container, with --cap-add SYS_ADMIN,NET_ADMIN)"
        )
    return None


class Hosts:
    """Hosts that are joined by a switch; made by `hosts` or `in_name_only`.

    Args:
        names: of each.
        enter: for each, the command prefix that runs a command there.
        interface: by which ranks talk.
        switch: its address.
        enter_switch: the command prefix that runs a command there.
    """

    def __init__(
        self, names: Sequence[str], enter: Sequence[list[str]], interface: str, switch: str, enter_switch: list[str]
    ):
        self.names = list(names)
        self._enter = list(enter)
        self._interface = interface
        self._switch = switch
        self._enter_switch = enter_switch

    def run(
        self,
        ranks_per_host: Sequence[int],
        command: Sequence[str],
        *,
        backend: str = "gloo",
        timeout: float = 300,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess:
        """Runs a command on ranks of all hosts, placed host by host, and returns when all have ended.

        Args:
            ranks_per_host: number of ranks on each.
            command: arguments of the Python interpreter.
            backend: "gloo", or "mpi" (Open MPI, over TCP between hosts and shared memory within).
            timeout: seconds after which all ranks are killed.
            env: variables added to the environment.

        Returns:
            The completed process; the output of all ranks, errors included, in `stdout`.

        Raises:
            TimeoutError: when the time limit passed; its message has the output so far.
        """
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(env or {})}
        program = [sys.executable, *command]
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            log = stack.enter_context(open(pathlib.Path(folder) / "log", "w+b", buffering=0))

            def start(prefix: list[str], command: list[str], env: dict[str, str]) -> subprocess.Popen:
                # Appending, so that ranks do not write over one another.
                output = stack.enter_context(open(log.name, "ab", buffering=0))
                process = subprocess.Popen(
                    [*prefix, *command], env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
                stack.callback(_kill, process)
                return process

            if backend == "gloo":
                port = self._rendezvous(ranks_per_host, stack)
                common = {
                    **env,
                    "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._switch,
                    "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
                    "HOROVOD_GLOO_IFACE": self._interface,
                    "HOROVOD_CONTROLLER": "gloo",
                    "HOROVOD_CPU_OPERATIONS": "gloo",
                }
                processes = [
                    start(self._enter[host], program, {**common, **variables})
                    for host, variables in self._ranks(ranks_per_host)
                ]
            else:
                agent = pathlib.Path(folder) / "agent"
                cases = "".join(f"{a}) set -- {shlex.join(e)} ;;\n" for a, e in zip(self.names, self._enter))
                agent.write_text(
                    f'#!/bin/sh\nhost=$1; shift; line="$*"\ncase $host in\n{cases}esac\nexec "$@" sh -c "$line"\n'
                )
                agent.chmod(0o700)
                places = ",".join(f"{a}:{n}" for a, n in zip(self.names, ranks_per_host))
                network = f"{SUBNET}.0/24"
                launcher = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--map-by", "slot"]
                # Hosts share this machine's cores: ranks that wait must not keep them from those that work.
                launcher += ["--mca", "mpi_yield_when_idle", "1"]
                launcher += ["-np", str(sum(ranks_per_host)), "-H", places]
                launcher += [
                    "--mca",
                    "plm_rsh_agent",
                    str(agent),
                    "--mca",
                    "pml",
                    "ob1",
                    "--mca",
                    "btl",
                    "tcp,self,vader",
                ]
                launcher += ["--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network]
                for name in ("PATH", "PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", *(env.keys() - os.environ.keys())):
                    launcher += ["-x", name] if name in env else []
                processes = [start(self._enter[0], [*launcher, *program], env)]
            code = _wait(processes, timeout)
            for process in processes:
                _kill(process)
            output = pathlib.Path(log.name).read_text(errors="replace")
        if code is None:
            raise TimeoutError(f"{ranks_per_host} ranks over {backend} did not end within {timeout} s:\n{output}")
        return subprocess.CompletedProcess(program, code, output)

    def _ranks(self, ranks_per_host: Sequence[int]) -> Iterator[tuple[int, dict[str, str]]]:
        """The host of each rank, and what Horovod's own launcher would tell it."""
        size = sum(ranks_per_host)
        for host, local_size in enumerate(ranks_per_host):
            for local_rank in range(local_size):
                peers = [h for h, n in enumerate(ranks_per_host) if n > local_rank]
                numbers = {
                    "RANK": sum(ranks_per_host[:host]) + local_rank,
                    "SIZE": size,
                    "LOCAL_RANK": local_rank,
                    "LOCAL_SIZE": local_size,
                    "CROSS_RANK": peers.index(host),
                    "CROSS_SIZE": len(peers),
                }
                variables = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
                yield host, {**variables, "HOROVOD_HOSTNAME": self.names[host]}

    def _rendezvous(self, ranks_per_host: Sequence[int], stack: contextlib.ExitStack) -> str:
        """Starts Horovod's rendezvous server on the switch, where its bytes are not a host's: its port."""
        places = ",".join(f"{a}:{n}" for a, n in zip(self.names, ranks_per_host))
        program = [
            "import sys, time",
            "from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts",
            "from horovod.runner.http.http_server import RendezvousServer",
            "server = RendezvousServer()",
            "print('port', server.start(), flush=True)",
            f"server.init(get_host_assignments(parse_hosts({places!r}), {sum(ranks_per_host)}))",
            "time.sleep(1e6)",
        ]
        server = subprocess.Popen(
            [*self._enter_switch, sys.executable, "-c", "\n".join(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        stack.callback(_kill, server)
        for line in server.stdout:
            found = re.match(r"port (\d+)", line)
            if found:
                return found[1]
        raise RuntimeError("Horovod's rendezvous server did not start")


def _wait(processes: list[subprocess.Popen], timeout: float) -> int | None:
    """The first exit status that is not 0, or 0 when all have ended; None when the time is over."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if failed:
            time.sleep(2)  # what the others have to say about it
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)
    return None


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def hosts(number: int, gbit: float | None = None) -> Iterator[Hosts]:
    """Makes hosts, each with one network card.

    Args:
        number: of hosts.
        gbit: rate of each card in both directions, Gbit/s; None for no limit.

    Raises:
        RuntimeError: where that is not possible; the message says what is missing.
    """
    problem = why_not()
    if problem:
        raise RuntimeError(problem)
    unshare = _unshare()
    user = ["--user", "--preserve-credentials"] if "--map-root-user" in unshare else []

    with contextlib.ExitStack() as stack:

        def namespace(command: list[str]) -> list[str]:
            """Starts a process that holds a new namespace; the prefix that enters it."""
            process = subprocess.Popen(
                [*command, "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE, start_new_session=True
            )
            stack.callback(_kill, process)
            process.stdout.readline()  # it is there
            return ["nsenter", f"--target={process.pid}", *user, "--net", "--uts"]

        def do(enter: list[str], line: str) -> None:
            subprocess.run([*enter, *line.split()], check=True)

        switch = namespace(unshare)
        do(switch, "ip link set lo up")
        do(switch, "ip link add br0 type bridge")
        do(switch, f"ip addr add {SWITCH}/24 dev br0")
        do(switch, "ip link set br0 up")
        enters = []
        for i in range(number):
            enter = namespace([*switch, "unshare", "--net", "--uts"])
            pid = enter[1].partition("=")[2]
            do(switch, f"ip link add port{i} type veth peer name {INTERFACE} netns {pid}")
            do(switch, f"ip link set port{i} master br0 up")
            # Horovod's Gloo takes the address for most of its connections from the host's name, not from the interface
            # it was told (GlooContext::InitializeForProcessSet), and Open MPI tells hosts apart by their names.
            do(enter, f"hostname {SUBNET}.{i + 1}")
            do(enter, "ip link set lo up")
            do(enter, f"ip addr add {SUBNET}.{i + 1}/24 dev {INTERFACE}")
            do(enter, f"ip link set {INTERFACE} up")
            if gbit is not None:
                # What a bucket holds passes at once, so it holds little; but with less than the packets that become due
                # while a timer is late (0.5 ms), or with packets as large as itself, it does not reach its rate.
                burst = max(20_000, int(gbit * 1e9 / 8 * 0.5e-3))
                do(enter, f"ip link set {INTERFACE} gso_max_size 8192")
                do(switch, f"ip link set port{i} gso_max_size 8192")
                limit = f"root tbf rate {gbit}gbit burst {burst} latency 50ms"
                do(enter, f"tc qdisc add dev {INTERFACE} {limit}")
                do(switch, f"tc qdisc add dev port{i} {limit}")
            enters.append(enter)
        yield Hosts([f"{SUBNET}.{i + 1}" for i in range(number)], enters, INTERFACE, SWITCH, switch)


def in_name_only(number: int) -> Hosts:
    """Hosts by which Horovod tells ranks apart, all of them this machine; for "gloo" alone. Needs no rights."""
    return Hosts([f"host{i}" for i in range(number)], [[]] * number, "lo", "127.0.0.1", [])


def bytes_through_card() -> int:
    """Bytes that this host has sent through its network card since it was made."""
    with open("/proc/self/net/dev") as table:
        return next(int(line.split(":")[1].split()[8]) for line in table if line.strip().startswith(INTERFACE))
