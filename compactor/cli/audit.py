"""Recording of what a person does to a tier (``compactor.control.audit``)."""

from __future__ import annotations

import argparse
import getpass
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from compactor import __version__
from compactor.cli.output import Output
from compactor.config.settings import Settings
from compactor.control.audit import ActionOutcome, ManualAction, record_action_and_return_key, record_outcome
from compactor.errors import StoreError, without_secrets
from compactor.storage.factory import open_store
from compactor.tier.kinds import control_url


def invoking_user_name() -> str:
    """Return the name of the user who runs this process, such as ``alice``; with ``sudo`` both users, such as ``alice (as root)``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    caller = os.environ.get("SUDO_USER")
    return f"{caller} (as {user})" if caller and caller != user else user


def operator_user_at_host() -> str:
    """Return the person and the machine that run this command, as ``user@host``. Records of pauses and requests contain this text."""
    return f"{invoking_user_name()}@{socket.gethostname()}"


@contextmanager
def record_action_and_outcome_in_audit_log(
    args: argparse.Namespace, settings: Settings, out: Output, command: str, targets: Sequence[str], **details: str | int | bool
) -> Iterator[None]:
    """Record a manual action in the audit log before the ``with`` block, and its outcome after the block.

    On a tier without a control store nothing is recorded, and a note on stderr says so.

    :param command: command for the record, such as ``undo``.
    :param targets: partitions, topics or patterns on which the command acts.
    :param details: further values for the record.
    :raises StoreError: before the block, if the action cannot be recorded.
    """
    url = control_url(settings)
    if not url:
        out.print_note("note: `audit list` will not show this: control_url under [tier] is not set")
        yield
        return
    control = open_store(url, settings=settings)
    action = ManualAction(
        at_ms=int(time.time() * 1000),
        user=invoking_user_name(),
        host=socket.gethostname(),
        process=os.getpid(),
        command=command,
        targets=tuple(targets),
        details=details,
        reason=getattr(args, "reason", ""),
        version=__version__,
    )
    key = record_action_and_return_key(control, action, secrets.token_hex(8))
    error = ""
    try:
        yield
    except BaseException as raised:
        error = without_secrets(str(raised)) or type(raised).__name__
        raise
    finally:
        try:
            record_outcome(control, key, ActionOutcome(at_ms=int(time.time() * 1000), error=error))
        except StoreError as failed:
            out.print_note(f"warning: the outcome is not in the audit: {failed}")


def record_action_in_audit_log_if(
    must_record: bool, args: argparse.Namespace, settings: Settings, out: Output, command: str, targets: Sequence[str], **details: str | int
) -> AbstractContextManager[None]:
    """Return ``record_action_and_outcome_in_audit_log`` with these arguments, or a context that does nothing if ``must_record`` is false.

    For commands that are recorded only with some of their options.
    """
    return record_action_and_outcome_in_audit_log(args, settings, out, command, targets, **details) if must_record else nullcontext()
