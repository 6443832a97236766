"""The audit: who changed a tier by hand, from which host, and why.

Each action is an object of the control store, created before the action and never changed; a second object has its outcome. So an action
that cannot be recorded is not made, one that was interrupted has no outcome, and a bucket's object lock protects both.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pydantic import ValidationError

from compactor.control.ports import EnvironmentPorts
from compactor.errors import AlreadyExists, NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import StrictFrozenModel
from compactor.storage.port import ObjectStore

AUDIT_PREFIX = "audit/"
MOST_ACTIONS = 1_000_000
_OUTCOME = ".outcome.json"
ERASURE = "erasure --expedite"
"""Name of the command that erases keys, as it is recorded. Its record has the topic, and neither keys nor hashes of keys."""


class ManualAction(StrictFrozenModel):
    """A command that a person runs, recorded before it changes anything.

    at_ms: by the host's clock.
    command: such as ``topics delete``. targets: partitions, topics or patterns.
    details: the command's other arguments, without keys of records.
    """

    at_ms: int
    user: str
    host: str
    process: int
    command: str
    targets: tuple[str, ...]
    details: dict[str, str | int | bool] = {}
    reason: str = ""
    version: str = ""


class ActionOutcome(StrictFrozenModel):
    """Outcome of a ManualAction. ``error``: empty if it succeeded."""

    at_ms: int
    error: str = ""


class RecordedAction(StrictFrozenModel):
    """Entry of the audit. ``outcome``: None while the command runs, or if its process ended before it could record one."""

    id: str
    action: ManualAction
    outcome: ActionOutcome | None


def record_action(control: ObjectStore, action: ManualAction, action_id: str) -> str:
    """Record a person's command before it is carried out. Return the key for ``record_outcome``. Raises StoreError."""
    key = f"{AUDIT_PREFIX}{action.at_ms:013d}-{action_id}"
    _create_audit_object(control, f"{key}.json", action)
    return key


def record_outcome(control: ObjectStore, key: str, outcome: ActionOutcome) -> None:
    _create_audit_object(control, key + _OUTCOME, outcome)


def list_actions(ports: EnvironmentPorts, since_ms: int = 0) -> Iterator[RecordedAction]:
    """Yield the recorded actions from ``since_ms`` on, newest first. Objects that cannot be parsed are left out."""
    listed = {info.key for info in ports.control.list(AUDIT_PREFIX, after=f"{AUDIT_PREFIX}{since_ms:013d}")}
    for key in sorted((key for key in listed if key.endswith(".json") and not key.endswith(_OUTCOME)), reverse=True):
        name = key.removesuffix(".json")
        try:
            action = ManualAction.model_validate_json(ports.control.get(key))
            ended = ports.control.get(name + _OUTCOME) if name + _OUTCOME in listed else None
            outcome = None if ended is None else ActionOutcome.model_validate_json(ended)
        except (NotFound, ValidationError):
            continue
        yield RecordedAction(id=name.removeprefix(AUDIT_PREFIX), action=action, outcome=outcome)


def latest_erasure_ms(ports: EnvironmentPorts, partition: TopicPartition) -> int | None:
    """Return when the latest erasure of keys from this topic had ended; the present time if it has no outcome, None if no erasure is
    recorded. Raises StoreError.

    Copies that the tier held before that time may hold values that were erased since.
    """
    names = {partition.topic, str(partition), str(partition.first_incarnation)}
    for recorded in islice(list_actions(ports), MOST_ACTIONS):
        if recorded.action.command == ERASURE and names.intersection(recorded.action.targets):
            return recorded.outcome.at_ms if recorded.outcome else ports.clock_ms()
    return None


def _create_audit_object(control: ObjectStore, key: str, value: StrictFrozenModel) -> None:
    try:
        control.create(key, value.model_dump_json().encode())
    except AlreadyExists:
        pass  # the key holds a random id, so that only an earlier attempt of this process can have created it
