"""The types of the content of a run's files: `run.json`, `result.json`, and a line of `rounds.jsonl`.

The files may come from somebody else, so their content is checked before it is used. Unknown and missing keys are
allowed, because another version of polyfed may have written the run.
"""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import NotRequired, Required, TypedDict  # noqa: UP035 - pydantic refuses those of `typing` before Python 3.12

from polyfed.core.system.json_and_toml import parse_json

LIMIT = 2**53
"""Whole numbers below this fit into a float and into NumPy's int64."""

Count = Annotated[int, Field(ge=0, lt=LIMIT)]
ClientNumber = Annotated[int, Field(gt=-LIMIT, lt=LIMIT)]
Number = float | None
"""None replaces a number that is not finite."""

Scores = dict[str, dict[str, Number]]

Intervals = dict[str, dict[str, dict[str, Number]]]
"""Group -> metric -> the rows behind it, and its interval of 95 %."""

ANY_KEYS = ConfigDict(extra="allow", strict=True)


@with_config(ANY_KEYS)
class SpentPrivacy(TypedDict):
    """The budget that some rounds have spent: epsilon in total, and by block and kind. None means no protection."""

    epsilon: Number
    blocks: dict[str, dict[str, Number]]


@with_config(ANY_KEYS)
class UnprotectedPart(TypedDict):
    """A field that is sent without protection."""

    message: str
    field: str
    kind: str
    block: str


@with_config(ANY_KEYS)
class PrivacyFacts(SpentPrivacy):
    """The privacy of a run in `result.json`."""

    unit: str
    delta: float
    noise_multiplier: float
    clip_norm: float
    accountant: str
    neighbours: str
    assumption: str
    stopped: str
    unprotected: list[UnprotectedPart]
    not_covered: NotRequired[list[str]]
    noise_norm: NotRequired[float | None]
    simulated: NotRequired[bool]


@with_config(ANY_KEYS)
class RoundRow(TypedDict, total=False):
    """A line of `rounds.jsonl`."""

    round: Required[Count]
    cohort: list[ClientNumber]
    trained: dict[str, list[ClientNumber]]
    missing: dict[str, str]
    pending: dict[str, Count]
    bytes_up: Count
    bytes_down: Count
    train_loss: Number
    simulated_seconds: Number
    seconds: dict[str, Number]
    metrics: Scores
    intervals: Intervals
    confusion: list[list[Count]]
    moments: dict[str, list[Number]]
    training_requests: Count
    evaluation: dict[str, Count]
    norms: dict[str, dict[str, Number]]
    privacy: SpentPrivacy
    personal_accuracy: dict[str, Number]
    personal_score: dict[str, Number]
    logged: dict[str, Any]
    tables: dict[str, list[list[Number]]]
    conformal: dict[str, Any]
    links: dict[str, dict[str, Number]]


@with_config(ANY_KEYS)
class ClientFacts(TypedDict, total=False):
    """One client in `run.json`."""

    id: Required[ClientNumber]
    rows: Required[Count]
    modalities: Required[list[str]]
    name: str
    labels: list[Count]


@with_config(ANY_KEYS)
class DataFacts(TypedDict, total=False):
    """The data in `run.json`."""

    sha256: str | None
    class_names: list[str]


@with_config(ANY_KEYS)
class FrozenFacts(TypedDict, total=False):
    """The frozen parameters in `run.json`."""

    sha256: str


@with_config(ANY_KEYS)
class TaskFacts(TypedDict, total=False):
    """The task in `run.json` and `result.json`."""

    name: str
    score: str
    best: str
    rising: bool


@with_config(ANY_KEYS)
class RunFacts(TypedDict, total=False):
    """The content of `run.json`."""

    run: str
    started: str
    data: DataFacts
    task: TaskFacts
    frozen: FrozenFacts
    constants: FrozenFacts
    num_clients: Count
    clients: list[ClientFacts]
    blocks: dict[str, Count]
    egress: dict[str, dict[str, list[str]]]
    not_in_ledger: list[str]
    captions: dict[str, str]
    audited: bool


@with_config(ANY_KEYS)
class BestRound(TypedDict):
    """The best round by validation in `result.json`."""

    round: Count
    metrics: Scores


@with_config(ANY_KEYS)
class EndOfRun(TypedDict):
    """Why a run ended, in `result.json`."""

    round: Count
    by: str
    why: str


