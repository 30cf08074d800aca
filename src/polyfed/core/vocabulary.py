"""What the keys of a recipe are called in other frameworks and in papers.

The frameworks are Flower, PyTorch, FedJAX, pfl-research, NVFlare and FedML. If a recipe contains such a word as an
unknown key, the error text suggests polyfed's key that has the same meaning.
"""

import re

MEANINGS: dict[str, str] = {
    "train.lr": "learning_rate lrate l_rate step_size lr_client client_lr client_learning_rate local_lr"
    " local_learning_rate eta eta_l",
    "train.batch_size": "batch bs batchsize local_batch_size client_batch_size local_bs minibatch_size"
    " train_batch_size",
    "train.epochs": "local_epochs num_epochs n_epochs epoch num_local_epochs local_num_epochs client_epochs local_ep",
    "train.steps": "local_steps num_steps local_num_steps max_steps local_iterations num_local_steps tau",
    "train.optimiser": "optimizer optim client_optimizer local_optimizer client_optimiser opt",
    "train.weight_decay": "wd l2 decay l2_reg",
    "train.clip_norm": "max_grad_norm grad_clip gradient_clipping clip max_norm local_max_grad_norm clip_grad_norm",
    "train.lr_schedule": "scheduler lr_scheduler learning_rate_schedule lr_decay",
    "train.modality_dropout": "modality_drop moddrop modality_dropout_rate modality_drop_rate modal_dropout"
    " modality_drop_prob modality_dropout_prob drop_modality",
    "train.beta1": "betas adam_beta1",
    "train.beta2": "adam_beta2",
    "train.eps": "adam_epsilon epsilon",
    "clients.num": "num_clients n_clients nclients num_partitions num_supernodes n_parties total_clients"
    " client_num_in_total num_users n_silos num_users_total",
    "clients.participation": "fraction_fit fraction_train client_fraction sample_fraction cohort_size cohort"
    " participation_rate clients_per_round client_num_per_round num_clients_per_round min_fit_clients frac join_ratio"
    " sample_rate",
    "clients.alpha": "dirichlet_alpha dir_alpha dirichlet beta_dirichlet concentration partition_alpha",
    "clients.partition": "partitioner partition_method split_method non_iid noniid heterogeneity distribution",
    "clients.min_size": "min_partition_size min_samples min_rows",
    "clients.classes_per_client": "num_classes_per_partition classes_per_user shards_per_client num_classes_per_client",
    "clients.missing": "missing_rate missing_ratio missing_modality missing_modalities modality_missing",
    "clients.missing_rows": "sample_missing_rate modality_missing_rate missing_modality_rate row_missing_rate"
    " sample_missing_ratio missing_row_rate",
    "clients.missing_rows_test": "test_missing_rate missing_rate_test test_missing_ratio",
    "clients.missing_rows_pattern": "missing_pattern missing_type missing_mechanism",
    "clients.validation": "val_fraction val_split validation_split val_ratio",
    "clients.personal_validation": "local_validation own_validation local_val",
    "clients.personal_test": "local_test test_fraction local_test_fraction",
    "rounds": "n_rounds num_rounds nrounds num_server_rounds comm_round comm_rounds communication_rounds"
    " central_num_iterations global_epochs global_rounds",
    "seed": "random_seed random_state rng_seed manual_seed",
    "data.name": "dataset dataset_name data_name",
    "data.path": "data_dir data_path root data_root dataset_path folder",
    "data.standardise": "standardize normalize normalise",
    "algorithm.name": "algorithm_name strategy method aggregator algo fl_algorithm federated_optimizer",
    "model.embedding": "embedding_size embed_dim embedding_dim hidden_size d_hid latent_dim",
    "model.head": "head_hidden classifier",
    "model.fusion": "fusion_method fusion_type",
    "model.encoders": "encoder backbone backbones",
    "server.optimiser": "server_optimizer server_optimiser central_optimizer global_optimizer",
    "server.lr": "server_lr server_learning_rate global_lr eta_g central_lr",
    "server.momentum": "server_momentum",
    "selection.name": "client_selection selector sampler client_sampler client_sampling client_manager",
    "evaluate.every": "eval_every evaluate_every evaluation_frequency frequency_of_the_test eval_interval test_every"
    " eval_gap",
    "engine.name": "backend simulator backend_name runner",
    "engine.device": "gpu cuda use_gpu use_cuda accelerator",
    "engine.threads": "num_threads num_workers n_threads",
    "engine.min_replies": "min_available_clients min_replies_required min_completed_clients",
    "deployment.reply_seconds": "round_timeout timeout task_timeout",
    "checkpoint.every": "save_every checkpoint_every checkpoint_frequency save_interval save_freq",
    "tracking.name": "logger wandb mlflow tensorboard tracker report_to",
    "network.bandwidth_hz": "bandwidth",
    "network.latency_s": "latency delay",
}
"""A map from each key of a recipe to the words that people write instead, in lower case and with underscores."""

ARGUMENTS = {
    "algorithm.name": "algorithm",
    "engine.name": "engine",
    "data.name": "data",
    "data.path": "data",
    "data.standardise": "standardise",
}
"""Keys of a recipe that are arguments of their own in `polyfed.run` and `polyfed.make_recipe`."""

PLACES = {word: place for place, words in MEANINGS.items() for word in words.split()}
"""A map from each word of another framework to the key of a recipe."""


def place_of(word: str) -> str | None:
    """Return the recipe key with the same meaning as a word of another framework, or None for an unknown word.

    >>> place_of("learning-rate"), place_of("numClients"), place_of("aubergine")
    ('train.lr', 'clients.num', None)
    """
    apart = re.sub(r"([a-z])([A-Z])|[-\s]+", r"\1_\2", word)
    return PLACES.get(apart.strip("_").lower())


def advice_for(word: str, section: str = "") -> str | None:
    """Return a hint for an unknown key: the recipe key that has the same meaning. None if there is no such key.

    Within the same section, the hint names only the key. For a key of another section, it also names the section.

    Args:
        word: the unknown key.
        section: the section that contains the key, such as `train`. Empty if the key stands above the first section.

    >>> print(advice_for("learning_rate", section="train"))
    did you mean 'lr'?
    >>> print(advice_for("learning_rate", section="algorithm"))
    did you mean train.lr?
    """
    place = place_of(word)
    if place is None:
        return None
    home, _, key = place.rpartition(".")
    return f"did you mean '{key}'?" if home == section else f"did you mean {place}?"


def argument_for(word: str) -> str | None:
    """Return a hint for an unknown argument of `polyfed.run`: the argument that has the same meaning, or None.

    >>> print(argument_for("learning_rate"))
    did you mean train={'lr': ...}?
    >>> print(argument_for("strategy"))
    did you mean algorithm=...?
    """
    place = place_of(word)
    if place is None:
        return None
    section, _, key = place.rpartition(".")
    own = ARGUMENTS.get(place, "" if section else key)
    return f"did you mean {own}=...?" if own else f"did you mean {section}={{'{key}': ...}}?"
