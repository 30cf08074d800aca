"""The ClientApp of run_flower.py, in a module of its own because Ray's actors import it by name."""

from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from run_bare import Bare
from settings import SETTINGS

app = ClientApp()


@cache
def trainer(name: str, folder: str) -> Bare:
    """The model and the data of this process; training is that of run_bare.py."""
    torch.set_num_threads(1)
    return Bare(SETTINGS[name], Path(folder))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the rows of the node's partition."""
    config = message.content["config"]
    bare = trainer(str(config["name"]), str(config["folder"]))
    bare.weights = list(message.content["params"].to_torch_state_dict().values())
    client = int(context.node_config["partition-id"])
    bare.train(client)
    content = {
        "params": ArrayRecord(bare.net.state_dict()),
        "metrics": MetricRecord({"num-examples": len(bare.y[client])}),
    }
    return Message(content=RecordDict(content), reply_to=message)
