"""The nodes of a Ray cluster: what they must have, the engine that they share, and the actors that run its clients.

A copy of the engine travels once to each node. Its large tensors, such as the features of the data set, lie in Ray's
object store there or in a folder that all nodes read (`node_arrays.py`), and all actors of the node read them in place.
Ray starts the actors, notices when one ends, and moves messages; `pool.py` decides which clients run where, and what
happens with the clients of a lost worker.
"""

import logging
import os
import platform
import re
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import RecipeError
from polyfed.core.tree import Tree, size_bytes
from polyfed.data import Columns
from polyfed.engines.machine.gpu import deterministic
from polyfed.engines.workers.node_arrays import SharedFolder, content_of, tensor_of
from polyfed.engines.workers.process import Done, Job, Served, run
from polyfed.engines.workers.shared_memory import Packed

CONNECT_SECONDS, START_SECONDS = 10.0, 60.0
"""How long polyfed waits for the address of a cluster, and for the facts of its nodes or the start of an actor."""

LOOK_SECONDS = 2.0
"""How often polyfed looks whether the head of the cluster still answers. Ray itself would end this process, after a
minute and without a sentence."""

UNREADABLE = -1
"""The size of a file that a node cannot read."""

STORE_SHARE = 0.8
"""Share of a node's object store that the data may take. Messages and replies need the rest."""


class Lost(Exception):
    """An actor has ended, or its node has; the text says how."""


