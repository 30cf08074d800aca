"""pfl-research 0.6, one process: its FederatedAveraging with the simulated backend, set up as its tutorials do."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from run_bare import Net
from settings import SETTINGS, Setting, arrays
from worker import cpu_seconds, say, wait


class Trained(Net):
    """The network with the two methods that pfl requires."""

    def loss(self, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of a batch, a 0-dimensional tensor."""
        return nn.functional.cross_entropy(self(a, b), y)

    def metrics(self, *_: Any) -> dict[str, Any]:
        """No metrics: the benchmark does not evaluate."""
        return {}


class Paced(TrainingProcessCallback):  # type: ignore[misc]
    """Reports after every central iteration and waits for the next request; the first timed iteration is the second."""

    def __init__(self, parameters: int) -> None:
        self.parameters = parameters
        self.started: tuple[float, float] | None = None

    def after_central_iteration(self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int) -> Any:
        """Report the iteration and wait for the next request; returns whether to stop, and no metrics."""
        if self.started is None:
            say(parameters=self.parameters)
        else:
            say(seconds=time.perf_counter() - self.started[0], cpu=cpu_seconds() - self.started[1])
        stop = not wait()
        self.started = time.perf_counter(), cpu_seconds()
        return stop, Metrics()


def clients(setting: Setting, folder: Path) -> FederatedDataset:
    """Shuffles a user's rows every time they are read, as the other programs do."""
    (a, b), y = arrays(setting, folder)
    tables = [torch.split(torch.from_numpy(v), setting.rows) for v in (a, b, y)]

    def make(k: int) -> PyTorchTensorDataset:
        order = torch.randperm(setting.rows)
        return PyTorchTensorDataset(tuple(t[k].index_select(0, order) for t in tables), user_id=str(k))

    return FederatedDataset(make, get_user_sampler("random", list(range(setting.clients))))


def main(name: str, folder: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    np.random.seed(1)  # noqa: NPY002 (pfl samples from the global generator)
    setting = SETTINGS[name]
    data = clients(setting, Path(folder))
    net = Trained(setting)
    model = PyTorchModel(
        model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0)
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=1_000_000,
            evaluation_frequency=1_000_000,
            train_cohort_size=setting.cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=setting.lr, local_batch_size=setting.batch_size),
        callbacks=[Paced(sum(p.numel() for p in net.parameters()))],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
