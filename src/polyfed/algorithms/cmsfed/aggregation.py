"""How CMSFed averages: the weights gamma (Eq. 6), and the classifier's columns of modalities that were not trained."""

from collections.abc import Mapping, Sequence

import torch

from polyfed.algorithms.cmsfed.selection import Choice
from polyfed.core.tree import SHARED, Tree, select
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Replies
from polyfed.selection.submodular import AnySimilarity


def represented(similarity: AnySimilarity, chosen: Sequence[int], rows: Mapping[int, float]) -> dict[int, float]:
    """Return gamma, the weight of each chosen client.

    Every client adds its number of rows to the gamma of the chosen client that is nearest to it, by the distances in
    `similarity`.

    Args:
        similarity: vectors and distances of all clients.
        chosen: the chosen clients.
        rows: the number of rows, or another weight, of every client.
    """
    answered = [client for client in chosen if bool(similarity.known[client])]
    gamma = dict.fromkeys(answered, 0.0)
    if not answered:
        return gamma
    known = similarity.known.nonzero().flatten().tolist()
    nearest = similarity.distance[known][:, answered].argmin(1).tolist()
    for client, place in zip(known, nearest, strict=True):
        gamma[answered[place]] += rows.get(client, 0.0)
    return gamma


def cluster_weights(
    replies: Replies,
    choice: Choice,
    d1: AnySimilarity,
    d2: AnySimilarity | None,
    rows: Mapping[int, float],
    clients: ClientRegistry,
) -> dict[str, dict[int, float]]:
    """Return the weights of the clients for each block: their gamma, which `represented` computes from distances.

    For the block of the weak modality, gamma is computed from the distances D_2. For the other blocks, gamma is
    computed from the distances D_1. Clients of S_w also send the shared block, but have no gamma from D_1. In the mean
    of the shared block, their weight is therefore their gamma from D_2.
    """
    whole = [c for c in replies if c in choice.train_all or not bool(clients.holds[c].all())]
    under_1 = represented(d1, whole, rows)
    under_2 = represented(d2, list(replies), rows) if d2 is not None else {}
    nothing = dict.fromkeys(replies, 0.0)
    weights = dict.fromkeys((*clients.modalities, SHARED), nothing | under_2 | under_1)
    return weights | ({choice.weak: nothing | under_2} if choice.weak and under_2 else {})


def mean_by_clusters(replies: Replies, weights: Mapping[str, Mapping[int, float]]) -> Tree:
    """Average the trained blocks with the weights of `cluster_weights`."""
    distinct = {id(own): own for own in weights.values()}  # most blocks have the same weights
    means = {key: replies.mean("params", own) for key, own in distinct.items()}
    mean: Tree = {}
    for block, own in weights.items():
        mean |= select(means[id(own)], [block])
    return mean


def shares_that_trained(
    replies: Replies, weights: Mapping[str, Mapping[int, float]], fed: Federation
) -> dict[str, float]:
    """Return the share of the cohort that trained each modality, between 0 and 1.

    The share is the weight of the clients that sent the modality's classifier columns, divided by the weight of all
    clients that replied.

    Args:
        replies: the replies of the cohort.
        weights: for each modality, the weights of the clients in the mean of its block.
    """
    shares = {}
    for modality in fed.clients.modalities:
        own = weights[modality]
        total = sum(own[client] for client in replies)
        for name in fed.context.model.head_slice(modality):
            senders = [c for part in replies.parts if name in part.message.params for c in part.clients]  # type: ignore[attr-defined]
            shares[modality] = sum(own[client] for client in senders) / total if total else 1.0
    return shares


def with_whole_classifier(mean: Tree, sent: Tree, shares: Mapping[str, float], fed: Federation) -> Tree:
    """Average the classifier omega over all clients of the cohort, as in the paper.

    The classifier has columns for each modality, and a client sends only the columns of the modalities that it trained.
    `mean` therefore averages each column over only the clients that trained it. This function also includes the other
    clients in the mean of a column. For these clients, it uses the column that the server sent to the cohort. Blocks
    other than omega do not change.

    Args:
        mean: the mean over the clients that trained a block.
        sent: the model that the cohort received.
        shares: by modality, the share of the cohort that trained it.
    """
    after = dict(mean)
    for modality, share in shares.items():
        for name in fed.context.model.head_slice(modality):
            if name in mean:
                after[name] = torch.lerp(sent[name], mean[name], share)
    return after
