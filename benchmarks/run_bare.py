"""The reference of the speed comparison: federated averaging in plain PyTorch, without a framework."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from settings import SETTINGS, Setting, arrays
from worker import serve


class ConvGRU(nn.Module):
    """Three convolutions over time and a GRU; the embedding is the mean of the GRU's outputs."""

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        stages = [
            nn.Sequential(nn.Conv1d(i, o, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2))
            for i, o in ((width, 32), (32, 64), (64, 128))
        ]
        self.conv = nn.Sequential(*stages)
        self.gru = nn.GRU(128, embedding, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, F) -> (B, E)."""
        z, _ = self.gru(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return z.mean(1)  # type: ignore[no-any-return]


def encoder_of(setting: Setting, place: int) -> nn.Module:
    """Make the encoder of one modality, with the layers of polyfed's encoder of the same name."""
    if setting.encoder == "mlp":
        hidden = setting.hidden
        return nn.Sequential(
            nn.Linear(setting.features[place], hidden), nn.ReLU(), nn.Linear(hidden, setting.embedding)
        )
    if setting.encoder == "conv-gru":
        return ConvGRU(setting.shapes[place][1], setting.embedding)
    channels = setting.shapes[place][0]
    return nn.Sequential(
        *(nn.BatchNorm2d(channels), nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(64, setting.embedding),
    )


class Net(nn.Module):
    """The network: two encoders and a linear layer over both embeddings."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.a, self.b = (encoder_of(setting, place) for place in range(2))
        self.head = nn.Linear(2 * setting.embedding, setting.classes)

    def averaged(self) -> list[Tensor]:
        """Return the tensors that federated averaging averages: parameters, and statistics of batch normalisation."""
        return [*self.parameters(), *(b for b in self.buffers() if b.is_floating_point())]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Logits (B, C)."""
        return self.head(torch.cat([self.a(a), self.b(b)], 1))  # type: ignore[no-any-return]


class Bare:
    """Federated averaging over clients that are slices of three tensors."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting = setting
        (a, b), y = arrays(setting, folder)
        self.a, self.b, self.y = (torch.split(torch.from_numpy(v), setting.rows) for v in (a, b, y))
        torch.manual_seed(1)  # a benchmark script may use the global generator; the package never does
        self.net = Net(setting)
        self.weights = [p.detach().clone() for p in self.net.averaged()]

    def round(self) -> None:
        """Train every client of a random cohort for an epoch; the weighted mean becomes the global model."""
        cohort = torch.randperm(self.setting.clients)[: self.setting.cohort].tolist()
        total = sum(len(self.y[k]) for k in cohort)
        mean = [torch.zeros_like(w) for w in self.weights]
        for k in cohort:
            self.train(k)
            with torch.no_grad():
                for m, p in zip(mean, self.net.averaged(), strict=True):
                    m.add_(p, alpha=len(self.y[k]) / total)
        self.weights = mean

    def train(self, k: int) -> None:
        """One epoch of SGD on client k's rows, from the global model."""
        with torch.no_grad():
            for p, w in zip(self.net.averaged(), self.weights, strict=True):
                p.copy_(w)
        optimiser = torch.optim.SGD(self.net.parameters(), lr=self.setting.lr)
        order = torch.randperm(len(self.y[k]))
        # index_select: three times as fast as table[order] on rows this wide
        a, b, y = (table[k].index_select(0, order) for table in (self.a, self.b, self.y))
        for start in range(0, len(order), self.setting.batch_size):
            rows = slice(start, start + self.setting.batch_size)
            loss = nn.functional.cross_entropy(self.net(a[rows], b[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def main(name: str, folder: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    bare = Bare(SETTINGS[name], Path(folder))
    serve(bare.round, parameters=sum(p.numel() for p in bare.net.parameters()))


if __name__ == "__main__":
    main(*sys.argv[1:])