class Cluster:
    """A Ray cluster, which exists already or is started on this machine at the first request.

    Args:
        address: `HOST:PORT` of the cluster's head. If empty, the variable RAY_ADDRESS, the cluster of this machine, or
            a new one with all cores of this machine.
        shared_folder: a folder that all nodes read. The large tensors of the engine then lie there, in files, instead
            of in the object store of each node.

    Attributes:
        lost: whether the head has ended. A call of Ray would then wait for it.
    """

    def __init__(self, address: str = "", shared_folder: Path | None = None) -> None:
        self.address = address
        self.shared = None if shared_folder is None else SharedFolder(shared_folder)
        self._ray: Any = None
        self._head = ""  # HOST:PORT of the head
        self._ours = False  # whether this object has connected to the cluster, and disconnects at the end
        self._seen = 0.0  # when the head last answered
        self.lost = False
        self._once: tuple[NDArray[np.uint8], Any] | None = None
        self._payload: Any = None
        self._checked: set[str] = set()  # Ray's numbers of the nodes that can do their part

    def check(self, engine: Served, threads: int, device: torch.device) -> None:
        """Connect, and check the nodes that were not checked before.

        Raises:
            RecipeError: Ray is missing or refuses, or a node cannot do its part; the text names the node.
        """
        if self._ray is None or not self._ray.is_initialized():
            self._checked.clear()
            self.connect()
        self._options = {"num_cpus": max(1, threads), "scheduling_strategy": "SPREAD"}
        self._options |= {"num_gpus": 1} if device.type == "cuda" else {}
        self._arguments = threads, str(device)
        new = [node for node in self._alive() if node["NodeID"] not in self._checked]
        if new:
            columns = None if self.shared else engine.population.columns
            self._refuse_nodes(new, size_of(columns, engine.initial), device)
            self._checked |= {node["NodeID"] for node in new}

    def open(self, engine: Served, num: int, threads: int, device: torch.device) -> int:
        """Check the nodes, and send them the engine, once.

        Returns:
            The number of workers: `num`, or one for each `threads` cores (or for each GPU) of the cluster if it is 0.

        Raises:
            RecipeError: see `check`.
        """
        self.check(engine, threads, device)
        if self._payload is None:
            self._payload = self.share(engine)
        total = self.head.cluster_resources()
        most = total.get("CPU", 0) // max(1, threads) if device.type == "cpu" else total.get("GPU", 0)
        return max(1, int(min(num, most) if num else most))

    def connect(self) -> Any:
        """Connect this process to the cluster, unless it is connected, and return the module `ray`.

        Raises:
            RecipeError: Ray is missing or refuses.
        """
        try:
            import ray
        except ImportError as error:
            raise RecipeError(
                "a cluster needs Ray on this machine and on every node: pip install 'polyfed[cluster]'"
            ) from error
        self._ray = ray
        if ray.is_initialized():
            self._head = str(ray.get_runtime_context().gcs_address)
            return ray
        address = self.address or os.environ.get("RAY_ADDRESS", "")
        host, _, port = address.rpartition(":")
        try:
            if port.isdecimal():  # Ray itself would wait for a minute
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Ray's next defaults, which change nothing here
                ray.init(address=address or None, logging_level=logging.ERROR, log_to_driver=True)
        except (OSError, RuntimeError, ValueError) as error:
            where = f"the cluster at {address}" if address else "a cluster on this machine"
            why = " ".join(str(error).split())[:400]  # all its lines: they name both releases
            raise RecipeError(
                f"Ray: {where} does not take this process: {why}. Compare `ray status` on its head with "
                "the address, and install the same versions of Ray and Python everywhere"
            ) from error
        self._ours, self._head = True, str(ray.get_runtime_context().gcs_address)
        return ray

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say what has ended if a call of Ray in this block loses its connection.

        Raises:
            RecipeError: the head of the cluster has ended, or Ray on this machine.
        """
        try:
            yield
        except OSError as error:
            self.lost = True
            raise RecipeError(
                f"Ray: the head of the cluster at {self._head}, or Ray on this machine, has ended ({error}). Start it "
                "again with `ray start`, and the other nodes, and repeat the command; a run continues with --resume",
                ("engine", "cluster"),
            ) from error

    @property
    def head(self) -> Any:
        """The module `ray`, for what it asks the head, of which this sees first that it answers.

        Raises:
            RecipeError: the head has ended.
        """
        self.refuse_lost_head()
        return self._ray

    def refuse_lost_head(self, every: float = 0.0) -> None:
        """Refuse to go on if the head of the cluster does not answer.

        Args:
            every: do not look again within so many seconds.

        Raises:
            RecipeError: the head has ended.
        """
        if time.monotonic() < self._seen + every:
            return
        host, _, port = self._head.rpartition(":")
        with self.explained():
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        self._seen = time.monotonic()

    def refuse_unread(self, path: Path) -> None:
        """Refuse the cluster if a node cannot read this file or folder of data, or has a file of another size there.

        Raises:
            RecipeError: all faults of all nodes.
        """
        nodes, here, faults = self._alive(), _size_at(str(path)), []
        for node, size in zip(nodes, self._ask(nodes, _size_at, str(path)), strict=True):
            if isinstance(size, int) and size != here:
                other = f"has another file ({size} instead of {here} bytes) at"
                how = "cannot read" if size == UNREADABLE else other
                faults.append(f"node {node['NodeManagerAddress']} {how} {path}")
        if faults:
            raise RecipeError(
                f"[data] path: {'; '.join(faults)}. Put the data on a disk that all nodes share, or copy it to each",
                ("data", "path"),
            )

    def refuse_unfit(self, needs: Mapping[str, float]) -> None:
        """Refuse the cluster if no node has these amounts of Ray's resources, however busy the nodes are.

        Raises:
            RecipeError: the largest amounts of a node are smaller, or no node has all of them.
        """
        end = time.monotonic() + CONNECT_SECONDS
        while not any(all(node["Resources"].get(k, 0) >= n for k, n in needs.items()) for node in self._alive()):
            if time.monotonic() > end:
                raise RecipeError(
                    f"Ray: a run needs {_amounts(needs)}, and no node has this: "
                    + (
                        "; ".join(f"{n['NodeManagerAddress']} {_amounts(n['Resources'])}" for n in self._alive())
                        or "none"
                    )
                    + ". Add a node with `ray start --address=...`, or lower [engine] threads, or use device = 'cpu'"
                )
            time.sleep(0.2)

    def refuse_folder(self, folder: Path) -> None:
        """Refuse the cluster if a node has other versions, or does not see a folder of this machine.

        Raises:
            RecipeError: all faults of all nodes.
        """
        nodes = self._alive()
        faults = self._version_faults(nodes)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-") as file:
            for node, seen in zip(nodes, self._ask(nodes, _exists, file.name), strict=True):
                if seen is False:
                    faults.append(
                        f"node {node['NodeManagerAddress']} does not see {folder}: choose a folder that all nodes share"
                    )
        if faults:
            raise RecipeError("Ray: " + "; ".join(faults))

    def _refuse_nodes(self, nodes: Sequence[dict[str, Any]], size: int, device: torch.device) -> None:
        """Refuse the cluster if one of these nodes has other versions or too small an object store or cannot read the
        shared folder, or if no node has a GPU or the cores of a worker.

        Raises:
            RecipeError: all faults of all nodes.
        """
        faults = self._version_faults(nodes) + self._folder_faults(nodes)
        what = "the model takes" if self.shared else "data and model take"
        for node in nodes:
            name, store = node["NodeManagerAddress"], node["Resources"].get("object_store_memory", 0)
            if size > STORE_SHARE * store:
                faults.append(
                    f"node {name} has an object store of {store / 2**20:.0f} MiB, and {what} {size / 2**20:.0f} MiB: "
                    f"restart it with `ray start --object-store-memory={int(2 * size)}`"
                )
        if device.type == "cuda" and not self.head.cluster_resources().get("GPU"):
            faults.append("[engine] device = 'cuda', and no node has a GPU: use device = 'cpu', or add a node with one")
        if faults:
            raise RecipeError("[engine] cluster = 'ray': " + "; ".join(faults), ("engine", "cluster"))
        self._refuse_nothing()

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self.head.nodes() if node["Alive"]]

    def _version_faults(self, nodes: Sequence[dict[str, Any]]) -> list[str]:
        """Return a text for each node that does not answer, and for each package that differs from this machine's."""
        here, faults = facts(), []
        for node, found in zip(nodes, self._ask(nodes, facts), strict=True):
            name = node["NodeManagerAddress"]
            if isinstance(found, str):
                faults.append(f"node {name} does not answer: {found}. Restart it with `ray stop` and `ray start`")
                continue
            others = {} if found is None else {p: wanted for p, wanted in here.items() if found[p] != wanted}
            faults += [
                f"node {name} has {package} {found[package] or 'not'}, and this machine {wanted}: install it there, too"
                for package, wanted in others.items()
            ]
        return faults

    def _folder_faults(self, nodes: Sequence[dict[str, Any]]) -> list[str]:
        """Return a text for each node that cannot read what this machine writes to the shared folder."""
        if self.shared is None:
            return []
        with self.shared.probe() as path:
            sizes, here = self._ask(nodes, _size_at, str(path)), _size_at(str(path))
        return [
            f"node {node['NodeManagerAddress']} cannot read [engine] shared_folder = '{self.shared.path}', or has "
            "another folder there: mount the same one, or remove `shared_folder` to send the data to each node"
            for node, size in zip(nodes, sizes, strict=True)
            if isinstance(size, int) and size != here
        ]

    def _ask(self, nodes: Sequence[dict[str, Any]], question: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function of this file on each node.

        Returns:
            What each node returned, a text if it failed to return anything, or None if it has just ended.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked, ask, here = [], self._ray.remote(question), sys.modules[__name__]
        self._ray.cloudpickle.register_pickle_by_value(here)  # so that a node without polyfed can answer, too
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
            asked.append(ask.options(**options).remote(*arguments))
        self._ray.cloudpickle.unregister_pickle_by_value(here)
        done, _ = self._ray.wait(asked, num_returns=len(asked), timeout=START_SECONDS)
        result: list[Any] = []
        for one in asked:
            try:
                result.append(self._ray.get(one) if one in done else f"nothing within {START_SECONDS:.0f} s")
            except (self._ray.exceptions.TaskUnschedulableError, self._ray.exceptions.NodeDiedError):
                result.append(None)
            except self._ray.exceptions.RayError as error:
                result.append(in_short(error))
        return result

    def share(self, engine: Served) -> Any:
        """Put a copy of the engine into the object store, and return it; see `node_arrays.py` for its tensors.

        Raises:
            RecipeError: the files of the shared folder cannot be written.
        """
        util = self._ray.util
        packed = content_of if self.shared is None else self.shared.content_of
        util.register_serializer(Tensor, serializer=packed, deserializer=tensor_of)
        try:
            return self._ray.put(copy_of(engine))
        finally:
            util.deregister_serializer(Tensor)

    def start(self, engine: Served, num: int, *, none_yet: bool) -> list[tuple[Any, str]]:
        """Start up to `num` actors on free cores. Return each of them with the name of its node.

        Args:
            engine: the engine, of which the nodes have a copy.
            num: the number of actors.
            none_yet: whether at least one actor must start. This method then waits for a free core.

        Raises:
            RecipeError: at least one must start, and none did.
        """
        kind, each = self._each()
        end = time.monotonic() + START_SECONDS
        while True:
            if none_yet:
                self._refuse_nothing()
            free = int(self.head.available_resources().get(kind, 0) // each)
            started, reason = self._started(max(min(num, free), 1 if none_yet else 0))
            if started or not none_yet:
                return started
            if time.monotonic() > end:
                raise RecipeError(
                    f"[engine] cluster = 'ray': no worker could start: {reason}. Add nodes, or free theirs",
                    ("engine", "cluster"),
                )
            time.sleep(0.5)  # its node has just ended, which Ray does not know yet

    def _started(self, num: int) -> tuple[list[tuple[Any, str]], str]:
        """Start this number of actors. Return those that have started, and why another one did not."""
        ray = self._ray
        made = [ray.remote(Actor).options(**self._options).remote(self._payload, *self._arguments) for _ in range(num)]
        born = [actor.node.remote() for actor in made]
        up, _ = ray.wait(born, num_returns=num, timeout=START_SECONDS) if born else ([], [])
        names = {node["NodeID"]: node["NodeManagerAddress"] for node in self.head.nodes()}
        started, reason = [], f"no node has a free core within {START_SECONDS:.0f} s (`ray status` says why)"
        for actor, name in zip(made, born, strict=True):
            try:
                if name in up:
                    started.append((actor, names.get(ray.get(name), "that is new")))
                    continue
            except ray.exceptions.RayError as error:
                reason = in_short(error)
            self.kill(actor)
        return started, reason

    def _each(self) -> tuple[str, int]:
        """Return the resource of Ray that a worker takes, and how much of it."""
        return ("GPU", 1) if "num_gpus" in self._options else ("CPU", max(1, self._arguments[0]))

    def _refuse_nothing(self) -> None:
        """Wait a moment for a node that is large enough for a worker.

        Raises:
            RecipeError: the cluster has none, however busy its nodes are.
        """
        kind, each = self._each()
        end = time.monotonic() + CONNECT_SECONDS
        while not any(node["Resources"].get(kind, 0) >= each for node in self._alive()):
            if time.monotonic() > end:
                left = ", ".join(node["NodeManagerAddress"] for node in self._alive()) or "none"
                raise RecipeError(
                    f"[engine] cluster = 'ray': no node of the cluster has {each} {kind}(s) for a worker; nodes that "
                    f"are left: {left}. Add nodes with `ray start --address=...`, and continue with --resume",
                    ("engine", "cluster"),
                )
            time.sleep(0.2)

    def once(self, content: NDArray[np.uint8]) -> Any:
        """Return a reference to an array. Ray sends the array once to each node, however many actors read it."""
        if self._once is None or self._once[0] is not content:
            with self.explained():
                self._once = content, self._ray.put(content)
        return self._once[1]

    def ended(self, pending: Sequence[Any], *, wait: bool) -> set[Any]:
        """Return which of these calls have ended, well or not. Their results begin to travel here.

        Args:
            wait: whether to wait until there is one.

        Raises:
            RecipeError: the head of the cluster has ended.
        """
        seconds = LOOK_SECONDS if wait else 0
        while True:
            with self.explained():
                ended, _ = self._ray.wait(list(pending), num_returns=1, timeout=seconds, fetch_local=False)
                if ended:
                    self._ray.wait(ended, num_returns=1, timeout=0)
            if ended or not wait:
                return set(ended)
            self.refuse_lost_head(LOOK_SECONDS)

    def give(self, actor: Any, job: Job, broadcast: Any, down: NDArray[np.uint8]) -> Any:
        """Let an actor run a job; see `Actor.run`."""
        with self.explained():
            return actor.run.remote(job, broadcast, down)

    def result(self, pending: Any) -> tuple[Done, NDArray[np.uint8]]:
        """Return what a call of an actor returned. Nobody may write to the array, which is Ray's own.

        Raises:
            Lost: the actor or its node has ended.
            RecipeError: the head of the cluster has ended.
        """
        try:
            with self.explained():
                while not self._ray.wait([pending], num_returns=1, timeout=LOOK_SECONDS)[0]:
                    self.refuse_lost_head(LOOK_SECONDS)
                done, content = self._ray.get(pending)
        except self._ray.exceptions.RayError as error:
            raise Lost(in_short(error)) from error
        return done, content

    def kill(self, actor: Any) -> None:
        """End an actor."""
        if self._ray.is_initialized() and not self.lost:
            self._ray.kill(actor)

    def close(self) -> None:
        """Free the memory of the nodes, and disconnect. A later request connects again."""
        self._payload = self._once = None
        if self._ours and self._ray.is_initialized() and not self.lost:
            self._ray.shutdown()
            self._ours = False


class Actor:
    """Runs jobs on a node with a copy of the engine.

    Args:
        engine: the node's copy of the engine.
        threads: number of threads that PyTorch uses; 0 leaves the number unchanged.
        device: the device that trains.
    """

    def __init__(self, engine: Served, threads: int, device: str) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._engine = engine.in_worker(lambda name, **facts: self._events.append((name, facts)))
        self._device = torch.device(device)
        self._held: dict[int, Any] = {}

    def node(self) -> str:
        """Return Ray's number of the node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(
        self, job: Job, broadcast: NDArray[np.uint8] | None, down: NDArray[np.uint8]
    ) -> tuple[Done, NDArray[np.uint8]]:
        """Run a job. The tensors of the result are in the returned array."""
        up = Packed()
        shared, own = (Packed() if given is None else Packed(np.array(given)) for given in (broadcast, down))
        with deterministic(self._device):
            self._events.clear()
            done = run(self._engine, job, shared, own, up, self._device, self._held, self._events)
        return done, up.content


def node_of() -> str:
    """Return the address of the node on which this process of Ray runs."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def facts() -> dict[str, str]:
    """Return the versions on which results and messages depend; empty for a package that is not there."""
    result = {"Python": platform.python_version()}
    for package in ("polyfed", "torch", "numpy"):
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            result[package] = ""
    return result


def _amounts(resources: Mapping[str, float]) -> str:
    """Return Ray's resources in words."""
    memory = f"{resources.get('memory', 0) / 1e9:.1f} GB of memory"
    return f"{resources.get('CPU', 0):.0f} core(s), {resources.get('GPU', 0):.0f} GPU(s), {memory}"


def _exists(path: str) -> bool:
    return os.path.exists(path)


def _size_at(path: str) -> int:
    """Return the bytes of a file, 0 for a folder, or `UNREADABLE`."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except IsADirectoryError:
        return 0 if os.access(path, os.R_OK | os.X_OK) else UNREADABLE
    except OSError:
        return UNREADABLE


def copy_of(engine: Served) -> Served:
    """Return a copy of the engine for the nodes, without local states and without what belongs to this process."""
    sent = engine.in_worker(_silent)
    sent.__dict__.pop("answer", None)  # the server's process may have replaced it, to watch requests
    sent.resume({}, sent.kept)
    return sent


def size_of(columns: Columns | None, initial: Tree) -> int:
    """Return the bytes that data and model take in each node's object store, where data of a shared folder is not."""
    values = [] if columns is None else [column.values for column in columns.modalities.values()]
    return sum(value.numel() * value.element_size() for value in values) + size_bytes(initial)


def _silent(name: str, **facts: Any) -> None:
    """Emit nothing."""


def in_short(error: BaseException) -> str:
    """Return the first line of an error of Ray, or the last one if that names the exception which caused it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    caused = re.match(r"[\w.]*(Error|Exception)\b", lines[-1])
    return lines[-1 if caused else 0][:300]