@with_config(ANY_KEYS)
class Calibration(TypedDict):
    """The calibration of the global model in `result.json`: the numbers of each confidence bin."""

    ece: float
    rows: list[float]
    confidence: list[float]
    right: list[float]


@with_config(ANY_KEYS)
class ConformalTable(TypedDict):
    """How many validation rows have a score in which bin: lists of [group, bin, rows]."""

    shape: list[Count]
    rows: list[list[Count]]


@with_config(ANY_KEYS)
class ConformalFacts(TypedDict):
    """The counts of conformal prediction in `result.json`, by group of clients and subset of the modalities."""

    kind: str
    group_by: str
    counts: dict[str, dict[str, ConformalTable]]
    sizes: NotRequired[dict[str, ConformalTable]]


@with_config(ANY_KEYS)
class Backdoor(TypedDict):
    """The success of a backdoor in `result.json`: shares of test rows that the model assigns to the target class."""

    target: Count
    modality: str
    rows: Count
    success: float
    without_trigger: float


@with_config(ANY_KEYS)
class AttackFacts(TypedDict):
    """The simulated attack of a run in `result.json`: its name and the attackers' client numbers."""

    name: str
    clients: list[Count]


@with_config(ANY_KEYS)
class Ranking(TypedDict):
    """How well the global model ranks the test rows of two classes."""

    auroc: float
    average_precision: float
    positive: str


@with_config(ANY_KEYS)
class Baseline(TypedDict):
    """The score of one answer for all test rows."""

    answer: str
    score: float
    rows: Count


@with_config(ANY_KEYS)
class StillFalls(TypedDict):
    """The training loss of a run that needs more rounds, at the start and at the end of its last `rounds`."""

    first: float
    last: float
    rounds: Count


@with_config(ANY_KEYS)
class Sets(TypedDict, total=False):
    """What `predict_set` returns for the test rows: the mean size of its sets or intervals, or why it returns none."""

    coverage: float
    size: float
    holds: float
    least: dict[str, Any]
    rows: Count
    validation_rows: Count
    refused: str


@with_config(ANY_KEYS)
class RunResult(TypedDict, total=False):
    """The content of `result.json`."""

    algorithm: str
    engine: str
    dataset: str
    seed: Annotated[int, Field(ge=0)]
    rounds: Count
    clients: Count
    num_parameters: Count
    num_kept: dict[str, Count]
    calibration: Calibration
    ranking: Ranking
    baseline: Baseline
    still_falls: StillFalls
    sets: Sets
    targets: list[str]
    unseen_clients: list[str]
    conformal: ConformalFacts
    privacy: PrivacyFacts
    attack: AttackFacts
    backdoor: Backdoor
    task: TaskFacts
    metrics: Scores
    intervals: Intervals
    best: BestRound
    stopped: EndOfRun
    bytes_up: Count
    bytes_down: Count
    seconds_total: Number
    seconds_per_round: Number
    seconds_first_round: Number
    simulated_seconds: Number
    logged: dict[str, Number | None]
    concerns: list[str]
    state_sha256: str


@with_config(ANY_KEYS)
class LeakageFinding(TypedDict):
    """The result of one attack in `leakage.json`."""

    attack: str
    kind: str
    block: str
    seen_by: str
    field: str
    status: str
    method: str
    value: Number
    guess: Number
    advantage: Number
    low: Number
    high: Number
    clients: Count
    guesses: Count
    raw: Number
    remark: str


@with_config(ANY_KEYS)
class LeakageFacts(TypedDict):
    """The content of `leakage.json`."""

    rounds: Count
    clients: Count
    shadows: Count
    defences: list[str]
    findings: list[LeakageFinding]
    notes: NotRequired[list[str]]


ROUND_ROW: TypeAdapter[Any] = TypeAdapter(RoundRow)
RUN_FACTS: TypeAdapter[Any] = TypeAdapter(RunFacts)
RUN_RESULT: TypeAdapter[Any] = TypeAdapter(RunResult)
LEAKAGE_AUDIT: TypeAdapter[Any] = TypeAdapter(LeakageFacts)


def parse_as(schema: TypeAdapter[Any], text: str | bytes) -> dict[str, Any]:
    """Parse JSON and check it.

    Args:
        schema: one of the adapters of this file.
        text: the JSON.

    Raises:
        ValueError: `text` is not JSON, or does not match the schema. The text of the error names the first wrong key.
    """
    content: dict[str, Any] = parse_json(text)
    try:
        schema.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    return content
