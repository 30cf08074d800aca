"""One row per algorithm: options under which the laws are tried. A new algorithm earns all laws by adding its row."""

from polyfed.laws.federation import Row
from polyfed.training.optimisers import Train
from world import LAYERNORM

SGD = Train(lr=0.1, batch_size=16, epochs=2)

PROTOTYPES = {m: {"server": ["parameters", "gradients", "prototypes", "statistic"]} for m in ("a", "b")}
PROFILES = {"shared": {"server": ["parameters", "prototypes", "statistic"]}}
"""What PEPSY's controls need, which belong to no single modality."""

STEPS = Train(lr=0.1)
SILOS = {"partition": "silos", "silos": 3}
INSIDE = {
    "a": {"silo": ["parameters", "embeddings"]},
    "b": {"silo": ["parameters", "embeddings"]},
    "shared": {"silo": ["parameters", "statistic", "ids"]},
}
"""What devices of a silo show their edge: embeddings and sample ids beside what the default allows."""

VALIDATED = {
    "partition": "dirichlet",
    "num": 6,
    "alpha": 1.0,
    "holdings": [["a", "b"], ["a"], ["a", "b"], ["b"], ["a", "b"], ["a", "b"]],
    "validation": 0.2,
}
"""The clients of the federation, with validation rows of their own."""

SHARED = {"server": ["parameters", "statistic"]}
"""What the head and the row counts need, where a row of a modality allows less."""

CUT = {m: {"server": ["parameters", "embeddings"]} for m in "ab"} | {"labels": {"server": ["labels"]}, "shared": SHARED}
GKT = {m: {"server": ["embeddings"]} for m in "ab"} | {
    "labels": {"server": ["labels"]},
    "shared": {"server": ["predictions", "statistic"]},
}

ROWS: dict[str, Row] = {
    "fedavg": Row(),
    "fedprox": Row({"mu": 0.1}),
    "scaffold": Row({"train": SGD}),
    "moon": Row({"mu": 1.0, "projection": 8}),
    "feddyn": Row({"alpha": 0.1}),
    "fednova": Row(),
    "fedbuff": Row(),
    "local": Row(),
    "fedavg-ft": Row(),
    "fedrep": Row({"private_epochs": 2}),
    "lg-fedavg": Row(),
    "fedbn": Row(encoders=LAYERNORM),
    "ditto": Row(),
    "apfl": Row(),
    "pfedme": Row({"lam": 5.0, "inner_steps": 2}),
    "pfedmma": Row(),
    "fedcouncil": Row({"modality_loss": 0.5, "modulation": 0.5, "dropout": 0.2}, clients=VALIDATED),
    "cmsfed": Row({"ratio_rule": "threshold", "dominance_threshold": 1.0}, PROTOTYPES),
    "fedmsplit": Row(),
    "fedogm": Row({"scale_params": "all_weights"}),
    "fedpmr": Row({"per": True}),
    "mfedmc": Row({"uploads": 1, "client_share": 0.6}),
    "fedmchain": Row({"agreement": 0.3}),
    "fedmac": Row(),
    "pepsy": Row({"join": 0.999, "eta": 1.0}, egress=PROFILES),
    "pmcmfl": Row({"contrast": 0.1}, PROTOTYPES),
    "fedproto": Row({}, PROTOTYPES),
    "fedamp": Row({"uploads": 4, "alpha": 10.0, "sigma": 100.0}),
    "fedfomo": Row({"uploads": 3}),
    "pfmml": Row({"uploads": 3, "coefficient_lr": 0.05}),
    "partialfl": Row(
        {"beta": 0.1, "mu": 0.01, "local_hidden": (8,), "server_hidden": (12,)},
        egress={"b": {"server": ["parameters", "embeddings"]}, "shared": SHARED},
        clients={"partition": "dirichlet", "num": 6, "alpha": 1.0, "holdings": [["a", "b"], ["a"]]},
    ),
    "centralized": Row(
        egress={m: {"server": ["raw"]} for m in "ab"}
        | {"labels": {"server": ["labels"]}, "shared": {"server": ["statistic"]}}
    ),
    "split-learning": Row(egress=CUT),
    "splitfed": Row(egress=CUT),
    "hfm": Row({"train": STEPS, "local_rounds": 2, "batch_fraction": 0.4, "mu": 0.1}, INSIDE, SILOS, idle=False),
    "hfl": Row({"mu": 0.1}, clients={"partition": "silos", "silos": 4}, stack={"a": ["a", "b"]}),
    "vfl": Row({"train": STEPS, "local_rounds": 2, "batch_fraction": 0.4}, INSIDE, SILOS, idle=False),
    "fedgkt": Row({"server_hidden": (12,), "server_embedding": 6}, egress=GKT, idle=False),
    "creamfl": Row(
        egress={m: {"server": ["embeddings"]} for m in "ab"} | {"shared": {"server": ["statistic"]}},
        clients={
            "partition": "dirichlet",
            "num": 6,
            "alpha": 1.0,
            "holdings": [["a", "b"], ["a"], ["a", "b"], ["b"]],
            "validation": 0.15,
        },
        idle=False,
    ),
}
