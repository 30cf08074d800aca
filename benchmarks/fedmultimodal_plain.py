"""The reference for fedmultimodal.py: the same rows, cohorts and training in plain PyTorch, without polyfed.

    python benchmarks/fedmultimodal_plain.py [--alpha 0.1] [--fedopt] [--seeds 8 16 24] [--rounds 200]

Only the table comes from polyfed. Validation runs in the second half of the rounds; the best round was never earlier.
"""

import copy
import statistics
from collections.abc import Sequence

import numpy as np
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn

from fedmultimodal import parser_of, recipe_of
from polyfed.data.columns import TEST, TRAIN, VALIDATION, Columns

LR, BATCH, COHORT = 0.05, 16, 10


class Encoder(nn.Module):
    """Convolutions and a GRU: windows (B, 128, 3) -> states (B, 16, 128)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (
            nn.Conv1d(width, more, 5, padding=2) for width, more in ((3, 32), (32, 64), (64, 128))
        )
        self.pool, self.dropout, self.gru = nn.MaxPool1d(2), nn.Dropout(0.1), nn.GRU(128, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """The states of the GRU at all steps, (B, 16, 128)."""
        x = x.transpose(1, 2)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = self.dropout(self.pool(torch.relu(conv(x))))
        states: Tensor = self.gru(x.transpose(1, 2))[0]
        return states


class Net(nn.Module):
    """Attention of six heads over the states of both sensors, 420,684 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.acc, self.gyro = Encoder(), Encoder()
        self.score = nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 6))
        self.head = nn.Sequential(nn.Linear(768, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 6))

    def forward(self, acc: Tensor, gyro: Tensor) -> Tensor:
        """Logits (B, 6)."""
        states = torch.cat([self.acc(acc), self.gyro(gyro)], 1)
        weights = torch.softmax(self.score(states).transpose(1, 2), 2)
        logits: Tensor = self.head((weights @ states).flatten(1))
        return logits


class Loop:
    """Federated averaging, with or without the server's momentum."""

    def __init__(self, table: Columns, fedopt: bool, seed: int) -> None:
        self.x = [table.modalities[name].values.float() for name in ("acc", "gyro")]
        self.y, shard = table.label, table.client
        of = {code: table.split == code for code in (TRAIN, VALIDATION, TEST)}
        self.shards = [((shard == k) & of[TRAIN]).nonzero()[:, 0] for k in range(int(shard[of[TRAIN]].max()) + 1)]
        self.held_out, self.test = (of[code].nonzero()[:, 0] for code in (VALIDATION, TEST))
        torch.manual_seed(seed)
        self.net = Net()
        self.server = torch.optim.SGD(self.net.parameters(), lr=0.025, momentum=0.9) if fedopt else None
        torch.manual_seed(seed)

    def round(self, number: int) -> None:
        """Train a cohort for an epoch; the mean by rows is the next model, or with momentum gives the server's step."""
        mean, total = [torch.zeros_like(p) for p in self.net.parameters()], 0
        for k in np.random.RandomState(number).choice(len(self.shards), COHORT, replace=False):
            trained, rows = self.train(self.shards[k]), len(self.shards[k])
            total += rows
            for m, p in zip(mean, trained.parameters(), strict=True):
                m.add_(p.detach(), alpha=rows)
        with torch.no_grad():
            for p, m in zip(self.net.parameters(), mean, strict=True):
                if self.server is None:
                    p.copy_(m / total)
                else:
                    p.grad = (p - m / total) / LR
        if self.server is not None:
            self.server.step()
            self.server.zero_grad()

    def train(self, rows: Tensor) -> Net:
        """One epoch of SGD from the global model."""
        net = copy.deepcopy(self.net).train()
        optimiser = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=1e-5)
        for batch in rows[torch.randperm(len(rows))].split(BATCH):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(*(x[batch] for x in self.x)), self.y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimiser.step()
        return net

    def f1(self, rows: Tensor) -> float:
        """Macro-F1 in %."""
        self.net.eval()
        with torch.no_grad():
            predicted = torch.cat([self.net(*(x[part] for x in self.x)).argmax(1) for part in rows.split(256)])
        return 100.0 * float(f1_score(self.y[rows], predicted, average="macro"))


def main(alpha: float, fedopt: bool, seeds: Sequence[int], rounds: int) -> None:
    torch.set_num_threads(1)
    table, found = recipe_of(alpha, fedopt).data.load(), []
    for seed in seeds:
        loop, best, score = Loop(table, fedopt, seed), -1.0, 0.0
        for number in range(rounds):
            loop.round(number)
            if number >= rounds // 2 and (now := loop.f1(loop.held_out)) > best:
                best, score = now, loop.f1(loop.test)
        found.append(score)
        print(f"seed {seed}: {score:.1f} at the best round, {loop.f1(loop.test):.1f} at the last", flush=True)
    if len(found) > 1:
        print(f"{statistics.mean(found):.1f} +- {statistics.stdev(found):.1f}, seeds {list(seeds)}")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    main(options.alpha, options.fedopt, options.seeds, options.rounds)
